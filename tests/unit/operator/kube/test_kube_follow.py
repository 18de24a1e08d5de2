"""Following objects: where a watch goes on, when a list comes first again, and how soon."""

import pytest

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import Unavailable
from pipetransformer_operator.kube.watches.follow import Followed, follow
from tests.testkit.operator.scripted_api import Answer, Listed, ScriptedApi

pytestmark = pytest.mark.timeout(60)
BROKEN = Unavailable("the connection broke")


def event(version: int, kind: str = "MODIFIED") -> Object:
    return {"type": kind, "object": {"metadata": {"resourceVersion": str(version)}}}


async def read(
    api: ScriptedApi, monkeypatch: pytest.MonkeyPatch, *, relists_always: bool = False, shortest: float = 0.0
) -> list[float]:
    """Follows to the end of the script; returns the pauses after what broke. Scripted watches end at once, so none
    counts as too short unless `shortest` (seconds) is set."""
    pauses: list[float] = []
    monkeypatch.setattr("pipetransformer_operator.kube.watches.follow.SHORTEST_WATCH_SECONDS", shortest)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    class Pods(Followed):
        async def relist(self) -> str:
            version = ""
            async for part in api.list(self.path, self.query):
                version = part["metadata"]["resourceVersion"]
            return version

    async def run() -> None:
        async for _ in follow(api, Pods("/pods", {"labelSelector": "ours"}), relists_always=relists_always):
            pass

    monkeypatch.setattr("asyncio.sleep", sleep)
    await api.answer(run())
    return pauses


async def test_pauses_grow_until_a_watch_is_seen_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[Answer] = [BROKEN, BROKEN, Listed([]), BROKEN, Listed([]), BROKEN]
    assert await read(ScriptedApi(*first), monkeypatch) == [0.5, 1, 2, 4], "a list alone proves nothing"
    works: list[Answer] = [Listed([]), [event(6)], BROKEN, Listed([]), [], BROKEN]
    assert await read(ScriptedApi(*first, *works), monkeypatch) == [0.5, 1, 2, 4, 0.5, 0.5]
    assert await read(ScriptedApi(*[BROKEN] * 7), monkeypatch) == [0.5, 1, 2, 4, 8, 10, 10]


async def test_a_watch_that_ends_at_once_without_an_event_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a proxy that has lost its server: without a pause it would be asked a thousand times a second."""
    api = ScriptedApi(Listed([]), [], Listed([]), [], Listed([]), [event(6)], [])
    assert await read(api, monkeypatch, shortest=1.0) == [0.5, 1, 0.5]
    assert api.asked[:5] == ["list", "watch from 5", "list", "watch from 5", "list"]


async def test_a_list_comes_first_again_after_each_watch_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = ScriptedApi(Listed([]), [event(6)], Listed([], 9), [])
    assert await read(api, monkeypatch, relists_always=True) == []
    assert api.asked == ["list", "watch from 5", "list", "watch from 9", "list"]


async def test_lists_in_parts_and_watches_ask_for_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ScriptedApi(Listed([{"metadata": {}}] * 3), [event(6, "BOOKMARK")], parts=2)
    await read(api, monkeypatch)
    assert len(api.queries) == 4
    assert all(query["labelSelector"] == "ours" for query in api.queries)
    assert api.asked == ["list", "watch from 5", "watch from 6"]


async def test_silence_is_suspect_only_where_the_server_sent_a_bookmark_before(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ScriptedApi(Listed([]), [event(6)], [event(7, "BOOKMARK")], [], BROKEN, Listed([]), [])
    await read(api, monkeypatch)
    assert api.bookmarked == [False, False, True, True, False, False]
