"""A headless Chromium, driven over its debugging pipe: enough of a browser for tests of the page."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
TIMEOUT_S = 90.0


def find_browser() -> str | None:
    """The path of an installed Chromium, or of the one that PELTON_TEST_BROWSER names."""
    return os.environ.get("PELTON_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. Expressions are JavaScript; `errors` has what it logged as an error, refused or threw."""

    def __init__(self, browser: _Pipe, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, params, self._session, self._note)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of an expression; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found}"
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):
                if found := self.run(expression):
                    return found
            time.sleep(0.03)
        raise AssertionError(f"not within {timeout_s} s: {expression}\n{self.errors}\n{self.text('body')[-1500:]}")

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """A real click in the middle of an element."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "Space": 32}
        more: dict[str, Any] = {"text": "\r"} if key == "Enter" else {"text": " "} if key == "Space" else {}
        named = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", modifiers=modifiers, **named, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **named)

    def set_media(self, *, width: int = 1280, height: int = 860, **features: str) -> None:
        """Size of the window and media features, such as prefers_color_scheme="dark"."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        given = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", media="screen", features=given)

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


class _Pipe:
    """Messages are JSON, each ended by a zero byte."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write, self._read = write_fd, read_fd
        self._rest = b""
        self._last_id = 0

    def call(self, method: str, params: dict[str, Any], session: str | None = None, note: Any = None) -> Any:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            found = self._next(deadline, method)
            if found.get("id") == self._last_id:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            if note is not None and "method" in found:
                note(found)

    def _next(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"the browser does not answer {method}"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._rest += part
        data, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(data)
        return found


@contextlib.contextmanager
def browsing(path: str) -> Iterator[Page]:
    """A tab of a browser of its own."""
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # The browser reads from 3 and writes to 4.
        script = f'exec 3<&{to_browser[0]} 4>&{from_browser[1]}; exec "$@"'
        command = [
            "bash", "-c", script, "bash", path, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
            "--no-first-run", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
            "--hide-scrollbars", f"--user-data-dir={folder}", "about:blank",
        ]  # fmt: skip
        process = subprocess.Popen(
            command, pass_fds=(to_browser[0], from_browser[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            pipe = _Pipe(to_browser[1], from_browser[0])
            target = pipe.call("Target.createTarget", {"url": "about:blank"})["targetId"]
            session = pipe.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
            yield Page(pipe, session)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])
