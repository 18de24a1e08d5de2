"""What is known of Workloads: by lists, by events, and by what was written here, in whatever order they arrive."""

import pytest

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import JobKey, Refused, Unavailable
from pipetransformer_operator.kube.events import NO_LISTENER, ClusterListener
from pipetransformer_operator.kueue.watch import Workloads
from tests.testkit.operator.scripted_api import Answer, Listed, ScriptedApi

pytestmark = pytest.mark.timeout(60)
KEY = JobKey("default", "digits")


def workload(version: int, name: str = "digits-q0", uid: str = "uid-0") -> Object:
    labels = {JOB_LABEL: "digits"}
    metadata = {"name": name, "namespace": "default", "uid": uid, "labels": labels, "resourceVersion": str(version)}
    return {"metadata": metadata}


class Told(ClusterListener):
    """Notes who was told."""

    def __init__(self, told: list[object]) -> None:
        self._told = told

    def on_quota_changed(self, key: JobKey | None) -> None:
        self._told.append(key)


async def seen_after(*answers: Answer) -> tuple[Workloads, list[object]]:
    """What is known once these lists and the events after each were read, and who was told."""
    told: list[object] = []
    api = ScriptedApi(*answers)
    seen = Workloads(api, [], Told(told))
    await api.answer(seen.run())
    return seen, told


async def test_nothing_is_known_before_the_first_list_and_outages_take_nothing() -> None:
    seen, _ = await seen_after(Unavailable("500"))
    assert seen.problem("default") == "Kueue does not answer: 500"
    seen, told = await seen_after(Listed([workload(3)]), [], Unavailable("500"))
    assert seen.problem("default") == ""
    assert list(seen.of(KEY)) == ["digits-q0"]
    assert told == [KEY, None]


async def test_whether_kueue_answers_is_as_its_newest_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipetransformer_operator.kube.watches.follow.SHORTEST_WATCH_SECONDS", 0.0)
    assert Workloads(ScriptedApi(), [], NO_LISTENER).answers is None, "it was not asked yet"
    seen, _ = await seen_after(Unavailable("500"))
    assert seen.answers is False
    seen, _ = await seen_after(Unavailable("500"), Listed([workload(3)]), [])
    assert seen.answers is True
    seen, _ = await seen_after(Listed([workload(3)]), [], Unavailable("500"))
    assert seen.answers is False, "although what was seen last is still known"
    api = ScriptedApi(Refused("403"), Listed([workload(3)]))
    seen = Workloads(api, ["deleted", "default"], NO_LISTENER)
    await api.answer(seen.run())
    assert seen.answers is False


async def test_a_namespace_whose_workloads_may_not_be_seen_hides_those_of_no_other() -> None:
    api = ScriptedApi(Refused("403"), Listed([workload(3)]))
    seen = Workloads(api, ["deleted", "default"], NO_LISTENER)
    await api.answer(seen.run())
    assert seen.problem("deleted") == "Kueue does not answer: 403"
    assert seen.problem("default") == ""


async def test_events_and_lists_bring_what_is_new_and_drop_what_is_gone() -> None:
    changed = {"type": "MODIFIED", "object": workload(6)}
    gone = {"type": "DELETED", "object": workload(7, "digits-q1", "uid-1")}
    seen, _ = await seen_after(Listed([workload(3), workload(4, "digits-q1", "uid-1")]), [changed, gone])
    assert {name: one["metadata"]["resourceVersion"] for name, one in seen.of(KEY).items()} == {"digits-q0": "6"}
    seen, told = await seen_after(Listed([workload(3)]), [], Listed([], 9), [])
    assert not seen.of(KEY)
    assert told == [KEY, None, KEY], "the job's next turn follows at once"
    _, told = await seen_after(Listed([workload(3)]), [], Listed([workload(3)]), [])
    assert told == [KEY, None], "a list that shows nothing new wakes nobody"


async def test_what_was_written_here_is_not_undone_by_what_is_older() -> None:
    seen, _ = await seen_after(Listed([workload(3)]), [])
    seen.note(workload(8))
    seen.note(workload(7))
    assert seen.of(KEY)["digits-q0"]["metadata"]["resourceVersion"] == "8"
    seen.drop(workload(9))
    seen.note(workload(8))
    assert not seen.of(KEY), "the answer to a write may come after the end"
    seen.note(workload(12, uid="uid-2"))
    seen.drop(workload(9))
    assert seen.of(KEY), "another object has the name now"
