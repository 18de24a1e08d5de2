"""What is known of pods: by lists in parts, by changes in their order, and after an outage."""

import pytest

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import JobKey, Refused, Unavailable
from pipetransformer_operator.kube.client.api import NO_QUERY, Query
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.watches import follow
from pipetransformer_operator.kube.watches.pod_watch import PodWatch
from tests.testkit.operator.scripted_api import Listed, ScriptedApi

pytestmark = pytest.mark.timeout(60)
KEY, OTHER = JobKey("default", "digits"), JobKey("default", "other")


def pod(version: int, uid: str = "uid-0", job: str = "digits", namespace: str = "default") -> Object:
    labels = {JOB_LABEL: job}
    metadata = {"name": uid, "namespace": namespace, "uid": uid, "labels": labels, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running"}}


def event(kind: str, changed: Object) -> Object:
    return {"type": kind, "object": changed}


class Seen(ClusterListener):
    """What is known once the answers were read, and who was told of what."""

    def __init__(self, api: ScriptedApi, namespaces: tuple[str, ...] = ()) -> None:
        self.api = api
        self.changed: list[JobKey] = []
        self.gone: list[tuple[JobKey, str]] = []
        self.released: list[JobKey] = []
        self.listed: list[str] = []
        self.opened: list[str] = []
        self.refused: list[str] = []
        self.watch = PodWatch(api, namespaces, self)

    def on_pod_changed(self, key: JobKey) -> None:
        self.changed.append(key)

    def on_pod_gone(self, key: JobKey, uid: str) -> None:
        self.gone.append((key, uid))

    def on_accelerators_released(self, by: JobKey | None) -> None:
        assert by is not None
        self.released.append(by)

    def on_pods_listed(self, namespace: str) -> None:
        self.listed.append(namespace)

    def on_watch_opened(self, path: str) -> None:
        self.opened.append(path)

    def on_watch_refused(self, path: str) -> None:
        self.refused.append(path)

    async def read(self) -> "Seen":
        await self.api.answer(self.watch.run())
        return self

    def uids(self, key: JobKey = KEY) -> list[str]:
        return [pod["metadata"]["uid"] for pod in self.watch.of(key)]


async def test_a_list_comes_in_parts_and_only_a_whole_one_counts() -> None:
    seen = Seen(ScriptedApi(Listed([pod(1, f"uid-{index}") for index in range(5)]), parts=2))
    assert not seen.watch.knows("default")
    await seen.read()
    assert seen.watch.knows("default") and seen.listed == [""]
    assert seen.uids() == [f"uid-{index}" for index in range(5)]
    assert seen.api.asked == ["list", "watch from 5"]


async def test_changes_are_taken_and_a_watch_that_ends_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "SHORTEST_WATCH_SECONDS", 0.0)
    bookmark = event("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
    events = [event("ADDED", pod(6, "uid-1")), event("DELETED", pod(7)), event("MODIFIED", pod(8, "uid-1")), bookmark]
    seen = await Seen(ScriptedApi(Listed([pod(1)]), events, [])).read()
    assert seen.uids() == ["uid-1"]
    assert seen.gone == [(KEY, "uid-0")]
    assert seen.changed == [KEY] * 3, "at its first sight and at each change"
    assert seen.api.asked == ["list", "watch from 5", "watch from 9", "watch from 9"]
    assert seen.opened == ["/api/v1/pods"] * 2


async def test_a_pod_releases_its_accelerators_once_when_it_ends_or_is_gone() -> None:
    def placed(version: int, uid: str, phase: str = "Running") -> Object:
        return {**pod(version, uid), "spec": {"nodeName": "node-1"}, "status": {"phase": phase}}

    listed = Listed([placed(1, "uid-0"), placed(2, "uid-1"), pod(3, "uid-2")])
    changed = [event("MODIFIED", placed(4, "uid-0"))]
    ended = [*changed, event("MODIFIED", placed(6, "uid-0", "Failed")), event("DELETED", placed(7, "uid-0", "Failed"))]
    gone = [event("DELETED", placed(8, "uid-1")), event("DELETED", pod(9, "uid-2"))]
    seen = await Seen(ScriptedApi(listed, [*ended, *gone])).read()
    assert seen.released == [KEY, KEY], "the last one never had a node"


async def test_a_pod_that_went_unseen_is_gone_by_the_next_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "FIRST_RETRY_SECONDS", 0.0)
    late = Refused("410: the list took longer than its version is kept")
    both, one = Listed([pod(1), pod(2, "uid-1")]), Listed([pod(2, "uid-1")])
    seen = await Seen(ScriptedApi(Unavailable("503"), late, both, Unavailable("410 Gone"), one)).read()
    assert seen.uids() == ["uid-1"]
    assert seen.gone == [(KEY, "uid-0")]
    assert seen.api.asked == ["list", "list", "list", "watch from 5", "list", "watch from 5"]
    assert seen.refused == ["/api/v1/pods"]


async def test_a_pod_whose_label_changes_leaves_one_job_and_joins_the_other() -> None:
    seen = await Seen(ScriptedApi(Listed([pod(1)]), [event("MODIFIED", pod(6, job="other"))])).read()
    assert not seen.uids(KEY)
    assert seen.uids(OTHER) == ["uid-0"]
    assert seen.gone == [(KEY, "uid-0")]


class TwoNamespaces(ScriptedApi):
    """Each namespace holds one pod, and nothing happens."""

    async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
        namespace = path.split("/")[4]
        items = [pod(1, f"uid-{namespace}", namespace=namespace)]
        return {"metadata": {"resourceVersion": "5"}, "items": items}


async def test_a_list_of_one_namespace_says_nothing_of_anothers_pods() -> None:
    seen = await Seen(TwoNamespaces(), ("a", "b")).read()
    assert set(seen.listed) == {"a", "b"}
    assert not seen.gone
    assert seen.uids(JobKey("a", "digits")) == ["uid-a"]
    assert seen.uids(JobKey("b", "digits")) == ["uid-b"]


class OneForbidden(TwoNamespaces):
    """The first namespace may not be seen."""

    async def get(self, path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
        if "/namespaces/a/" in path:
            raise Refused("403")
        return await super().get(path)


async def test_a_namespace_that_may_not_be_seen_holds_up_no_other() -> None:
    seen = await Seen(OneForbidden(), ("a", "b")).read()
    assert seen.watch.knows("b") and not seen.watch.knows("a")
    assert (seen.listed, seen.refused) == (["b"], ["/api/v1/namespaces/a/pods"])


async def test_the_end_of_a_pod_that_was_never_seen_changes_nothing() -> None:
    ended = [event("DELETED", pod(6, "uid-1")), event("ADDED", pod(7, "uid-2"))]
    seen = await Seen(ScriptedApi(Listed([pod(1)]), ended)).read()
    assert seen.uids() == ["uid-0", "uid-2"]
    assert seen.gone == []
