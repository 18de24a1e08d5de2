"""What a job needs besides its pods, where others deleted or changed it while no watch saw that."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.labels import JOB_LABEL, MANAGED_BY
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import Conflict, JobKey, Refused, Unavailable
from pipetransformer_operator.kube.client.api import NO_QUERY, Api, NotFound, Query
from pipetransformer_operator.kube.events import NO_LISTENER, ClusterListener
from pipetransformer_operator.kube.trust import authority
from pipetransformer_operator.kube.trust.authority import CA_CONFIG_MAP, CA_FILE, Publisher
from pipetransformer_operator.kube.watches import follow
from pipetransformer_operator.kube.watches.keeper import Keeper
from pipetransformer_operator.kube.workers.protection import Protection, disruption_budget, release_budgets
from pipetransformer_operator.plan import DisruptionBudget
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.scripted_api import Listed, ScriptedApi

pytestmark = pytest.mark.timeout(60)
BROKEN = Unavailable("the connection broke")


def _budget(min_available: int) -> DisruptionBudget:
    return DisruptionBudget(min_available, claimed=False, unready=True)


class Cluster(Api):
    """One kind is listed and watched by a script; of everything else nothing is heard. What is written is kept."""

    def __init__(self, kind: str) -> None:
        self.kind, self.script, self.others = kind, ScriptedApi(), ScriptedApi()
        self.there: dict[str, Object] = {}

    def _of(self, path: str) -> ScriptedApi:
        return self.script if path.endswith(f"/{self.kind}") else self.others

    async def get(self, path: str, query: Query = NO_QUERY, **options: Any) -> Object:
        return await self._of(path).get(path, query)

    async def watch(self, path: str, version: str, seconds: int, *rest: Any, **options: Any) -> AsyncIterator[Object]:
        async for event in self._of(path).watch(path, version, seconds):
            yield event

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
        assert method == "POST"
        namespace, name = path.split("/namespaces/")[1].split("/")[0], body["metadata"]["name"]
        added = {"namespace": namespace, "uid": f"{namespace}/{name}", "generation": 1}
        made = {"spec": body.get("spec"), "data": body.get("data"), "metadata": {**body["metadata"], **added}}
        self.there[f"{namespace}/{name}"] = made
        answer: Object = body | made
        return answer


def changed(one: Object, **metadata: Any) -> Object:
    return {**one, "metadata": {**one["metadata"], **metadata}}


class Slow(Cluster):
    """One of its namespaces takes long to answer; what a second watch shows happens meanwhile."""

    def __init__(self, kind: str, slow: str) -> None:
        super().__init__(kind)
        self.slow = slow
        self.asked, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.written = asyncio.Queue[str]()

    async def watch(self, path: str, version: str, seconds: int, *rest: Any, **options: Any) -> AsyncIterator[Object]:
        if version == "6":
            await self.asked.wait()
        async for event in super().watch(path, version, seconds):
            yield event

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
        if f"/namespaces/{self.slow}/" in path and not self.answers.is_set():
            self.asked.set()
            await self.answers.wait()
        written = await super().request(method, path, body, **options)
        self.written.put_nowait(path.split("/namespaces/")[1].split("/")[0])
        return written


class Trust:
    trusted = b"trusted"


class Woken(ClusterListener):
    """Notes whose protection was touched."""

    def __init__(self, woken: list[JobKey]) -> None:
        self._woken = woken

    def on_protection_touched(self, key: JobKey) -> None:
        self._woken.append(key)


async def no_pause(seconds: float) -> None:
    pass


@pytest.mark.parametrize("namespaces", [(), ("default",)])
async def test_a_list_after_a_broken_watch_wakes_only_jobs_that_were_touched(
    namespaces: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "FIRST_RETRY_SECONDS", 0)
    api, woken = Cluster("networkpolicies"), list[JobKey]()
    protection = Protection(api)
    jobs = {name: make_job(name).job() for name in ("same", "changed", "deleted", "recreated")}
    for job in jobs.values():
        await protection.apply(job, None)
    policies = {name: api.there[f"default/{name}-workers"] for name in jobs}
    unseen = [
        policies["same"],
        changed(policies["changed"], generation=2),
        changed(policies["recreated"], uid="another"),
    ]
    api.script = ScriptedApi(Listed([]), BROKEN, Listed(unseen, 9), parts=2)
    keeper = Keeper(api, namespaces, protection, Publisher(api, Trust()), Woken(woken))

    await api.script.answer(keeper.run())

    assert api.script.asked == ["list", "watch from 5", "list", "watch from 9"]
    assert sorted(key.name for key in woken) == ["changed", "deleted", "recreated"]
    written = protection.written("/apis/networking.k8s.io/v1", "")
    assert [one["metadata"]["name"] for one in written] == ["same-workers"], "the others are applied anew"


class Edited(Cluster):
    """Somebody changes each object at once, and the watch shows that before the writer has its answer."""

    protection: Protection

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
        made = await super().request(method, path, body, **options)
        folder = path.split("/namespaces/")[0]
        for generation in (1, 2):
            metadata = {**made["metadata"], "generation": generation}
            assert not self.protection.forget_if_touched(JobKey("default", "digits"), folder, metadata, deleted=False)
        return made


async def test_what_others_change_while_it_is_written_is_written_again() -> None:
    api = Edited("networkpolicies")
    api.protection = Protection(api)
    with pytest.raises(Unavailable, match=r"another client changed NetworkPolicy digits-workers"):
        await api.protection.apply(make_job().job(), None)
    assert api.protection.written("/apis/networking.k8s.io/v1", "default") == [], "the next turn writes it"


class Lossy(Cluster):
    """Where an answer is lost, what was asked for is done all the same."""

    loses = False

    async def get(self, path: str, query: Query = NO_QUERY, **options: Any) -> Object:
        return self.there[f"default/{path.rsplit('/', 1)[1]}"]

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
        name = f"default/{body['metadata']['name']}"
        if body["kind"] != "PodDisruptionBudget":
            return await Cluster("networkpolicies").request(method, path, body)
        if method == "POST" and name in self.there:
            raise Conflict(name)
        generation = self.there[name]["metadata"]["generation"] + 1 if name in self.there else 1
        self.there[name] = changed(body, uid="uid", generation=generation)
        if self.loses:
            raise Unavailable("the answer is lost")
        return self.there[name]


async def test_after_a_write_whose_answer_was_lost_a_budget_is_what_is_wanted() -> None:
    api = Lossy("poddisruptionbudgets")
    protection, job = Protection(api), make_job().job()
    await protection.apply(job, _budget(4))
    api.loses = True
    with pytest.raises(Unavailable):
        await protection.apply(job, _budget(3))
    api.loses = False
    await protection.apply(job, _budget(4))
    assert api.there["default/digits-workers"]["spec"]["minAvailable"] == 4


@pytest.mark.parametrize("label", [JOB_LABEL, *MANAGED_BY])
async def test_a_label_that_another_client_removed_is_put_back(label: str) -> None:
    """Without it `helm uninstall` does not find the budget."""
    api, job = Lossy("poddisruptionbudgets"), make_job().job()
    protection, name = Protection(api), "default/digits-workers"
    await protection.apply(job, _budget(4))
    made = api.there[name]
    labels = made["metadata"]["labels"]
    api.there[name] = changed(made, labels={key: value for key, value in labels.items() if key != label})

    # What the watch's selector no longer matches is shown as deleted, with the labels that it had before.
    deleted = label == JOB_LABEL
    shown = (made if deleted else api.there[name])["metadata"]
    assert protection.forget_if_touched(JobKey.of(job), "/apis/policy/v1", shown, deleted=deleted)
    await protection.apply(job, _budget(4))
    assert api.there[name]["metadata"]["labels"] == labels


async def test_only_a_change_of_the_object_as_it_was_applied_wakes_the_job() -> None:
    api, job, folder = Lossy("poddisruptionbudgets"), make_job().job(), "/apis/policy/v1"
    protection, key = Protection(api), JobKey.of(make_job().job())
    await protection.apply(job, _budget(4))
    own = api.there["default/digits-workers"]["metadata"]

    def touched(of: JobKey = key, *, deleted: bool = False, **metadata: Any) -> bool:
        return protection.forget_if_touched(of, folder, {**own, **metadata}, deleted=deleted)

    assert not touched(JobKey("default", "another"))
    assert not touched(name="user-made", deleted=True)
    assert not touched(uid="earlier", deleted=True)
    assert not touched()
    assert [one["metadata"]["name"] for one in protection.written(folder, "default")] == ["digits-workers"]
    assert protection.written(folder, "team") == []
    assert touched(deleted=True) and protection.written(folder, "") == []
    await protection.apply(job, _budget(4))
    protection.forget(key)
    assert protection.written(folder, "") == []


async def test_certificates_that_went_unseen_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.sleep", no_pause)
    api = Cluster("configmaps")
    publisher = Publisher(api, Trust())
    for namespace in ("one", "two", "three"):
        await publisher.publish(namespace)
    left = api.there[f"one/{CA_CONFIG_MAP}"]
    api.there.clear()
    api.script = ScriptedApi(Listed([]), BROKEN, Listed([left]))

    await api.script.answer(Keeper(api, (), Protection(api), publisher, NO_LISTENER).run())

    assert sorted(api.there) == [f"three/{CA_CONFIG_MAP}", f"two/{CA_CONFIG_MAP}"]


async def test_a_namespace_whose_certificates_keep_changing_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(authority, "RESTORE_SECONDS", 0)
    api = Slow("configmaps", "one")
    publisher = Publisher(api, Trust())
    for namespace in ("one", "two"):
        await publisher.publish(namespace)
        await api.written.get()
    theirs = changed(api.there[f"one/{CA_CONFIG_MAP}"], resourceVersion="6") | {"data": {CA_FILE: "nobody's"}}
    gone = changed(api.there[f"two/{CA_CONFIG_MAP}"], resourceVersion="6")
    again = [{"type": "MODIFIED", "object": theirs}] * 5
    api.script = ScriptedApi(Listed([]), [*again, {"type": "DELETED", "object": gone}], again)
    api.there.clear()
    api.answers.clear()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(Keeper(api, (), Protection(api), publisher, NO_LISTENER).run())
        await api.script.done.wait()
        assert await api.written.get() == "two", "while the other does not answer"
        api.answers.set()
        assert [await api.written.get() for _ in range(2)] == ["one", "one"], "anew for what came meanwhile"
        running.cancel()
    assert api.there[f"one/{CA_CONFIG_MAP}"]["data"] == {CA_FILE: "trusted"}


@pytest.mark.parametrize(
    ("owner", "error", "words"),
    [
        ({"kind": "Deployment", "name": "web"}, Refused, "belongs to another owner"),
        ({"kind": "PipeTrainingJob", "name": "digits"}, Unavailable, "of a deleted job of the same name still exists"),
    ],
)
async def test_an_object_of_that_name_which_is_not_the_jobs_is_left_alone(
    owner: Object, error: type[Exception], words: str
) -> None:
    job = make_job().job()

    class Taken(Api):
        """Each object is there already, and another's."""

        def __init__(self) -> None:
            self.patched = 0

        async def get(self, path: str, query: Query = NO_QUERY, **options: Any) -> Object:
            owners = [owner | {"uid": "another", "controller": True}]
            return {"metadata": {"name": path.rpartition("/")[2], "uid": "u", "ownerReferences": owners}, "spec": {}}

        async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
            if method == "POST":
                raise Conflict(path)
            self.patched += 1
            return {"metadata": {"uid": "u", "generation": 2}}

    api = Taken()
    with pytest.raises(error, match=words):
        await Protection(api).apply(job, _budget(1))
    assert not api.patched


class Full(Api):
    """A quota allows no more objects of these kinds. That of the job is there, as an operator that was killed left it.

    The API server counts before it looks whether the object exists."""

    def __init__(self, job: PipeTrainingJob, *, there: bool) -> None:
        self.there, self.patched = there, list[int]()
        self.left = disruption_budget(job, _budget(4))

    async def get(self, path: str, query: Query = NO_QUERY, **options: Any) -> Object:
        if not self.there or "networkpolicies" in path:
            raise NotFound(path)
        return changed(self.left, uid="u", generation=1)

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
        if method == "POST":
            raise Refused("exceeded quota: objects")
        self.patched.append(body["spec"]["minAvailable"])
        return {"metadata": {"uid": "u", "generation": 2}}


@pytest.mark.parametrize("there", [False, True])
async def test_what_protects_a_job_is_kept_up_to_date_where_a_quota_allows_no_more_of_it(there: bool) -> None:
    job = make_job().job()
    api = Full(job, there=there)
    with pytest.raises(Refused, match="exceeded quota"):
        await Protection(api).apply(job, _budget(2))
    assert api.patched == ([2] if there else [])


class Left(Api):
    """Budgets of three namespaces. The first namespace was deleted, with the operator's rights there."""

    def __init__(self) -> None:
        self.budgets = {"two": ["a", "kept", "b"], "three": ["c"]}
        self.deleted = list[str]()

    async def get(self, path: str, query: Query = NO_QUERY, **options: Any) -> Object:
        namespace = path.split("/namespaces/")[1].split("/")[0]
        if namespace not in self.budgets:
            raise Refused(f"poddisruptionbudgets is forbidden in {namespace}")
        number = int(query.get("continue", 0))
        more = {"continue": str(number + 1)} if number + 1 < len(self.budgets[namespace]) else {}
        metadata = {"namespace": namespace, "name": self.budgets[namespace][number], "uid": "u"}
        return {"metadata": more, "items": [{"metadata": metadata}]}

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
        name = path.rsplit("/", 1)[1]
        if name == "kept":
            raise Refused("a policy keeps it")
        self.deleted.append(name)
        return {}


async def test_a_budget_that_cannot_be_deleted_keeps_no_other_one() -> None:
    api = Left()
    with pytest.raises(Refused, match="forbidden in one"):
        await release_budgets(api, ["one", "two", "three"])
    assert sorted(api.deleted) == ["a", "b", "c"]
    with pytest.raises(Refused, match="a policy keeps it"):
        await release_budgets(api, ["two", "three"])
    await release_budgets(api, ["three"])
