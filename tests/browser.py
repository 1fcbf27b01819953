"""Headless Chromium by its DevTools protocol: pages as people have them, clicked, drawn on, dropped on and measured."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--force-color-profile=srgb", "--hide-scrollbars"),
)
LIMIT = 30.0


def _find_page(file, process):
    """The address of the page's socket, from the file that a browser writes when it is ready."""
    end = time.monotonic() + LIMIT
    while not (file.exists() and file.read_text().count("\n")):
        assert time.monotonic() < end and process.poll() is None, "the browser does not start"
        time.sleep(0.05)
    port = file.read_text().split()[0]
    with urlopen(f"http://127.0.0.1:{port}/json", timeout=LIMIT) as answer:
        return next(each["webSocketDebuggerUrl"] for each in json.load(answer) if each["type"] == "page")


class Browser:
    """One page in a browser of its own, with nothing of another session; to be used as a context."""

    def __enter__(self):
        from websockets.sync.client import connect

        with ExitStack() as stack:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="hotloop-browser-", ignore_cleanup_errors=True)
            )
            process = subprocess.Popen(
                [PROGRAM, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            stack.callback(process.wait, LIMIT)
            stack.callback(process.kill)
            address = _find_page(Path(folder) / "DevToolsActivePort", process)
            self._socket, self._number = stack.enter_context(connect(address, max_size=None)), 0
            self.problems = []
            """What the console has said in error, and exceptions that nobody caught."""
            for domain in ("Page", "Runtime", "Log", "DOM"):
                self.call(f"{domain}.enable")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def call(self, method, **parameters):
        """What a command of the protocol gives; events that come before it are looked at for problems."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            said = json.loads(self._socket.recv(LIMIT))
            if said.get("id") == self._number:
                assert "error" not in said, (method, said["error"])
                return said["result"]
            self._note(said)

    def _note(self, event):
        found = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            thrown = found["exceptionDetails"]
            self.problems.append(thrown.get("exception", {}).get("description") or thrown["text"])
        elif event.get("method") == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.problems.append(found["entry"]["text"] + " " + found["entry"].get("url", ""))

    def show(self, width, height=900, *, dark=False):
        """The size of the window, which is a phone's below 500, and the scheme of colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address):
        """An address from the beginning, also where only the part after # differs from the last."""
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.problems.clear()
        self.call("Page.navigate", url=address)
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def run(self, script):
        """The value of an expression on the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, script):
        """Until an expression is true."""
        end = time.monotonic() + LIMIT
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"never true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)

    def box(self, selector):
        """Left, top, width and height of an element, scrolled into view."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        return self.run(
            f"(b => [b.left, b.top, b.width, b.height])(document.querySelector({json.dumps(selector)})"
            ".getBoundingClientRect())"
        )

    def draw(self, selector, *points):
        """A stroke with the mouse through points of an element, each a share of its width and height."""
        left, top, width, height = self.box(selector)
        places = [{"x": left + x * width, "y": top + y * height} for x, y in points]
        button = {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **button, **places[0])
        for place in places[1:]:
            self.call("Input.dispatchMouseEvent", type="mouseMoved", buttons=1, **place)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **button, **places[-1])

    def click(self, selector):
        self.draw(selector, (0.5, 0.5))

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, *, shift=False):
        parts = {"key": key, "code": key, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **parts)
        self.call("Input.dispatchKeyEvent", type="keyUp", **parts)

    def drop(self, selector, path):
        """A file dragged from the desktop."""
        left, top, width, height = self.box(selector)
        place = {"x": left + width / 2, "y": top + height / 2}
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, data=data, **place)

    def picture(self, path, *, whole=False):
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(found["data"]))
        return path
