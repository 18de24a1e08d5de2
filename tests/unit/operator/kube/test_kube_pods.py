"""What a worker's pod says, and what its node's state says of it."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import AsyncMock

import pytest

from pipetransformer_contract.api import JobStatus
from pipetransformer_contract.api.labels import WORKER_LABEL
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.node_health.health import DELETED, NodeHealth
from pipetransformer_operator.kube.workers.placement import PREFERRED
from pipetransformer_operator.kube.workers.pods import controller_uid, is_unattended, observable, observe
from pipetransformer_operator.kube.workers.pool import KubePool
from pipetransformer_operator.kube.workers.rendering import render
from pipetransformer_operator.plan import WorkerPhase
from pipetransformer_operator.plan.losses import words
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.rendered import CHANNEL, pod_of


def seen(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    pod = pod_of(make_job())
    pod["metadata"] |= {"uid": "u", **metadata}
    return observable({**pod, "status": status})


def test_the_trainers_exit_decides_while_a_sidecar_still_runs() -> None:
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 2, "message": "spec.data.path: no such folder"}}}
    status = {"phase": "Running", "containerStatuses": [{"name": "logs", "state": {"running": {}}}, ended]}
    worker = observe(seen(status), "trainer")
    assert worker is not None
    assert (worker.phase, worker.exit_code) == (WorkerPhase.FAILED, 2)
    assert worker.message == "spec.data.path: no such folder"
    assert worker.lingers
    worker = observe(seen(status | {"phase": "Failed"}), "trainer")
    assert worker is not None and not worker.lingers
    ended["state"] = {"terminated": {"exitCode": 0}}
    worker = observe(seen(status | {"phase": "Pending"}), "trainer")
    assert worker is not None and worker.lingers, "the sidecar's image is pulled"
    assert (worker.phase, worker.exit_code) == (WorkerPhase.SUCCEEDED, 0)


def test_a_sidecar_that_ended_is_no_end_of_the_trainer() -> None:
    ended = {"name": "logs", "state": {"terminated": {"exitCode": 1}}}
    running = {"name": "trainer", "state": {"running": {}}}
    worker = observe(seen({"phase": "Running", "containerStatuses": [ended, running]}), "trainer")
    assert worker is not None and worker.phase is WorkerPhase.RUNNING
    assert worker.exit_code is None and not worker.lingers


def test_a_pod_whose_state_the_cluster_does_not_know_failed() -> None:
    worker = observe(seen({"phase": "Unknown"}), "trainer")
    assert worker is not None and worker.phase is WorkerPhase.FAILED


def test_an_evicted_pod_failed_without_an_exit_code_and_says_why() -> None:
    worker = observe(seen({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}), "trainer")
    assert worker is not None
    assert (worker.phase, worker.exit_code, worker.message) == (WorkerPhase.FAILED, None, "Evicted: low on memory")


@pytest.mark.parametrize(
    ("status", "waiting"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"}]},
            "Unschedulable: 0/3",
        ),
        (
            {
                "conditions": [{"type": "PodScheduled", "status": "True"}],
                "containerStatuses": [
                    {"name": "logs", "state": {"running": {}}},
                    {"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}},
                ],
            },
            "ErrImagePull: not found",
        ),
        (
            {
                "conditions": [{"type": "PodReadyToStartContainers", "status": "False"}],
                "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}],
            },
            "PodNotSetUp: it waits for its volumes and its network (ContainerCreating)",
        ),
        (
            {
                "initContainerStatuses": [
                    {"name": "proxy", "started": True, "state": {"running": {}}},
                    {"name": "fetch", "started": False, "state": {"running": {}}},
                ],
                "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}],
            },
            "PodInitializing: init container fetch is not done",
        ),
        (
            {
                "initContainerStatuses": [{"name": "proxy", "started": True, "state": {"running": {}}}],
                "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}],
            },
            "ContainerCreating",
        ),
        ({"initContainerStatuses": [{"name": "i", "state": {"waiting": {"reason": "Creating"}}}]}, "Creating"),
        (
            {
                "conditions": [{"type": "PodReadyToStartContainers", "status": "False"}],
                "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 1}}}],
            },
            "",
        ),
        ({}, ""),
    ],
)
def test_a_pod_that_does_not_run_yet_says_what_it_waits_for(status: dict[str, Any], waiting: str) -> None:
    worker = observe(seen({"phase": "Pending", **status}), "trainer")
    assert worker is not None and worker.why_pending == waiting


def test_a_pod_that_the_cluster_takes_away_is_disrupted() -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    worker = observe(seen({"phase": "Running", "conditions": [target]}), "trainer")
    assert worker is not None and worker.disrupted and not worker.alive and not worker.rejected
    worker = observe(seen({"phase": "Running", "conditions": [target | {"status": "False"}]}), "trainer")
    assert worker is not None and worker.alive


def test_a_pod_rejected_by_its_node_is_disrupted_and_one_that_ran_failed() -> None:
    rejected = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices"}
    worker = observe(seen(rejected), "trainer")
    assert worker is not None and worker.disrupted and worker.rejected
    assert worker.message == "UnexpectedAdmissionError: no healthy devices"
    for other in ({"phase": "Pending"}, {"reason": ""}):
        worker = observe(seen(rejected | other), "trainer")
        assert worker is not None and not worker.rejected
    ran: list[dict[str, Any]] = [{"terminated": {"exitCode": 1}}, {"running": {}}]
    for state in ran:
        worker = observe(seen(rejected | {"containerStatuses": [{"name": "logs", "state": state}]}), "trainer")
        assert worker is not None and not worker.disrupted


def test_an_init_container_that_failed_is_named() -> None:
    fine = {"name": "mount", "state": {"terminated": {"exitCode": 0}}}
    failed = {"name": "fetch", "state": {"terminated": {"exitCode": 3, "reason": "Error", "message": "404"}}}
    worker = observe(seen({"phase": "Failed", "initContainerStatuses": [fine, failed]}), "trainer")
    assert worker is not None and not worker.disrupted
    assert worker.message == "init container fetch: Error: 404"
    worker = observe(seen({"phase": "Running", "initContainerStatuses": [fine, failed]}), "trainer")
    assert worker is not None and worker.message == "", "a sidecar is restarted"


def test_a_worker_that_ran_out_of_memory_says_so() -> None:
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    worker = observe(seen({"phase": "Failed", "containerStatuses": [ended]}), "trainer")
    assert worker is not None and worker.message.startswith("OOMKilled: ")


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("Evicted", "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi. "),
        ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline"),
        ("Evicted", "The node was low on resource: ephemeral-storage. " + "Container x was using 90Gi. " * 30),
    ],
)
def test_a_worker_that_left_no_words_gives_those_of_its_pod(reason: str, message: str) -> None:
    killed: dict[str, Any] = {"exitCode": 137, "reason": "Error"}
    status = {"phase": "Failed", "reason": reason, "message": message}
    worker = observe(
        seen(status | {"containerStatuses": [{"name": "trainer", "state": {"terminated": killed}}]}), "trainer"
    )
    assert worker is not None and worker.exit_code == 137
    assert words(worker).startswith(f"{reason}: {message[:100].strip()}")
    logged = {"exitCode": 1, "reason": "Error", "message": "INFO generation 1\nINFO step 8"}
    worker = observe(
        seen(status | {"containerStatuses": [{"name": "trainer", "state": {"terminated": logged}}]}), "trainer"
    )
    assert worker is not None and words(worker).startswith(reason)
    told = killed | {"message": '{"outcome": "Left", "message": "it was told to stop"}'}
    worker = observe(
        seen(status | {"containerStatuses": [{"name": "trainer", "state": {"terminated": told}}]}), "trainer"
    )
    assert worker is not None and words(worker) == "it was told to stop"


def test_a_worker_that_crashed_gives_the_last_words_of_its_log() -> None:
    log = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\nImportError: no vit\n'
    ended = {"exitCode": 1, "reason": "Error", "message": log}
    status = {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}]}
    worker = observe(seen(status), "trainer")
    assert worker is not None and words(worker) == "ImportError: no vit"
    ended |= {"exitCode": 137}
    worker = observe(seen(status), "trainer")
    assert worker is not None and words(worker) == "Error", "who is killed does not say why"


@pytest.mark.parametrize("reason", ["", "ContainerCannotRun"])
def test_a_worker_that_ended_without_a_word_says_its_reason(reason: str) -> None:
    ended = {"exitCode": 1} | ({"reason": reason} if reason else {})
    status = {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}]}
    worker = observe(seen(status), "trainer")
    assert worker is not None and worker.message == reason


def test_a_pod_that_is_being_deleted_cannot_train() -> None:
    worker = observe(seen({"phase": "Running"}, deletionTimestamp="2026-01-01T00:00:00Z"), "trainer")
    assert worker is not None and worker.terminating and not worker.alive
    assert worker.end_time == datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("labels", [{}, {WORKER_LABEL: "first"}])
def test_a_pod_without_the_number_of_a_worker_is_no_worker(labels: dict[str, str]) -> None:
    assert observe(seen({"phase": "Running"}, labels=labels), "trainer") is None


def test_the_owner_that_controls_a_pod_is_no_other_of_its_owners() -> None:
    owners: list[dict[str, Any]] = [{"uid": "other"}, {"uid": "job", "controller": True}]
    assert controller_uid(seen({}, ownerReferences=owners)) == "job"
    assert controller_uid(seen({}, ownerReferences=owners[:1])) == ""
    orphan = pod_of(make_job())
    del orphan["metadata"]["ownerReferences"]
    assert controller_uid(observable(orphan)) == ""


def test_what_each_pod_tolerates_for_a_while_says_nothing_of_where_its_job_may_run() -> None:
    pod, own = pod_of(make_job()), [{"operator": "Exists"}, {"key": "nvidia.com/gpu", "operator": "Exists"}]
    pod["spec"]["tolerations"] = [{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}, *own]
    assert observable(pod)["spec"]["tolerations"] == own


def node(
    name: str = "node-1",
    *,
    ready: str | None = "True",
    cordoned: bool = False,
    taint: str = "",
    effect: str = "NoSchedule",
) -> dict[str, Any]:
    conditions = [] if ready is None else [{"type": "Ready", "status": ready}]
    spec = {"unschedulable": cordoned} | ({"taints": [{"key": taint, "effect": effect}]} if taint else {})
    return {"metadata": {"name": name}, "spec": spec, "status": {"conditions": conditions}}


@pytest.mark.parametrize(
    ("shown", "draining", "lost"),
    [
        (node(), False, False),
        (node(ready=None), False, False),
        (node(cordoned=True), True, False),
        (node(ready="Unknown"), False, True),
        (node(ready="False", cordoned=True), True, True),
        (node("node-2", ready="Unknown", cordoned=True), False, False),
        (node(taint="karpenter.sh/disrupted"), True, False),
        (node(taint="ToBeDeletedByClusterAutoscaler"), True, False),
        (node(taint="ToBeDeletedByClusterAutoscaler", effect="PreferNoSchedule"), False, False),
        (node(taint="nvidia.com/gpu"), False, False),
    ],
    ids=["well", "new", "cordoned", "silent", "broken", "another", "Karpenter", "autoscaler", "candidate", "gpu"],
)
def test_what_is_wrong_with_its_node_is_seen_of_a_pod(shown: dict[str, Any], draining: bool, lost: bool) -> None:
    nodes, pod = NodeHealth(), seen({"phase": "Running"})
    pod["spec"]["nodeName"] = "node-1"
    assert nodes.note(shown, deleted=False) == bool(nodes.draining or nodes.lost)
    assert not nodes.note(shown, deleted=False), "it is no news"
    worker = observe(pod, "trainer", nodes)
    assert worker is not None
    assert (worker.draining, worker.node_lost) == (draining, lost)
    nodes.note(shown, deleted=True)
    assert not nodes.draining and nodes.lost == {shown["metadata"]["name"]}, "what was bound to it will not start"
    worker = observe(pod, "trainer", nodes)
    assert worker is not None and worker.node_gone == (shown["metadata"]["name"] == "node-1")
    assert nodes.note(node(shown["metadata"]["name"]), deleted=False), "it is back"
    assert not nodes.lost and not nodes.is_gone(shown["metadata"]["name"])


def test_a_node_with_more_room_than_before_is_told_of() -> None:
    appeared = 0

    class Counting(ClusterListener):
        def on_accelerators_released(self, by: JobKey | None) -> None:
            nonlocal appeared
            appeared += 1

    nodes = NodeHealth(events=Counting())

    def shows(
        told: bool, *, gpus: int = 0, deleted: bool = False, model: str = "a100", tainted: bool = False, **state: Any
    ) -> None:
        before, shown = appeared, node(**state)
        shown["status"]["allocatable"] = {"cpu": "96", "nvidia.com/gpu": str(gpus)}
        shown["metadata"]["labels"] = {"gpu": model}
        shown["spec"]["taints"] = [{"key": "team", "effect": "NoSchedule"}] if tainted else []
        nodes.note(shown, deleted=deleted)
        assert (appeared > before) == told, (gpus, state)

    shows(False, ready="False")
    shows(True)
    shows(False)
    shows(True, gpus=8)
    shows(False, gpus=7)
    shows(True, gpus=8)
    shows(False, gpus=8, cordoned=True)
    shows(True, gpus=8)
    shows(False, gpus=8, tainted=True)
    shows(True, gpus=8)
    shows(True, gpus=8, model="h100")
    shows(False, gpus=8, deleted=True)
    shows(True, gpus=8)


def test_deleted_nodes_are_not_remembered_for_ever() -> None:
    nodes = NodeHealth()
    for number in range(DELETED + 1):
        nodes.note(node(f"node-{number}"), deleted=True)
    assert len(nodes.lost) == DELETED and "node-0" not in nodes.lost


def test_a_node_is_in_doubt_for_a_while_and_new_workers_keep_off_it() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    nodes, pod = NodeHealth(lambda: now), seen({"phase": "Pending"})
    pod["spec"]["nodeName"] = "node-1"
    nodes.doubt("uid", {"node-1": now + timedelta(minutes=5)}, {})
    nodes.doubt("uid", {"node-1": now + timedelta(minutes=1)}, {})

    def in_doubt() -> bool:
        worker = observe(pod, "trainer", nodes)
        assert worker is not None
        return worker.node_doubted

    assert in_doubt() and nodes.doubted == ["node-1"]
    off = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}]}
    status = JobStatus(num_shards=4)
    rendered = render(make_job().job(), 3, status, channel_url=CHANNEL, doubted=nodes.doubted)["spec"]["affinity"]
    assert rendered == {"nodeAffinity": {PREFERRED: [{"weight": 100, "preference": off}]}}
    now += timedelta(minutes=4)
    assert in_doubt()
    now += timedelta(minutes=1)
    assert not in_doubt() and nodes.doubted == []


def test_new_workers_avoid_an_unfit_node_and_stay_near_each_other() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    nodes = NodeHealth(lambda: now)
    nodes.doubt("uid", {}, {"node-1": now + timedelta(minutes=5)})
    assert (nodes.doubts("node-1"), nodes.doubted, nodes.unfit("uid")) == (False, [], ["node-1"])
    off = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}]}
    job, status = make_job().job(), JobStatus(num_shards=4)
    rendered = render(job, 3, status, channel_url=CHANNEL, unfit=nodes.unfit("uid"))["spec"]["affinity"]
    near = render(job, 3, status, channel_url=CHANNEL)["spec"]["affinity"]["podAffinity"]
    assert rendered == {"nodeAffinity": {PREFERRED: [{"weight": 100, "preference": off}]}, "podAffinity": near}
    assert nodes.unfit("other") == ["node-1"]
    now += timedelta(minutes=1)
    assert (nodes.unfit("uid"), nodes.unfit("other")) == (["node-1"], []), "the next attempt is none of other jobs'"
    now += timedelta(minutes=4)
    assert nodes.unfit("uid") == []


def test_a_pod_that_its_node_says_nothing_of_is_unattended() -> None:
    pod = seen({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]})
    pod["spec"]["priority"] = 0
    assert not is_unattended(pod), "it has no node yet"
    pod["spec"]["nodeName"] = "node-1"
    assert is_unattended(pod)
    creating = [{"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    for status in ({"phase": "Pending", "containerStatuses": creating}, {"phase": "Running"}, {"phase": "Failed"}):
        assert not is_unattended({**pod, "status": status})


def test_a_pod_is_unattended_since_the_operator_saw_it_so_by_its_own_clock() -> None:
    job, now = make_job().job(), datetime(2026, 1, 1, tzinfo=UTC)
    pod = seen({"phase": "Pending"}, resourceVersion="1")
    pod["spec"]["nodeName"] = "node-1"
    api: Any = None

    class Watched:
        def of(self, key: JobKey) -> list[Any]:
            return [pod]

        def listed_version(self, namespace: str) -> int:
            return 0

    pool = KubePool(api, Watched(), CHANNEL, AsyncMock(), clock=lambda: now)
    first = now
    for seconds in (0, 30):
        now = first + timedelta(seconds=seconds)
        assert [worker.unattended_since for worker in pool.list(job)] == [first]
    pod["status"]["phase"] = "Running"
    assert [worker.unattended_since for worker in pool.list(job)] == [None]


def test_what_is_kept_of_a_pod_says_the_same_and_is_small() -> None:
    pod = pod_of(make_job())
    pod["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    pod["spec"] |= {"nodeName": "node-1", "priority": 5}
    running = {"name": "trainer", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [running]}
    kept = observable(pod)
    worker = observe(kept, "trainer")
    assert worker is not None and worker == observe(pod, "trainer")
    assert (worker.node, worker.scheduled, worker.priority, worker.address) == ("node-1", True, 5, "10.0.0.1")
    new = observe(seen({"phase": "Pending"}), "trainer")
    assert new is not None and (new.node, new.scheduled, new.priority, new.address) == ("", False, 0, "")
    assert controller_uid(kept) == controller_uid(pod)
    assert kept["metadata"]["resourceVersion"] == "7"
    assert len(json.dumps(kept)) < len(json.dumps(pod)) / 5
