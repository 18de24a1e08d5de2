"""An API server that answers lists and watches by a script, and is silent after it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.kube.client.api import LISTED_AT_ONCE, NO_QUERY, Api, Query

VERSION = 5


@dataclass(frozen=True)
class Listed:
    """What a list holds, and the resourceVersion that it is of."""

    items: list[Object]
    version: int = VERSION


#: To a list, or events to a watch, which ends after them; or what is raised.
Answer = Listed | list[Object] | Exception


class ScriptedApi(Api):
    """See the module.

    Args:
        answers: in their order.
        parts: how many objects an answer to a list has at most.

    Attributes:
        asked: each list and watch.
        queries: of each request.
        bookmarked: what each watch was told.
    """

    def __init__(self, *answers: Answer, parts: int = LISTED_AT_ONCE) -> None:
        self._answers = list(answers)
        self._parts = parts
        self._rest: list[Object] = []
        self._version = VERSION
        self.asked: list[str] = []
        self.queries: list[Query] = []
        self.bookmarked: list[bool] = []
        self.done = asyncio.Event()

    async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
        self.queries.append(query)
        if "continue" not in query:
            listed = await self._next("list")
            assert isinstance(listed, Listed)
            self._rest, self._version = listed.items, listed.version
        part, self._rest = self._rest[: self._parts], self._rest[self._parts :]
        more = {"continue": "x"} if self._rest else {}
        return {"metadata": {"resourceVersion": str(self._version), **more}, "items": part}

    async def watch(
        self,
        path: str,
        version: str,
        seconds: int,
        query: Query = NO_QUERY,
        *,
        bookmarks: bool = True,
        bookmarked: bool = False,
        opened: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Object]:
        self.queries.append(query)
        self.bookmarked.append(bookmarked)
        events = await self._next(f"watch from {version}")
        assert isinstance(events, list)
        opened()
        for one in events:
            yield one

    async def answer(self, running: Coroutine[Any, Any, None]) -> None:
        """Runs what asks until it has read the last answer, and asks again."""
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(running)
            await self.done.wait()
            task.cancel()

    async def _next(self, what: str) -> Listed | list[Object]:
        self.asked.append(what)
        if not self._answers:
            self.done.set()
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer
