"""A headless Chromium without a network that shows pages of this machine, for tests."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

from tools.devcluster import debian

_LISTENING = re.compile(r"DevTools listening on (ws://\S+)")
_PATIENCE_SECONDS = 60


class Browser:
    """A browser's one page, spoken with by the DevTools protocol."""

    def __init__(self, address: str) -> None:
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []  #: what pages wrote to the console, and what they failed to load
        self._socket = websocket.create_connection(address, timeout=_PATIENCE_SECONDS)
        self._page: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._page = {"sessionId": session}
        for domain in ("Page", "Log", "Runtime"):
            self._call(f"{domain}.enable")

    def open(self, page: Path, *, width: int, height: int) -> None:
        """Shows a file as a phone or a screen of this size (CSS pixels) does; returns once it has loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Page.navigate", url=page.resolve().as_uri())
        self._until("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, as JSON carries it.

        Raises:
            RuntimeError: the expression failed.
        """
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters, **self._page}))
        answer = self._until(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, awaited: int | str) -> dict[str, Any]:
        """The answer to a call by its number, or the next event of a kind."""
        while True:
            message: dict[str, Any] = json.loads(self._socket.recv())
            if message.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                self.complaints.append(json.dumps(message["params"]))
            if awaited in (message.get("id"), message.get("method")):
                return message


@contextmanager
def running() -> Iterator[Browser]:
    """Starts a browser, which `debian.obtain(debian.BROWSER)` made sure of, and ends it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            str(debian.program("chromium")), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-port=0",
            "--remote-allow-origins=*",
        ]  # fmt: skip
        process = subprocess.Popen(command, env=debian.environment(), stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            found = next((match for line in process.stderr if (match := _LISTENING.search(line))), None)
            if found is None:
                raise RuntimeError("chromium ended before it listened")
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop the browser
            yield Browser(found[1])
        finally:
            process.kill()
            process.wait()
