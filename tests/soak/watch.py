"""A collection as a watch shows it, and whoever wants to know of each change."""

import asyncio
import base64
import contextlib
import json
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

Object = dict[str, Any]
_LINE_BYTES = 2**22


class Watch:
    """Objects of one path, by uid, and a condition that each change notifies.

    Attributes:
        objects: as last shown.
        listeners: called with (type of the event, object, monotonic seconds).
    """

    def __init__(self, kubeconfig: Path, path: str) -> None:
        content = yaml.safe_load(kubeconfig.read_text())
        cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._url = cluster["server"] + path
        self._headers = {"Authorization": f"Bearer {user['token']}"}
        self._context = ssl.create_default_context(cadata=authority)
        self._changed = asyncio.Condition()
        self.objects: dict[str, Object] = {}
        self.listeners: list[Callable[[str, Object, float], None]] = []

    def named(self, name: str) -> Object | None:
        """The newest object of that name."""
        return next((one for one in reversed(self.objects.values()) if one["metadata"]["name"] == name), None)

    async def until(self, what: str, condition: Callable[[], Any], timeout: float) -> Any:
        """Waits until the condition gives something true, asked at each change and each second."""
        deadline = time.monotonic() + timeout
        while not (result := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {timeout:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5), self._changed:
                    await self._changed.wait()
        return result

    async def run(self) -> None:
        """Lists, watches, and lists again where a watch ends, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout, read_bufsize=_LINE_BYTES) as session:
            while True:
                async with session.get(self._url, ssl=self._context) as response:
                    listed = await response.json()
                present = {one["metadata"]["uid"]: one for one in listed["items"]}
                for uid in self.objects.keys() - present.keys():
                    await self._show("DELETED", self.objects[uid])
                for one in present.values():
                    await self._show("MODIFIED", one)
                query = {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"]}
                async with session.get(self._url, params=query, ssl=self._context) as response:
                    async for line in response.content:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        await self._show(event["type"], event["object"])

    async def _show(self, kind: str, one: Object) -> None:
        if kind == "DELETED":
            self.objects.pop(one["metadata"]["uid"], None)
        else:
            self.objects[one["metadata"]["uid"]] = one
        for listener in self.listeners:
            listener(kind, one, time.monotonic())
        async with self._changed:
            self._changed.notify_all()
