"""Objects of the API server as they change: a list, then each change, for ever.

A watch that the server ends goes on where it was. After one that broke nobody knows what happened meanwhile, so a list
comes first again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from pipetransformer_operator.controller.ports import Conflict, Unavailable
from pipetransformer_operator.kube.client.api import NO_QUERY, Api, NotFound, Object, Query

logger = logging.getLogger(__name__)
#: A watch is opened anew so often.
WATCH_SECONDS = 120
FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0


async def follow(
    api: Api,
    path: str,
    query: Query = NO_QUERY,
    *,
    relist: Callable[[], Awaitable[str]],
    watch_seconds: int = WATCH_SECONDS,
    relists_always: bool = False,
    opened: Callable[[], None] = lambda: None,
    failed: Callable[[Exception], None] = lambda error: None,
) -> AsyncIterator[tuple[Object, bool]]:
    """Each change after the list: the object, and whether it was deleted.

    Args:
        api: of the cluster.
        path: of the list.
        query: of the list.
        relist: lists, makes what is known equal to that, and returns its resourceVersion. May raise as `Api.list`.
        watch_seconds: how long a watch lasts.
        relists_always: lists after each watch, also one that did not break.
        opened: called with each watch that the server opens.
        failed: called with what a list or a watch raised; another attempt follows.
    """
    retry, bookmarked = FIRST_RETRY_SECONDS, False
    while True:
        try:
            version = await relist()
            while True:
                events = api.watch(
                    path,
                    version,
                    watch_seconds,
                    query,
                    bookmarks=not relists_always,
                    bookmarked=bookmarked,
                    opened=opened,
                )
                async for event in events:
                    retry = FIRST_RETRY_SECONDS
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] == "BOOKMARK":
                        bookmarked = True
                    else:
                        yield event["object"], event["type"] == "DELETED"
                retry = FIRST_RETRY_SECONDS
                if relists_always:
                    break
        except (Conflict, NotFound, Unavailable) as error:
            logger.warning("%s cannot be watched now: %s; again in %g s", path, error, retry)
            failed(error)
            await asyncio.sleep(retry)
            retry = min(2 * retry, LONGEST_RETRY_SECONDS)
            bookmarked = False  # another server may answer now
