"""The page's files: served by name and nothing else, under a strict policy, readable in every colour."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import pairwise

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from tah2.server.page import add_page, assets

STATIC = {entry.name: entry.read_text(encoding="utf-8") for entry in files("tah2.server").joinpath("static").iterdir()}


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    add_page(app)
    return TestClient(app)


def test_the_page_and_everything_it_names_is_there(client: TestClient):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="(static/[^"]+)"', page.text)
    named += [f"static/{name}" for text in STATIC.values() for name in re.findall(r'from "\./([^"]+)"', text)]
    assert {"static/app.js", "static/style.css", "static/inspector.js"} <= set(named)
    for name in set(named):
        assert client.get(f"/{name}").status_code == 200, name
    assert client.get("/static/app.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static/../page.py",
        "/static/..%2fpage.py",
        "/static/%2e%2e/page.py",
        "/static/..%5cpage.py",
        "/static/%2fetc%2fpasswd",
        "/static//etc/passwd",
        "/static/page.py",
        "/static/app.js%00.css",
        "/static/APP.JS",
        "/static/app.js/",
        "/static/static/app.js",
    ],
)
def test_nothing_else_can_be_reached(client: TestClient, path: str):
    answer = client.get(path, follow_redirects=False)
    assert answer.status_code in (307, 404)
    assert "import" not in answer.text


def test_every_answer_carries_the_policy(client: TestClient):
    for path in ("/", "/static/style.css", "/static/missing.css"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_an_unchanged_file_is_not_sent_again(client: TestClient):
    tag = client.get("/static/app.js").headers["etag"]
    again = client.get("/static/app.js", headers={"If-None-Match": f'"other", {tag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/static/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


def test_the_page_needs_nothing_from_elsewhere_and_nothing_inline():
    for name, text in STATIC.items():
        urls = [url for url in re.findall(r"https?://[^\s\"'<>)]+", text) if url != "http://www.w3.org/2000/svg"]
        assert urls == [], name
    page = STATIC["index.html"]
    assert not re.search(r"\sstyle=|\son[a-z]+=|<style", page)
    assert re.findall(r"<script(?![^>]*src=)", page) == []
    assert not any(
        re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|document\.write", t) for t in STATIC.values()
    )


def test_every_field_has_a_label():
    page = STATIC["index.html"]
    for field in re.finditer(r"<(?:input|textarea)\b", page):
        opened, closed = page.rfind("<label", 0, field.start()), page.rfind("</label>", 0, field.start())
        assert opened > closed, page[field.start() : field.start() + 60]


def test_assets_are_what_the_package_ships():
    assert set(assets()) == set(STATIC)


def colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block))


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def schemes() -> list[dict[str, str]]:
    light, dark = re.findall(r":root \{(.*?)\}", STATIC["style.css"], re.DOTALL)
    return [colours(light), {**colours(light), **colours(dark)}]


@pytest.mark.parametrize("scheme", schemes(), ids=["light", "dark"])
def test_text_reaches_aa_on_every_ground(scheme: dict[str, str]):
    for ink, ground in [
        ("ink", "page"),
        ("ink", "panel"),
        ("ink", "mine"),
        ("quiet", "page"),
        ("quiet", "panel"),
        ("alert", "page"),
        ("on-accent", "accent"),
        ("accent", "panel"),
        *((f"ink-{depth}", f"depth-{depth}") for depth in range(2, 6)),
    ]:
        assert contrast(scheme[ink], scheme[ground]) >= 4.5, (ink, ground)
    assert contrast(scheme["control"], scheme["panel"]) >= 3


@pytest.mark.parametrize("scheme", schemes(), ids=["light", "dark"])
def test_depths_get_steadily_further_from_the_page(scheme: dict[str, str]):
    away = [contrast(scheme["panel"], scheme[f"depth-{depth}"]) for depth in range(2, 6)]
    assert all(nearer < further for nearer, further in pairwise(away))


def test_depth_shows_without_colour():
    rules = dict(re.findall(r'^\[data-depth="(\d)"\] \{([^}]*)\}', STATIC["style.css"], re.MULTILINE))
    lines = {depth: re.sub(r"(background|color):[^;]*;", "", rule).strip() for depth, rule in rules.items()}
    assert lines["1"] == ""
    assert len({lines[depth] for depth in "1234"}) == 4
    assert '.text .token[data-depth="5"]::after' in STATIC["style.css"]
