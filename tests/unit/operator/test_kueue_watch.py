"""What is known of Workloads: by lists, by events, and by what was written here, in whatever order they arrive."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from pipetransformer_operator.controller.ports import JobKey, Unavailable
from pipetransformer_operator.kube.api import Api, Object
from pipetransformer_operator.kueue.watch import Workloads
from pipetransformer_operator.plan.accounting import JOB_LABEL

pytestmark = pytest.mark.timeout(20)
KEY = JobKey("default", "digits")


def workload(version: int, name: str = "digits-q0", uid: str = "uid-0") -> Object:
    labels = {JOB_LABEL: "digits"}
    metadata = {"name": name, "namespace": "default", "uid": uid, "labels": labels, "resourceVersion": str(version)}
    return {"metadata": metadata}


class FakeApi(Api):
    """Answers lists in order; each is followed by its events, and then by silence."""

    def __init__(self, *lists: tuple[int, list[Object], list[Object]] | Exception) -> None:
        self._lists = list(lists)
        self._events: list[Object] = []
        self.done = asyncio.Event()

    async def get(self, path: str, *, timeout: float = 0, accept: str = "") -> Object:
        if not self._lists:
            self.done.set()
            await asyncio.Event().wait()
        answer = self._lists.pop(0)
        if isinstance(answer, Exception):
            raise answer
        version, items, self._events = answer
        return {"metadata": {"resourceVersion": str(version)}, "items": items}

    async def watch(
        self,
        path: str,
        version: str,
        seconds: int,
        *,
        bookmarks: bool = False,
        opened: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Object]:
        for event in self._events:
            yield event


async def seen_after(*lists: tuple[int, list[Object], list[Object]] | Exception) -> tuple[Workloads, list[object]]:
    """What is known once these lists and their events were read, and who was told."""
    told: list[object] = []
    api = FakeApi(*lists)
    seen = Workloads(api, [], told.append)
    running = asyncio.create_task(seen.run())
    await api.done.wait()
    running.cancel()
    return seen, told


async def test_nothing_is_known_before_the_first_list_and_an_outage_later_takes_nothing_away() -> None:
    seen, _ = await seen_after(Unavailable("500"))
    assert seen.problem == "Kueue does not answer: 500"
    seen, told = await seen_after((5, [workload(3)], []), Unavailable("500"))
    assert seen.problem == ""
    assert list(seen.of(KEY)) == ["digits-q0"]
    assert told == [KEY, None]


async def test_events_and_lists_bring_what_is_new_and_drop_what_is_gone() -> None:
    changed = {"type": "MODIFIED", "object": workload(6)}
    gone = {"type": "DELETED", "object": workload(7, "digits-q1", "uid-1")}
    seen, _ = await seen_after((5, [workload(3), workload(4, "digits-q1", "uid-1")], [changed, gone]))
    assert {name: one["metadata"]["resourceVersion"] for name, one in seen.of(KEY).items()} == {"digits-q0": "6"}
    seen, _ = await seen_after((5, [workload(3)], []), (9, [], []))
    assert not seen.of(KEY)


async def test_what_was_written_here_is_not_undone_by_what_is_older() -> None:
    seen, _ = await seen_after((5, [workload(3)], []))
    seen.note(workload(8))
    seen.note(workload(7))
    assert seen.of(KEY)["digits-q0"]["metadata"]["resourceVersion"] == "8"
    seen.drop(workload(9))
    seen.note(workload(8))
    assert not seen.of(KEY), "the answer to a write may come after the end"
    seen.note(workload(12, uid="uid-2"))
    seen.drop(workload(9))
    assert seen.of(KEY), "another object has the name now"
