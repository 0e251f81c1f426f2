"""The report's page: whole, honest about what is missing, readable by machines, and true to the raw records."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean

import pytest

from tah2.study.report import write_report
from tah2.study.report.sections.further import training_flops
from tah2.study.report.style import PALETTE
from tah2.study.report.view import open_view
from tah2.study.report.write import LACKING, SECTIONS
from tests.study.synthetic import TASKS, VARIANTS, synthetic_study

SHOWN = ("standard", "ouro-m2", "tah2-m2", "tah2-m8", "uniform-weights", "no-forcing", "tah2-m8-at-4", "wide-standard")
FIGURES = {
    "teaser", "gains", "loss-depth", "compute", "latency", "alignment", "curves", "families", "votes", "depth-maps",
    "depth-class-tah2-m2", "depth-class-tah2-m8", "attention-mass", "attention-heads", "attention-maps",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    few = tuple(made for made in VARIANTS if made.name in SHOWN)
    folder = synthetic_study(tmp_path_factory.mktemp("study"), few, bases=2)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "report" / "index.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Counts what the page is made of and finds what it refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.headings: list[int] = []
        self.without_scope = 0
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags[tag] += 1
        if "id" in attributes:
            self.ids[attributes["id"]] += 1
        self.links += [attributes[name] for name in ("href", "src", "xlink:href") if attributes.get(name)]
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        self.without_scope += tag == "th" and "scope" not in attributes


@pytest.fixture(scope="module")
def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def cells(root: Path, table: str) -> list[dict[str, str]]:
    with (root / "report" / "tables" / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_all_sections_and_figures_are_there(root: Path, page: str, read: Reader):
    assert page.count("<h2>") == len(SECTIONS)
    for name in FIGURES:
        assert read.ids[f"figure-{name}"] == 1
        for suffix in ("png", "pdf", "svg"):
            assert (root / "report" / "figures" / f"{name}.{suffix}").stat().st_size > 1000
    assert read.tags["svg"] == len(FIGURES)
    assert LACKING not in page


def test_the_page_needs_nothing_but_itself(page: str, read: Reader):
    assert read.tags["script"] == read.tags["img"] == 0
    assert [link for link in read.links if not link.startswith(("#", "data:"))] == []
    assert not re.search(r"@import|url\((?!#|\"?data:)", page)


def test_the_page_can_be_read_by_machines(page: str, read: Reader):
    assert [name for name, times in read.ids.items() if times > 1] == []
    assert read.without_scope == 0
    assert read.tags["caption"] == read.tags["table"]
    assert read.tags["title"] == 1 + read.tags["svg"] == 1 + read.tags["desc"]
    assert read.headings[0] == 1
    assert all(after <= before + 1 for before, after in zip(read.headings, read.headings[1:], strict=False))
    assert '<html lang="en">' in page


def test_figures_follow_the_readers_light_or_dark(page: str):
    drawn = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    for light, _ in PALETTE.values():
        assert not any(light in picture for picture in drawn)
    assert "prefers-color-scheme:dark" in page
    assert "@media print" in page


def test_no_folder_of_this_machine_is_on_the_page(root: Path, page: str):
    assert str(root) not in page


def raw(root: Path, variant: str) -> list[list[dict]]:
    folders = sorted((root / "units").glob(f"{variant}-b*"))
    return [[json.loads(line) for line in (folder / "grades.jsonl").open()] for folder in folders]


def accuracy(rows: list[dict], task: str | None = None) -> float:
    return mean(mean(row["correct"] for row in rows if row["task"] == name) for name in ([task] if task else TASKS))


@pytest.mark.parametrize("variant", ["standard", "tah2-m2", "tah2-m8"])
def test_the_main_table_says_what_the_raw_records_say(root: Path, variant: str):
    title = next(made.title for made in VARIANTS if made.name == variant)
    row = next(row for row in cells(root, "table-main") if row["Variant"] == title)
    units = raw(root, variant)
    for task in TASKS:
        assert row[task] == f"{100 * mean(accuracy(rows, task) for rows in units):.1f}"
    assert row["Average"].split()[0] == f"{100 * mean(accuracy(rows) for rows in units):.1f}"
    costs = [
        mean(sum(row["flops"] for row in rows) / sum(row["tokens"] for row in rows) for rows in raw(root, name))
        for name in (variant, "standard")
    ]
    assert row["FLOPs/token"] == f"{costs[0] / costs[1]:.2f}×"
    losses = [
        json.loads(path.read_text())["loss"] for path in sorted((root / "units").glob(f"{variant}-b*/validate.json"))
    ]
    assert row["Validation loss"].split()[0] == f"{mean(losses):.4f}"


def test_the_list_of_runs_holds_every_run_with_its_own_accuracy(root: Path):
    rows = {row["Run"]: row for row in cells(root, "table-runs")}
    assert set(rows) == {path.name for path in (root / "units").iterdir()}
    for name, (grades,) in ((name, raw(root, name.removesuffix("-b0-s0"))[:1]) for name in rows if "-b0-" in name):
        if not name.startswith("tah2-m8-"):
            assert rows[name]["Accuracy (%)"] == f"{100 * accuracy(grades):.1f}"


def test_the_search_is_told_rate_by_rate(root: Path, tmp_path: Path):
    copy = shutil.copytree(root, tmp_path / "study", ignore=shutil.ignore_patterns("report", "samples", "analyses"))
    losses = {
        "standard": {1e-3: 0.42, 2e-3: 0.41},
        "ouro-m2": {1e-3: 0.40, 2e-3: None},
        "tah2-m2": {1e-3: 0.3, 2e-3: 0.4},
    }
    study = json.loads((copy / "study.json").read_text())
    for variant, found in losses.items():
        info = json.loads((copy / "units" / f"{variant}-b0-s0" / "unit.json").read_text())
        for rate, loss in found.items():
            unit = f"search-{variant}-lr{rate:g}-b0-s0"
            study["units"].append(unit)
            (copy / "units" / unit).mkdir()
            changed = {**info, "id": unit, "group": "search", "learning_rate": rate}
            (copy / "units" / unit / "unit.json").write_text(json.dumps(changed))
            (copy / "units" / unit / "validate.json").write_text(json.dumps({"loss": loss, "depth/mean": 1.0}))
    study["study"]["variants"]["tah2-m8"]["rate_of"] = "tah2-m2"
    (copy / "study.json").write_text(json.dumps(study))
    text = write_report(copy).read_text(encoding="utf-8")
    rows = {row["Variant"]: row for row in cells(copy, "table-search")}
    assert [rows[name]["Chosen"] for name in ("Standard", "Ouro M=2", "TaH2 M=2")] == ["0.002", "0.001", "0.001"]
    assert [row["Where"] for row in rows.values()] == [
        f"the {edge} of the grid" for edge in ("largest", "smallest", "smallest")
    ]
    assert rows["Ouro M=2"]["loss at 0.002"] == "–"
    assert rows["TaH2 M=2"]["Taken by"] == "tah2-m8"
    assert "Standard (the largest), Ouro M=2 (the smallest) and TaH2 M=2 (the smallest)" in text
    assert (
        next(row for row in cells(copy, "table-runs") if row["Run"].startswith("search-ouro-m2-lr0.002"))[
            "Validation loss"
        ]
        == "diverged"
    )


def test_what_is_not_in_the_training_flops_is_said(root: Path, page: str, tmp_path: Path):
    assert "fitting the updater's start" not in page
    copy = shutil.copytree(root, tmp_path / "study", ignore=shutil.ignore_patterns("report", "samples", "analyses"))
    start = {"updater": "predicted-embedding", "tokens": 16384, "steps": 1500, "batch": 512}
    for path in (copy / "units").glob("*-b?-s0/unit.json"):
        info = json.loads(path.read_text())
        path.write_text(json.dumps({**info, "recipe": {"model": {"start": start}}}))
    notes = training_flops(open_view(copy)).blocks[0].notes
    assert "(1,500 steps of 512 states from 16,384 tokens for TaH2 M=2 and TaH2 M=8)" in notes


def test_changes_of_an_ablation_are_differences_of_raw_accuracies(root: Path):
    row = next(row for row in cells(root, "table-design") if row["Variant"].startswith("Uniform"))
    change = mean(accuracy(rows) for rows in raw(root, "uniform-weights")) - mean(
        accuracy(rows) for rows in raw(root, "tah2-m2")
    )
    assert float(row["Change"].split()[0].replace("−", "-")) == pytest.approx(100 * change, abs=0.051)


def test_gain_shares_add_up(root: Path):
    for row in cells(root, "table-gains"):
        assert sum(float(row[name]) for name in ("Worse (%)", "Little (%)", "Better (%)")) == pytest.approx(
            100, abs=0.2
        )


def test_captions_turn_with_the_numbers(page: str):
    """The synthetic TaH2 is better than Standard and Ouro is not, and the words say both."""
    assert (
        "Below the baseline at every ceiling: Ouro and TaH2" in page or "At or above it at every ceiling: Ouro" in page
    )
    assert "✗ does not" in page
    assert "✓ holds" in page


def test_a_study_that_has_just_begun_has_a_report_that_says_so(tmp_path: Path):
    folder = synthetic_study(tmp_path, VARIANTS[:1], bases=1, responses=False)
    (folder / "summary.json").unlink()
    (folder / "runtime.json").unlink()
    text = write_report(folder).read_text(encoding="utf-8")
    assert text.count('class="missing"') >= 10
    assert "no graded responses" in text
    for unit in (folder / "units").iterdir():
        (unit / "unit.json").unlink()
    bare = write_report(folder).read_text(encoding="utf-8")
    absent = re.search(r"Not part of this study: (.*?)\.</p>", bare).group(1).split("; ")
    assert {"Additional sizes", "Design choices"} <= set(absent)
    assert bare.count("<h2>") == len(SECTIONS) - len(absent)
    assert "Nothing has been trained yet." in bare


def test_one_lost_unit_does_not_cost_the_report(root: Path, tmp_path: Path):
    copy = shutil.copytree(root, tmp_path / "study", ignore=shutil.ignore_patterns("report", "analyses", "samples"))
    shutil.rmtree(copy / "units" / "tah2-m2-b0-s0")
    (copy / "units" / "ouro-m2-b1-s0" / "validate.json").unlink()
    (copy / "units" / "ouro-m2-b1-s0" / "grades.jsonl").unlink()
    (copy / "units" / "tah2-m8-b0-s0" / "train" / "metrics.jsonl").unlink()
    text = write_report(copy).read_text(encoding="utf-8")
    assert text.count("<h2>") == len(SECTIONS)
    assert "TaH2 M=2" in text


def test_grades_of_an_earlier_version_of_the_study_are_left_out(root: Path, tmp_path: Path):
    copy = shutil.copytree(root, tmp_path / "study", ignore=shutil.ignore_patterns("report", "samples"))
    study = json.loads((copy / "study.json").read_text())
    study["study"]["generate"]["cutoffs"] = [16, 32]
    (copy / "study.json").write_text(json.dumps(study))
    text = write_report(copy).read_text(encoding="utf-8")
    assert LACKING not in text
    assert "no graded responses" in text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """
<script>
addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(e => !e.closest(".wide") && !e.closest("svg")
    && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + "#" + e.id);
  const seen = [...document.querySelectorAll("svg.figure")].filter(e => e.getBoundingClientRect().height > 60).length;
  const inks = getComputedStyle(document.body);
  document.title = JSON.stringify({wide, seen, scroll: document.documentElement.scrollWidth - innerWidth,
    requests: performance.getEntriesByType("resource").map(e => e.name), ink: inks.color, paper: inks.backgroundColor});
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
def test_a_browser_shows_it_without_complaint(page: str, tmp_path: Path, width: int, dark: bool):
    probed = tmp_path / "page.html"
    probed.write_text(page.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1400", "--dump-dom",
    ]  # fmt: skip
    if dark:
        flags.append("--blink-settings=preferredColorScheme=0")
    done = subprocess.run(
        [str(CHROMIUM), *flags, probed.as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    found = json.loads(re.search(r"<title>(\{.*?\})</title>", done.stdout).group(1).replace("&amp;", "&"))
    assert found["wide"] == []
    assert found["scroll"] <= 0
    assert found["requests"] == []
    assert found["seen"] == len(FIGURES)
    assert "CONSOLE" not in done.stderr
    lightness = [sum(map(int, re.findall(r"\d+", found[name])[:3])) for name in ("ink", "paper")]
    assert (lightness[0] > lightness[1]) == dark
