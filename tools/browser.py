"""A headless Chromium without a network, with which tests open local pages."""

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
    """The page of a browser, controlled by the DevTools protocol."""

    def __init__(self, address: str) -> None:
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []  #: console messages, exceptions and failed loads
        self._socket = websocket.create_connection(address, timeout=_PATIENCE_SECONDS)
        self._page: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._page = {"sessionId": session}
        for domain in ("Page", "Log", "Runtime"):
            self._call(f"{domain}.enable")

    def open(self, page: Path, *, width: int, height: int) -> None:
        """Opens a file on a screen of this size (CSS pixels), and returns once it has loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Page.navigate", url=page.resolve().as_uri())
        self._until("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """Evaluates a JavaScript expression to a JSON value.

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
        """The answer to the call of a number, or the next event of a method."""
        while True:
            message: dict[str, Any] = json.loads(self._socket.recv())
            if message.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                self.complaints.append(json.dumps(message["params"]))
            if awaited in (message.get("id"), message.get("method")):
                return message


@contextmanager
def running() -> Iterator[Browser]:
    """Starts a browser and ends it. `debian.obtain(debian.BROWSER)` must have run before."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            str(debian.program("chromium")), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-port=0",
            "--remote-allow-origins=*",
        ]  # fmt: skip
        process = subprocess.Popen(command, env=debian.environment(), stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        limit = threading.Timer(_PATIENCE_SECONDS, process.kill)
        limit.start()
        try:
            found = next((match for line in process.stderr if (match := _LISTENING.search(line))), None)
            limit.cancel()
            if found is None:
                raise RuntimeError(f"chromium did not listen within {_PATIENCE_SECONDS} s, or ended before")
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop the browser
            yield Browser(found[1])
        finally:
            limit.cancel()
            process.kill()
            process.wait()
