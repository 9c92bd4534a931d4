"""A real headless Chromium, driven over its DevTools pipe: no driver, no port, no package beyond the browser itself.

    with chromium() as browser:
        page = browser.open("http://127.0.0.1:7080/")
        page.wait("document.title")
        page.screenshot(path)
        print(page.urls, page.errors)

`missing()` says why there can be none.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync --disable-extensions "
    "--remote-debugging-pipe --window-size=1280,900"
).split()
READS, WRITES = 3, 4  # the descriptors of the pipe, in the browser
ANSWER_S = 60.0


def missing() -> str:
    """Say why no browser can be had; "" if one can."""
    return "" if _path() else f"no browser is installed: {', '.join(NAMES)}"


def _path() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser process."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd = write_fd
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        threading.Thread(target=self._read, args=(read_fd,), daemon=True).start()

    def open(self, url: str, *, dark: bool = False, width: int = 1280, height: int = 900) -> Page:
        """Open a page; what it asks and what goes wrong in it is kept from the beginning."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.go(url)
        return page

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Have the browser do something, and return what it answers."""
        number = next(self._numbers)
        answers = self._answers[number] = queue.Queue()
        told = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._write_fd, json.dumps(told).encode() + b"\0")
        answer = answers.get(timeout=ANSWER_S)
        if "error" in answer:
            raise ValueError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _read(self, fd: int) -> None:
        with os.fdopen(fd, "rb") as pipe:
            rest = b""
            while piece := pipe.read1(1 << 16):
                *messages, rest = (rest + piece).split(b"\0")
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers.pop(message["id"]).put(message)
                    elif message.get("sessionId") in self._pages:
                        self._pages[message["sessionId"]].note(message["method"], message["params"])


class Page:
    """One tab. `urls` is all that it asked for, `errors` what its scripts and its console complained of."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.urls: list[str] = []
        self.errors: list[str] = []

    def note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", str(params)))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise's once it is there."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise ValueError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(ValueError):  # the page may be just changing
                if value := self.run(expression):
                    return value
            if time.monotonic() > deadline:
                raise AssertionError(f"never true: {expression}; errors {self.errors}")
            time.sleep(0.05)

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def wheel(self, x: float, y: float, by: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def screenshot(self, path: Path) -> None:
        """Save the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser of our own, without anybody's profile, to the block's end."""
    path = _path()
    assert path is not None
    (reads, to_browser), (from_browser, writes) = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (reads, writes)]

    def arrange() -> None:
        os.dup2(theirs[0], READS)
        os.dup2(theirs[1], WRITES)

    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [path, *OPTIONS, f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=arrange,
            pass_fds=(READS, WRITES),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (reads, writes, *theirs):
            os.close(fd)
        browser = Browser(to_browser, from_browser)
        try:
            yield browser
        finally:
            with contextlib.suppress(OSError, ValueError, queue.Empty):
                browser.call("Browser.close")
            os.close(to_browser)
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
