"""A headless Chromium that tests drive over its DevTools protocol, through a pipe: no package, no open port.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell", "chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # which needs namespaces that containers may lack; the pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


def executable() -> str | None:
    """The first of NAMES on the path, or the program that CHROMIUM names; None without one."""
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser. `evaluate` runs JavaScript in it, `screenshot` draws its first screen."""

    def __init__(self, program: str, profile: Path) -> None:
        ours_in, self._out = os.pipe()  # commands: the browser reads descriptor 3, and answers on 4
        self._in, ours_out = os.pipe()
        # The shell moves the descriptors to 3 and 4; descriptors of a child keep their numbers otherwise.
        move = f'exec "$0" "$@" 3<&{ours_in} 4>&{ours_out}'
        command = ["/bin/bash", "-c", move, program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(command, pass_fds=(ours_in, ours_out), **quiet)  # type: ignore[call-overload]
        os.close(ours_in)
        os.close(ours_out)
        self._read, self._number, self._session = b"", 0, None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            more = os.read(self._in, 2**20)
            assert more, "the browser has ended"
            self._read += more
        text, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(text))

    def show(self, file: Path) -> None:
        """Open a file and wait until it is drawn."""
        self.call("Page.navigate", url=file.resolve().as_uri())
        while self.evaluate("document.readyState + location.href") != f"complete{file.resolve().as_uri()}":
            pass

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the page a width and a height in CSS pixels, and a colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, script: str) -> Any:
        """Return the JSON value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """Write a PNG of the first screen."""
        shot = self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait()


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """Run a browser with a profile of its own."""
    opened = Browser(program, profile)
    try:
        yield opened
    finally:
        opened.close()
