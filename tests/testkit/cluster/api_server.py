"""A client of the API server for benchmarks: plain JSON, all rights, and a watch."""

import json
import ssl
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

Object = dict[str, Any]
PATCH = "application/merge-patch+json"


class NotFound(Exception):
    """No such object."""


class ApiServer:
    """A client with all rights. Use as a context manager.

    Args:
        kubeconfig: of `tools.devcluster`: one cluster, one user with a token.
    """

    def __init__(self, kubeconfig: Path) -> None:
        content = yaml.safe_load(kubeconfig.read_text())
        cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
        self.server: str = cluster["server"]
        self._trusted = ssl.create_default_context(cadata=b64decode(cluster["certificate-authority-data"]).decode())
        self._headers = {"Authorization": f"Bearer {user['token']}"}

    async def __aenter__(self) -> "ApiServer":
        connector = aiohttp.TCPConnector(limit=0, ssl=self._trusted)
        self._session = aiohttp.ClientSession(self.server, connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def send(
        self, method: str, path: str, body: Object | None = None, *, content_type: str = "application/json"
    ) -> Object:
        """One request.

        Raises:
            NotFound: 404.
            RuntimeError: any other status code but 2xx.
        """
        data = None if body is None else json.dumps(body).encode()
        async with self._session.request(method, path, data=data, headers={"Content-Type": content_type}) as response:
            text = await response.read()
        if response.status == 404:
            raise NotFound(f"{method} {path}")
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {text[:500].decode()}")
        answer: Object = json.loads(text)
        return answer

    async def text(self, path: str) -> str:
        """What is served there, such as metrics."""
        async with self._session.get(path) as response:
            return await response.text()

    async def watch(self, path: str, version: str) -> AsyncIterator[Object]:
        """Events after `version`, without an end."""
        while True:
            parameters = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
            timeout = aiohttp.ClientTimeout(total=None)
            async with self._session.get(path, params=parameters, timeout=timeout) as response:
                response.raise_for_status()
                async for line in _lines(response.content):
                    event: Object = json.loads(line)
                    if event["type"] == "ERROR":
                        raise RuntimeError(f"watch of {path}: {event['object']}")
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield event


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length."""
    rest = b""
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
