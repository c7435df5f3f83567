"""Headless Chromium over its debugging pipe: one process for many pages, with media, width, console and pictures."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe")  # fmt: skip


class Browser:
    """Speaks the DevTools protocol: JSON messages that end in a zero byte, over file descriptors 3 (in) and 4 (out)."""

    def __init__(self, executable: str, profile: Path) -> None:
        (take, self._write), (self._read, give) = os.pipe(), os.pipe()
        command = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{take} 4>&{give}', "browser", *command]
        self._process = subprocess.Popen(
            shell, pass_fds=(take, give), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(take)
        os.close(give)
        self._buffer, self._number, self._session = b"", 0, None
        self.console: list[str] = []  # errors, warnings and uncaught exceptions of the page that is open
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command; events that come before it are looked at on the way."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser ended"
            self._buffer += piece
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        kind, params = event.get("method"), event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description") or details["text"])
        elif kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(str([a.get("value") for a in params["args"]]))
        elif kind == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(params["entry"]["text"])

    def open(self, path: Path, width: int = 1280, media: str = "screen", scheme: str = "light") -> None:
        """Load a page and wait until it is whole."""
        self.console.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.call("Page.navigate", url=path.as_uri())
        ready = "new Promise(d => document.readyState === 'complete' ? d() : addEventListener('load', () => d()))"
        while not self.evaluate(f"location.href === {json.dumps(path.as_uri())}"):
            pass
        self.evaluate(ready)

    def evaluate(self, code: str) -> Any:
        """Value of a JavaScript expression; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path, height: int | None = None) -> None:
        """The whole page as PNG, or its upper `height` pixels."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A running browser; skips the test where there is no Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next((path for name in names if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    running = Browser(executable, folder / "profile")
    try:
        yield running
    finally:
        running.close()
