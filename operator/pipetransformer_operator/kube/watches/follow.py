"""Objects of the API server as they change: a list, then every change, endlessly.

When the server ends a watch, the next one continues where it ended. When a watch breaks, changes may have been missed,
so a list comes first again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import Refused, Unavailable
from pipetransformer_operator.kube.client.api import NO_QUERY, REQUEST_FAILED, Api, NotFound, Query
from pipetransformer_operator.kube.events import ClusterListener

logger = logging.getLogger(__name__)
#: How long a watch stays open.
WATCH_SECONDS = 120
FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0
#: A watch that ends earlier than this without an event counts as broken, because a proxy may answer in place of the
#: API server.
SHORTEST_WATCH_SECONDS = 1.0


class Followed:
    """Objects to follow, and what is known of them. Subclasses implement `relist`.

    Args:
        path: path of the list.
        query: query of the list and of each watch, such as a selector.
    """

    def __init__(self, path: str, query: Query = NO_QUERY) -> None:
        self.path = path
        self.query = query

    async def relist(self) -> str:
        """Lists the objects, makes what is known equal to the list, and returns its resourceVersion.

        Raises: as `Api.list`.
        """
        raise NotImplementedError

    def on_opened(self) -> None:
        """The server opened a watch."""

    def on_failed(self, error: Exception) -> None:
        """A list or a watch raised `error`; another attempt follows."""


class Reported(Followed):
    """Objects whose watch is reported to listeners.

    Args:
        path: path of the list.
        events: is told how the watch does.
        query: query of the list and of each watch, such as a selector.
        name: of the watch, which listeners are told in place of its path if another watch has the same path.
    """

    def __init__(self, path: str, events: ClusterListener, query: Query = NO_QUERY, name: str = "") -> None:
        super().__init__(path, query)
        self._events = events
        self._name = name or path

    def on_opened(self) -> None:
        """See `Followed`."""
        self._events.on_watch_opened(self._name)

    def on_failed(self, error: Exception) -> None:
        """See `Followed`."""
        if isinstance(error, NotFound | Refused):
            self._events.on_watch_refused(self._name)


class Awaited(Reported):
    """Objects that must be listed before any decision, unless the cluster refuses the list.

    Args:
        path: path of the list.
        events: is told how the watch does, and when the list is answered.
        query: query of the list and of each watch, such as a selector.
        name: see `Reported`.

    Attributes:
        answered: whether the objects were listed, or the cluster refuses that: then no job waits for them.
    """

    def __init__(self, path: str, events: ClusterListener, query: Query = NO_QUERY, name: str = "") -> None:
        super().__init__(path, events, query, name)
        self.answered = False

    def on_answered(self) -> None:
        """The cluster listed the objects, or refused to. `relist` calls this at its end."""
        if not self.answered:
            self.answered = True
            self._events.on_cluster_listed()

    def on_failed(self, error: Exception) -> None:
        """See `Followed`."""
        super().on_failed(error)
        if isinstance(error, NotFound | Refused):
            self.on_answered()


async def follow(
    api: Api, followed: Followed, *, watch_seconds: int = WATCH_SECONDS, relists_always: bool = False
) -> AsyncIterator[tuple[Object, bool]]:
    """Yields each change after the list: the object, and whether it was deleted.

    Args:
        api: client of the API server.
        followed: the objects to list and to watch.
        watch_seconds: how long a watch stays open.
        relists_always: list again after each watch, even if it did not break.
    """
    retry, bookmarked = FIRST_RETRY_SECONDS, False
    while True:
        try:
            version = await followed.relist()
            while True:
                events = api.watch(
                    followed.path,
                    version,
                    watch_seconds,
                    followed.query,
                    bookmarks=not relists_always,
                    bookmarked=bookmarked,
                    opened=followed.on_opened,
                )
                began, works = asyncio.get_running_loop().time(), False
                async for event in events:
                    retry, works = FIRST_RETRY_SECONDS, True
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] == "BOOKMARK":
                        bookmarked = True
                    else:
                        yield event["object"], event["type"] == "DELETED"
                if not works and asyncio.get_running_loop().time() < began + SHORTEST_WATCH_SECONDS:
                    raise Unavailable("the watch ended at once")
                retry = FIRST_RETRY_SECONDS
                if relists_always:
                    break
        except REQUEST_FAILED as error:
            logger.warning("cannot watch %s: %s; trying again in %g s", followed.path, error, retry)
            followed.on_failed(error)
            await asyncio.sleep(retry)
            retry = min(2 * retry, LONGEST_RETRY_SECONDS)
            bookmarked = False  # another server may answer now
