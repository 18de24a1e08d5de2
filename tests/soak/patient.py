"""A client that asks again: the API server of a busy machine may be slow, which is no fault that anybody drew."""

import asyncio
from collections.abc import Mapping
from typing import Any

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import Unavailable
from pipetransformer_operator.kube.client.api import Api

ATTEMPTS = 20
PAUSE_SECONDS = 0.5


class PatientApi:
    """See the module.

    Args:
        api: that asks once.
    """

    def __init__(self, api: Api) -> None:
        self.once = api

    async def get(self, path: str) -> Object:
        """See `Api`."""
        return await self.request("GET", path)

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, content_type: str = "application/json"
    ) -> Object:
        """See `Api`."""
        for _ in range(ATTEMPTS):
            try:
                return await self.once.request(method, path, body, content_type=content_type)
            except Unavailable as error:
                last = error
                await asyncio.sleep(PAUSE_SECONDS)
        raise last
