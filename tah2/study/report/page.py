"""One HTML page that needs nothing but itself: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tah2.study.report.blocks import Section
from tah2.study.report.style import stylesheet

STYLE = """
:root{--page:#fbfbfa;--card:#fffffe;--text:#1d2126;--soft:#535d67;--line:#dfe3e8;--mark:#f4f0f2;--accent:#a8183f;
--note:#fff6dc;--note-line:#d9b13b}
@media screen and (prefers-color-scheme:dark){:root{--page:#101214;--card:#16191d;--text:#e8eaed;--soft:#a5aeb8;
--line:#2f353c;--mark:#262026;--accent:#ff8599;--note:#2d2716;--note-line:#8f762a}}
*{box-sizing:border-box}
html{scroll-behavior:smooth}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif;overflow-wrap:break-word}
main,header,footer{max-width:64rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:2.5rem}
h1{font-size:2rem;line-height:1.2;margin:0 0 .5rem;letter-spacing:-.01em}
h2{font-size:1.4rem;line-height:1.25;margin:3.25rem 0 .75rem;padding-top:1rem;border-top:1px solid var(--line)}
h3{font-size:1.1rem;margin:2rem 0 .5rem}
p{margin:.6rem 0;max-width:46rem}
.lead{font-size:1.1rem;color:var(--soft)}
a{color:var(--accent)}
a:focus-visible,summary:focus-visible,.wide:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
nav ul{list-style:none;margin:1.25rem 0 0;padding:0;display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;font-size:.92rem}
figure{margin:1.5rem 0;padding:1.1rem 1.1rem .8rem;background:var(--card);border:1px solid var(--line);
border-radius:8px;break-inside:avoid}
.picture{display:flex;justify-content:center}
svg.figure{width:100%;height:auto;display:block;font-family:"DejaVu Sans",Verdana,system-ui,sans-serif;
stroke-linejoin:round;stroke-linecap:butt}
figcaption{margin-top:.7rem;font-size:.94rem}
figcaption p{margin:.35rem 0;max-width:none}
.paper{color:var(--soft)}
details{margin:.5rem 0 .3rem;font-size:.9rem}
summary{cursor:pointer;color:var(--soft)}
.table{margin:1.25rem 0}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.86rem;line-height:1.35;font-variant-numeric:tabular-nums;min-width:60%}
caption{text-align:left;padding:0 0 .5rem;color:var(--text);font-size:.94rem;max-width:46rem}
th,td{padding:.32rem .42rem;text-align:right;vertical-align:baseline;white-space:nowrap}
th:first-child{text-align:left;white-space:normal;min-width:7.5rem}
tbody th{font-weight:400}
thead th{border-bottom:1.5px solid var(--soft);font-weight:600;vertical-align:bottom;white-space:normal}
tbody tr:last-child>*{border-bottom:1.5px solid var(--soft)}
tr.rule>*{border-top:1px solid var(--line)}
tr.marked>*{background:var(--mark)}
.words :is(th,td){text-align:left;white-space:normal;vertical-align:top}
.words td{min-width:6rem}.words th{min-width:9rem}
small{color:var(--soft);font-size:.82em}
td small,th small{display:block}td small{white-space:nowrap}
.swatch{display:inline-block;width:.65em;height:.65em;border-radius:50%;margin-right:.45em}
.notes{font-size:.88rem;color:var(--soft)}
.missing{background:var(--note);border-left:3px solid var(--note-line);padding:.6rem .9rem;max-width:none}
code,pre{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;font-size:.9em}
pre{white-space:pre-wrap;background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.7rem .9rem}
.depths{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;font-size:.84rem;line-height:1.9;
white-space:pre-wrap;overflow-wrap:anywhere;margin:.4rem 0 1rem}
.depths span{padding:.12em .08em;border-radius:3px;color:#10151b}
.depths .deep{color:#fff}
.depths .prompt{color:var(--soft)}
.key{font-size:.85rem;color:var(--soft);display:flex;flex-wrap:wrap;gap:.3rem .9rem}
.key i{display:inline-block;width:1.1em;height:1.1em;border-radius:3px;vertical-align:-.2em;margin-right:.35em;
border:1px solid var(--line)}
footer{padding-top:2rem;padding-bottom:3rem;color:var(--soft);font-size:.9rem}
@media (max-width:40rem){body{font-size:15px}figure{padding:.7rem}h1{font-size:1.6rem}}
@media print{body{background:#fff;font-size:10.5pt}main,header,footer{max-width:none;padding:0}figure{border-color:#ccc}
h2,h3{break-after:avoid}.table,tr{break-inside:avoid}.wide{overflow:visible}table{font-size:8pt}nav{display:none}
th,td{padding:.2rem .4rem;white-space:normal}a{color:inherit;text-decoration:none}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""


def render(title: str, lead: str, sections: Sequence[Section], footer: str) -> str:
    """The page: a heading, a table of contents, the sections in order, and how it was made."""
    contents = "".join(f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in sections)
    body = "\n".join(section.html() for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{stylesheet()}{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
<nav aria-label="Contents"><ul>{contents}</ul></nav>
</header>
<main>
{body}
</main>
<footer><p>{escape(footer)}</p></footer>
</body>
</html>
"""
