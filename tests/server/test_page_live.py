"""The page in a real browser against a real server: what people see, type and hear."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.browser import CHROMIUM, Browser
from tests.server.process import ServerProcess
from tests.server.still import listening, still_app

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

KEY = "correct-horse"
IDLE = "!document.querySelector('#send').disabled"
TOKENS = "document.querySelectorAll('.turn .token').length"
EXPECTED_ERRORS = ("status of 400", "status of 401", "status of 503", "ERR_INTERNET_DISCONNECTED")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("chromium"))
    made.size(1200, 800)
    yield made
    try:
        assert [text for text in made.complaints() if not any(known in text for known in EXPECTED_ERRORS)] == []
    finally:
        made.close()


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Browser:
    """The page, freshly opened."""
    browser.open(f"{server.url}/")
    browser.wait("document.querySelector('.column')")
    browser.evaluate("document.querySelector('#more').open = false")
    return browser


def settle(page: Browser, **fields: object) -> None:
    """Set fields by their id, as typing does."""
    for name, value in fields.items():
        page.evaluate(f"document.getElementById({json.dumps(name.replace('_', '-'))}).value = {json.dumps(str(value))}")


def slide(page: Browser, knob: str, value: float, column: int = 0) -> None:
    page.evaluate(
        f"(() => {{ const slider = document.querySelectorAll('.{knob}')[{column}];"
        f" slider.value = {value}; slider.dispatchEvent(new Event('input')); }})()"
    )


def send(page: Browser, text: str, wait: bool = True) -> None:
    page.evaluate("document.querySelector('#message').focus()")
    page.type(text)
    page.press("Enter")
    if wait:
        page.wait(f"{IDLE} && {TOKENS}")


def shown(page: Browser, column: int = 0) -> list[tuple[str, int]]:
    """Text and passes of every token of a column's last answer."""
    rows = page.evaluate(
        f"[...[...document.querySelectorAll('.column')[{column}].querySelectorAll('.turn:not(.mine)')].at(-1)"
        ".querySelectorAll('.token')].map((token) => [token.textContent, Number(token.dataset.passes)])"
    )
    return [(text, depth) for text, depth in rows]


def text_of(page: Browser, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))


def asked(server: ServerProcess, text: str, **more: Any) -> dict[str, Any]:
    """What the API answers to the page's first request."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0.7,
        "max_tokens": 40,
        "seed": 5,
        "max_depth": 3,
        "exit_threshold": 0.5,
        "return_depths": True,
        "return_continue_probs": True,
        "logprobs": True,
    }
    choice: dict[str, Any] = server.post("/v1/chat/completions", **{**body, **more})["choices"][0]
    return choice


@pytest.fixture
def guarded() -> Iterator[str]:
    """A server that asks for a key; its model is not loaded."""
    with listening(still_app(api_keys=(KEY,))) as url:
        yield url


def test_a_missing_key_is_asked_for_in_the_field_that_takes_it(browser: Browser, guarded: str):
    browser.open(f"{guarded}/")
    browser.wait("document.querySelector('#problem').textContent.includes('API key')")
    assert browser.evaluate("document.activeElement.id") == "key"
    browser.type("wrong")
    browser.press("Tab")
    browser.wait("performance.getEntriesByName(new URL('v1/models', location).href).length > 1")
    assert not browser.evaluate("document.querySelector('.column')")
    browser.evaluate("document.querySelector('#key').focus()")
    browser.evaluate("document.querySelector('#key').select()")
    browser.type(KEY)
    browser.press("Tab")
    browser.wait("document.querySelector('.column')")
    assert text_of(browser, "#problem") == ""
    send(browser, "Does the key open the chat too?", wait=False)
    browser.wait(f"{IDLE} && document.querySelector('#problem').textContent")
    assert text_of(browser, "#problem") == "The model is being loaded; try again shortly."


def test_an_answer_is_the_api_s_with_its_depths(page: Browser, server: ServerProcess):
    settle(page, max_tokens=40, seed=5)
    send(page, "Why loops?")
    choice = asked(server, "Why loops?")
    tokens = shown(page)
    assert "".join(text for text, _ in tokens) == choice["message"]["content"]
    written = [(text, depth) for text, depth in tokens if text]
    depths = list(choice["depths"])
    assert len(set(depths)) > 1
    for _, depth in written:
        assert depth in depths
        del depths[: depths.index(depth) + 1]
    stats = text_of(page, ".stats")
    assert f"{len(choice['depths'])} tokens" in stats
    assert f"mean depth {sum(choice['depths']) / len(choice['depths']):.2f}" in stats
    assert "× the plain model's FLOPs" in stats


def test_depth_mean_and_flops_grow_while_the_answer_is_written(page: Browser):
    settle(page, max_tokens=600, seed=1)
    slide(page, "threshold", 0.3)
    send(page, "Go on", wait=False)
    page.wait(f"{TOKENS} > 5")
    assert page.evaluate("document.querySelector('#send').disabled")
    assert page.evaluate("document.querySelector('#columns').getAttribute('aria-busy')") == "true"
    early = text_of(page, ".stats")
    assert "× the plain model's FLOPs" in early
    page.wait(f"document.querySelector('.stats').textContent !== {json.dumps(early)}")
    page.click("#stop")
    page.wait(IDLE)
    assert "Stopped." in text_of(page, ".turn:last-child .note")


def test_stopping_ends_the_work_on_the_server_and_the_chat_goes_on(page: Browser, server: ServerProcess):
    settle(page, max_tokens=900, seed=1)
    send(page, "Go on", wait=False)
    page.wait(f"{TOKENS} > 2")
    page.click("#stop")
    page.wait(IDLE)
    for _ in range(100):
        if server.metric("num_requests_running") == 0:
            break
    assert server.metric("num_requests_running") == 0
    settle(page, max_tokens=5)
    send(page, "And now?")
    assert page.evaluate("document.querySelectorAll('.turn.mine').length") == 2
    assert len(shown(page)) <= 5


def test_pointing_at_a_token_shows_its_inside(page: Browser, server: ServerProcess):
    settle(page, max_tokens=40, seed=5)
    send(page, "Why loops?")
    choice = asked(server, "Why loops?", depth_logprobs=5)
    at = next(at for at, (text, depth) in enumerate(shown(page)) if depth == 3 and text.isascii())
    page.hover(".turn .token", at)
    page.wait("!document.querySelector('#inspector').hidden")
    inside = text_of(page, "#inspector")
    assert "took 3 passes of at most 3" in inside
    assert page.evaluate("document.querySelectorAll('#inspector thead th').length") == 4
    headings = page.evaluate("[...document.querySelectorAll('#inspector thead th')].map((th) => th.textContent)")
    assert headings == ["depth 1", "depth 2", "depth 3", "mixed"]
    assert page.evaluate("document.querySelectorAll('#inspector td.chosen').length") == 4
    probabilities = [row for row in choice["continue_probs"] if len(row) > 1]
    rows = page.evaluate("[...document.querySelectorAll('#inspector table:first-of-type tr')].map((r) => r.innerText)")
    assert [row.split()[-1] for row in rows] == ["on", "on"]
    assert any(f"{100 * row[0]:.0f}%" in rows[0] for row in probabilities)
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=790)
    page.wait("document.querySelector('#inspector').hidden")


def test_tokens_are_reached_and_left_by_keyboard(page: Browser):
    settle(page, max_tokens=60, seed=5)
    send(page, "Why loops?")
    focus = "[...document.querySelectorAll('.turn .token')].indexOf(document.activeElement)"
    assert page.evaluate("document.querySelectorAll('.turn .token[tabindex=\"0\"]').length") == 1
    page.evaluate("document.querySelector('.transcript').focus()")
    page.press("Tab")
    assert page.evaluate(focus) == 0
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "inspector"
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.press("ArrowLeft")
    assert page.evaluate(focus) == 1
    assert not page.evaluate("document.querySelector('#inspector').hidden")
    page.press("End")
    assert page.evaluate(focus) == page.evaluate(TOKENS) - 1
    page.press("Home")
    assert page.evaluate(focus) == 0
    page.press("Escape")
    assert page.evaluate("document.querySelector('#inspector').hidden")
    assert not page.evaluate("document.activeElement.hasAttribute('aria-describedby')")


def test_arrows_move_between_lines(page: Browser):
    page.size(500, 800)
    settle(page, max_tokens=150, seed=5)
    send(page, "Why loops?")
    page.evaluate("document.querySelector('.turn .token').focus()")
    top = "document.activeElement.getBoundingClientRect().top + document.querySelector('.transcript').scrollTop"
    first = page.evaluate(top)
    page.press("ArrowDown")
    assert page.evaluate(top) > first
    page.press("ArrowUp")
    assert page.evaluate(top) == pytest.approx(first, abs=3)
    page.size(1200, 800)


def test_two_settings_answer_the_same_message_side_by_side(page: Browser):
    settle(page, max_tokens=30, seed=9)
    send(page, "First")
    page.click("#compare")
    assert page.evaluate("document.querySelectorAll('.column').length") == 2
    send(page, "Second")
    assert shown(page, 0) == shown(page, 1)
    slide(page, "depth", 1, column=1)
    send(page, "Third")
    assert {depth for _, depth in shown(page, 1)} == {1}
    assert {depth for _, depth in shown(page, 0)} != {1}
    stats = page.evaluate("[...document.querySelectorAll('.stats')].map((line) => line.textContent)")
    assert "1.00 × the plain model's FLOPs" in stats[1]
    assert "1.00 × the plain model's FLOPs" not in stats[0]
    page.click("#compare")
    assert page.evaluate("document.querySelectorAll('.column').length") == 1


def test_a_message_that_is_refused_comes_back_with_the_reason(page: Browser):
    settle(page, max_tokens=100_000)
    send(page, "Too much", wait=False)
    page.wait(f"{IDLE} && document.querySelector('#problem').textContent")
    assert "ask for at most" in text_of(page, "#problem")
    assert page.evaluate("document.querySelector('#message').value") == "Too much"
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0
    settle(page, max_tokens=4)
    page.press("Enter")
    page.wait(f"{IDLE} && {TOKENS}")
    assert text_of(page, "#problem") == ""


def test_a_server_that_is_gone_is_told_in_plain_words(page: Browser):
    offline = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    page.call("Network.emulateNetworkConditions", offline=True, **offline)
    try:
        send(page, "Hello?", wait=False)
        page.wait(f"{IDLE} && document.querySelector('#problem').textContent")
        assert text_of(page, "#problem") == "The server does not answer. Is it still running?"
    finally:
        page.call("Network.emulateNetworkConditions", offline=False, **{**offline, "downloadThroughput": -1})


def test_reset_forgets_everything_and_wrong_fields_are_pointed_at(page: Browser):
    settle(page, max_tokens=4)
    send(page, "Hi")
    page.click("#reset")
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0
    settle(page, max_tokens=0)
    send(page, "Hi", wait=False)
    assert page.evaluate("document.querySelector('#more').open")
    assert page.evaluate(TOKENS) == 0


def test_text_is_text(page: Browser):
    settle(page, max_tokens=3)
    send(page, "<img src=x onerror=alert(1)> **bold** <|im_end|>")
    assert text_of(page, ".turn.mine .text") == "<img src=x onerror=alert(1)> **bold** <|im_end|>"
    assert not page.evaluate("document.querySelector('.turn img')")


def test_screen_readers_hear_the_beginning_and_the_cost_but_not_every_token(page: Browser):
    settle(page, max_tokens=8)
    send(page, "Hi")
    said = text_of(page, "#status")
    assert said.startswith("Setting A: ")
    assert "mean depth" in said
    speaking = "[aria-live], [role=status], [role=alert], [role=log]"
    live = page.evaluate(
        f"[...document.querySelectorAll('{speaking}')]"
        ".filter((node) => node.querySelector('.token') && node.ariaLive !== 'off').length"
    )
    assert live == 0


def test_everything_that_can_be_used_has_a_name(page: Browser):
    page.evaluate("document.querySelector('#more').open = true")
    page.click("#compare")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "slider", "textbox", "spinbutton", "checkbox", "region", "log", "DisclosureTriangle")
    used = [node for node in nodes if node.get("role", {}).get("value") in roles]
    assert len(used) >= 16
    assert [node["role"]["value"] for node in used if not node.get("name", {}).get("value")] == []


@pytest.mark.parametrize("width", [320, 390, 760, 1600])
def test_nothing_is_cut_off_at_any_width(page: Browser, width: int):
    settle(page, max_tokens=80, seed=5)
    send(page, "Hi " + "long" * 60)
    page.click("#compare")
    page.size(width, 700)
    try:
        for scheme in ("light", "dark"):
            page.scheme(scheme)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.hover(".turn .token", 3)
        page.wait("!document.querySelector('#inspector').hidden")
        box = page.evaluate("JSON.parse(JSON.stringify(document.querySelector('#inspector').getBoundingClientRect()))")
        assert box["left"] >= 0
        assert box["right"] <= width
    finally:
        page.scheme("light")
        page.size(1200, 800)


def test_models_without_a_chat_template_continue_the_text(page: Browser):
    tokens = page.evaluate("""(async () => {
        const { request, newsOf } = await import("/static/wire.js");
        const { stream } = await import("/static/api.js");
        const facts = { name: "tiny", chats: false, depthLogprobs: true };
        const turns = [["user", "Once"], ["assistant", " upon"], ["user", "a time"]];
        const column = { setting: { max_depth: 2 }, messages: turns.map(([role, content]) => ({ role, content })) };
        const [path, body] = request(facts, column, "", { max_tokens: 12, seed: 3, temperature: 1 });
        const news = [];
        for await (const chunk of stream(path, body, "")) news.push(newsOf(chunk));
        return [path, body.prompt, news.flatMap(({ tokens }) => tokens), news.at(-1).usage];
    })()""")
    path, prompt, written, usage = tokens
    assert (path, prompt) == ("v1/completions", "Once upon\na time")
    assert len(written) == usage["completion_tokens"] > 1
    assert {token["depth"] for token in written} <= {1, 2}
    assert all(len(token["perDepth"]) == token["depth"] for token in written)
    assert all(len(token["top"]) >= 5 for token in written)


def test_text_that_was_held_back_is_shown_but_is_no_token_of_its_own(page: Browser):
    counted = page.evaluate("""(async () => {
        const { newsOf } = await import("/static/wire.js");
        const said = (delta, more) => newsOf({ choices: [{ delta, ...more }] }).tokens;
        const thought = said({ reasoning_content: "hm" });
        const answer = said({ content: "Yes" }, { depths: [1, 2] });
        return [...thought, ...answer].map(({ text, reasoning, counted }) => [text, reasoning, counted]);
    })()""")
    assert counted == [["hm", True, False], ["", False, True], ["Yes", False, True]]
