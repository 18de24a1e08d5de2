"""The operator's client of the API server, as benchmarks use it: patient, and with watches that do not end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.kube.client.api import NO_QUERY, Api, Query
from pipetransformer_operator.kube.watches.follow import WATCH_SECONDS

#: An overloaded control plane is part of what is measured.
PATIENCE_SECONDS = 300.0


class ApiServer(Api):
    """See the module."""

    async def send(
        self, method: str, path: str, body: Object | None = None, *, content_type: str = "application/json"
    ) -> Object:
        """Sends one request. Raises as `request`."""
        return await self.request(method, path, body, content_type=content_type, timeout=PATIENCE_SECONDS)

    async def text(self, path: str) -> str:
        """Reads a page that is not JSON, such as metrics."""
        async with await self._send("GET", path, {}, timeout=PATIENCE_SECONDS) as answer:
            return await answer.text()

    async def events(self, path: str, version: str, query: Query = NO_QUERY) -> AsyncIterator[Object]:
        """Watches the list at `path` from `version` on, without end."""
        while True:
            async for event in self.watch(path, version, WATCH_SECONDS, query):
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    yield event


@asynccontextmanager
async def api_server(kubeconfig: Path) -> AsyncIterator[ApiServer]:
    """Connects with all rights, and closes the connections at the end.

    Args:
        kubeconfig: of `tools.devcluster`.
    """
    api = await ApiServer.connect(kubeconfig=kubeconfig)
    try:
        yield api
    finally:
        await api.close()
