"""Headless Chromium over its debugging pipe: real keys and pointers, no package between."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
KEYS |= {"Home": 36, "End": 35}


class Browser:
    """One page. `evaluate` returns what an expression is worth; `wait` polls one until it is true."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()

        def descriptors() -> None:  # Chromium reads commands from 3 and answers on 4
            first, second = os.dup(commands), os.dup(answers)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=descriptors,
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._calls, self._buffer = 0, b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = next(t for t in self._targets() if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _targets(self) -> list[dict[str, Any]]:
        for _ in range(100):
            found: list[dict[str, Any]] = self.call("Target.getTargets")["targetInfos"]
            if any(target["type"] == "page" for target in found):
                return found
            time.sleep(0.05)
        raise AssertionError("Chromium opened no page.")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._calls:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], 180)
            assert ready, "Chromium does not answer."
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium has ended."
            self._buffer += data
        body, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(body)
        return message

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, expression: str, timeout: float = 90) -> None:
        end = time.monotonic() + timeout
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, f"{expression} did not become true"
            time.sleep(0.03)

    def press(self, key: str, shift: bool = False) -> None:
        """A key by its name, or one letter."""
        named = KEYS.get(key)
        code: dict[str, Any] = {"key": key, "modifiers": 8 if shift else 0}
        if named is not None:
            code |= {"code": key, "windowsVirtualKeyCode": named}
        if key == "Enter":
            code["text"] = "\r"
        elif named is None:
            code["text"] = key
        self.call("Input.dispatchKeyEvent", type="keyDown" if "text" in code else "rawKeyDown", **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", **{k: v for k, v in code.items() if k != "text"})

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def centre(self, selector: str, at: int = 0) -> tuple[float, float]:
        found = self.evaluate(
            f"(() => {{ const node = document.querySelectorAll({json.dumps(selector)})[{at}];"
            " node.scrollIntoView({block: 'center'}); const box = node.getClientRects()[0];"
            " return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        return float(found[0]), float(found[1])

    def hover(self, selector: str, at: int = 0) -> None:
        x, y = self.centre(selector, at)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str, at: int = 0) -> None:
        x, y = self.centre(selector, at)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """ "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Errors in the console so far: exceptions, refused policies, missing files."""
        self.evaluate("0")
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"].get("exception", {}).get("description")))
            elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"] + " " + event["params"]["entry"].get("url", ""))
        return found
