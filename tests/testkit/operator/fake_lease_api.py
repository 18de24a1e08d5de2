"""An API server that keeps one Lease."""

import copy
import json
from typing import Any

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import Conflict, Unavailable
from pipetransformer_operator.kube.client.api import Api, NotFound


class FakeApi(Api):
    """Keeps one object with its version, as the API server does.

    Attributes:
        object: that it keeps; None if there is none.
        away: it does not answer.
        methods: of the requests that it got.
    """

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.object: Object | None = None
        self.away = False
        self.methods: list[str] = []

    @property
    def version(self) -> str:
        """Of the object."""
        return "" if self.object is None else str(self.object["metadata"]["resourceVersion"])

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
        self.methods.append(method)
        if self.away:
            raise Unavailable("away")
        if method == "GET":
            if self.object is None:
                raise NotFound(path)
            return copy.deepcopy(self.object)
        if method == "PUT" and self.object is None:
            raise NotFound(path)
        sent, now = json.loads(json.dumps(body)), self.object
        if method == "POST" and now is not None:
            raise Conflict(path)
        if now is not None and method == "PATCH":
            sent = now | sent
        if now is not None and sent["metadata"]["resourceVersion"] != now["metadata"]["resourceVersion"]:
            raise Conflict(path)
        version = int(now["metadata"]["resourceVersion"]) + 1 if now else 1
        sent["metadata"]["resourceVersion"] = str(version)
        self.object = sent
        return copy.deepcopy(sent)
