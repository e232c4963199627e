"""A headless Chromium, controlled by the DevTools protocol over two pipes."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 30.0  # time limit of each wait; a start on a busy machine takes a few seconds


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A browser tab. console: what its page printed or threw. dialogs: texts of alert() and the
    like."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._ids = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.console: list[str] = []
        self.dialogs: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its answer; events that arrive
        meanwhile are recorded."""
        wanted = next(self._ids)
        message: dict[str, Any] = {"id": wanted, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            outcome = self._next()
            if outcome.get("id") == wanted:
                assert "error" not in outcome, f"{method}: {outcome['error']}"
                answer: dict[str, Any] = outcome["result"]
                return answer
            self._note(outcome)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._receive, 1 << 20)
            assert part, "Chromium has ended"
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("sessionId") != self._session:  # an event of an earlier tab
            return
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console.append(json.dumps(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
            answer = {"id": next(self._ids), "method": "Page.handleJavaScriptDialog"}
            answer |= {"params": {"accept": True}, "sessionId": self._session}
            os.write(self._send, json.dumps(answer).encode() + b"\0")

    # -- what a test does

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def reload(self) -> None:
        self.run("window.isOld = true")
        self.call("Page.reload")
        self.until("!window.isOld && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression and return its value; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = SECONDS) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < deadline, f"never: {condition}\n{self.run(_SHOWN)}"
            time.sleep(0.05)
        return value

    def type(self, text: str) -> None:
        """Insert text at the focus, as a keyboard would."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: str = "", modifiers: int = 0) -> None:
        """Press and release a key. modifiers: sum of 1 (Alt), 2 (Ctrl) and 8 (Shift)."""
        number = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38}.get(key, 0)
        fields: dict[str, Any] = {
            "key": key,
            "code": code or key,
            "modifiers": modifiers,
            "windowsVirtualKeyCode": number,
        }
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        if modifiers & 3:
            text = {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def size(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Set the window's size in CSS pixels, the colour scheme, and whether it is a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self) -> bytes:
        """Return a screenshot of the window as a PNG, after pending changes are drawn."""
        # After two frames all earlier changes are drawn.
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def shrunk(self, image: bytes, columns: int, rows: int) -> list[int]:
        """Return a PNG scaled to so many columns and rows: red, green, blue and 255 of each
        pixel."""
        encoded = base64.b64encode(image).decode()
        pixels: list[int] = self.run(_SHRINK % (encoded, columns, rows))
        return pixels

    def first_paint(self) -> float:
        """Return the milliseconds from the navigation's start to the first contentful paint."""
        script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        return float(self.until(script))


_SHRINK = """
(async (text, width, height) => {
  const bytes = Uint8Array.from(atob(text), each => each.charCodeAt(0));
  const size = {resizeWidth: width, resizeHeight: height, resizeQuality: "high"};
  const image = await createImageBitmap(new Blob([bytes], {type: "image/png"}), size);
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(image, 0, 0);
  return [...context.getImageData(0, 0, width, height).data];
})("%s", %d, %d)
"""

# Chromium reads file 3 and writes file 4; a shell can name no more than nine of them.
_START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_SHOWN = "document.body?.innerText.slice(0, 2000)"


@contextlib.contextmanager
def chromium(binary: str) -> Iterator[Callable[[], Tab]]:
    """Run a Chromium with a new profile; yield a function that opens a tab."""
    ours, its = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        files = str(ours[0]), str(its[1])
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _START, *files, binary),
                    *("--headless=new", "--remote-debugging-pipe"),
                    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
                    *("--disable-background-networking", "--disable-dev-shm-usage"),
                    f"--user-data-dir={folder}/profile",
                ],
                pass_fds=(ours[0], its[1]),
                stdout=errors,
                stderr=errors,
            )
        os.close(ours[0])
        os.close(its[1])
        try:
            yield lambda: Tab(ours[1], its[0])
        finally:
            os.close(ours[1])
            os.close(its[0])
            process.terminate()
            process.wait(10)
