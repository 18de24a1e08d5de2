"""What goes wrong with workers, nodes, the operator and the API server, on real kubelets: each job completes all the
same, with each sample exactly once, or fails with the words that its user needs."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.testkit.cluster.cluster import SYSTEM_NAMESPACE, Cluster, fill, reinstalled
from tests.testkit.cluster.kube import Kube, Object, has_condition
from tests.testkit.cluster.manifests import TRAIN_SAMPLES, small_job
from tests.testkit.trainer.ledger_checker import check
from tools.devcluster import cluster as devcluster
from tools.devcluster import controlplane, host, node
from tools.devcluster.layout import CONTEXT, Layout
from tools.devcluster.process import Daemon

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("operator"),
]

JOB = "digits"
JOB_LABEL = f"training.pipetransformer.io/job={JOB}"
OPERATOR_LABELS = "app.kubernetes.io/component=operator"
SECONDS = 420
EPOCHS = 100
#: Steps before something goes wrong.
WARM = 5
OUTAGE_SECONDS = 60
_failed = has_condition("Failed")
_SIGNAL = """
import os, pathlib, sys
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if int(process.name) != os.getpid() and b"pipetransformer" in (process / "cmdline").read_bytes():
        os.kill(int(process.name), int(sys.argv[1]))
"""


@dataclass(frozen=True)
class Place:
    """Where a fault strikes: a job that trains."""

    kube: Kube
    cluster: Cluster
    shared: Path

    @property
    def status(self) -> Object:
        status: Object = self.kube.get("pipetrainingjob", JOB)["status"]
        return status

    @property
    def steps(self) -> int:
        """Steps in the run's record."""
        file = self.shared / "output" / JOB / "steps.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait(self, what: str, condition: Callable[[Object], bool], *, seconds: float = SECONDS) -> Object:
        return self.kube.wait("pipetrainingjob", JOB, condition, what, seconds=seconds, never=_failed)

    def member(self) -> Object:
        """The pod of a member that does not lead, if there is one."""
        generation = self.status["generation"]
        names = sorted((m["name"] for m in generation["members"]), key=lambda name: name == generation["leader"])
        return self.kube.get("pod", names[0])

    def signal(self, number: int, name: str) -> None:
        """Sends it to the trainer in that pod."""
        self.kube.run("exec", name, "--", "python", "-c", _SIGNAL, str(number))

    def checkpointed(self) -> int:
        """The step of the job's checkpoint, once it has one."""
        job = self.wait("a checkpoint", lambda job: job["status"].get("checkpoint", {}).get("step", 0) > 0)
        step: int = job["status"]["checkpoint"]["step"]
        return step

    def wait_resumed(self, step: int) -> None:
        """Returns once a layout that began at `step` or later trains."""

        def resumed(job: Object) -> bool:
            generation = job["status"].get("generation")
            events = (self.shared / "output" / JOB / "events.jsonl").read_text().splitlines()
            begun = [json.loads(event) for event in events if "GenerationCommitted" in event]
            return bool(generation) and _confirmed(generation) and begun[-1]["firstStep"] >= step

        self.wait(f"it trains from step {step} on", resumed)

    def patch(self, spec: Object) -> None:
        self.kube.run("patch", "pipetrainingjob", JOB, "--type=merge", "-p", json.dumps({"spec": spec}))

    def move_operator(self, node: str) -> None:
        """To the node of that name."""
        system = self.cluster.kube(SYSTEM_NAMESPACE)
        template = {"spec": {"nodeSelector": {"kubernetes.io/hostname": node}}}
        patch = json.dumps({"spec": {"template": template}})
        system.run("patch", "deployment", "pipetransformer", "--type=merge", "-p", patch)
        system.run("rollout", "status", "deployment", "pipetransformer", "--timeout=120s")

    def lose_operator(self) -> None:
        """Its pod goes without notice; another follows."""
        system = self.cluster.kube(SYSTEM_NAMESPACE)
        system.run("delete", "pod", "--selector", OPERATOR_LABELS, "--grace-period=0", "--force", "--wait=false")

    def lose_operator_when(self, phase: str) -> None:
        """Follows the job's status and takes the operator away right after it wrote that it resizes."""
        path = "jsonpath={.status.resize.phase}{'\\n'}"
        command = ["get", "pipetrainingjob", JOB, "--watch", "-o", path]
        watch = subprocess.Popen(
            [*self.kube.command, "--namespace", self.kube.namespace, *command], stdout=subprocess.PIPE, text=True
        )
        assert watch.stdout is not None
        try:
            self.patch({"elasticPolicy": {"maxWorkers": 3}})
            assert any(line.strip() == phase for line in watch.stdout)
            self.lose_operator()
        finally:
            watch.kill()
            watch.wait()


def kill(place: Place) -> None:
    place.signal(signal.SIGKILL, place.member()["metadata"]["name"])
    place.wait("the loss is counted", lambda job: job["status"].get("failures", 0) == 1)


def stop(place: Place) -> None:
    """It hangs, and its pod looks alive: the job stands still, says who is the reason, and replaces it."""
    place.patch({"runPolicy": {"stallTimeoutSeconds": 15}})
    name = place.member()["metadata"]["name"]
    place.signal(signal.SIGSTOP, name)
    job = place.wait("Stalled", has_condition("Stalled"))
    stalled = next(condition for condition in job["status"]["conditions"] if condition["type"] == "Stalled")
    place.wait("the loss is counted", lambda job: job["status"].get("failures", 0) == 1)
    assert "stallTimeoutSeconds (15 s)" in stalled["message"]
    events = place.kube.list("events")
    assert any(one["reason"] == "WorkerLost" and name in one["message"] for one in events)


def delete(place: Place) -> None:
    place.kube.delete("pod", place.member()["metadata"]["name"])


def evict(place: Place) -> None:
    pod = place.member()["metadata"]
    metadata = {"name": pod["name"], "namespace": pod["namespace"]}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    path = f"/api/v1/namespaces/{pod['namespace']}/pods/{pod['name']}/eviction"
    place.kube.run("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def drain(place: Place) -> None:
    """The eviction is refused until another worker has the stage, however many pipelines there are."""
    pod = place.member()
    try:
        said = place.kube.run(
            "drain", pod["spec"]["nodeName"], f"--pod-selector={JOB_LABEL}", "--delete-emptydir-data", "--timeout=120s"
        )
    finally:
        place.kube.run("uncordon", pod["spec"]["nodeName"])
    assert pod["metadata"]["name"] in said
    assert place.status["generation"]["reason"] == "Drain"


def drain_without_room(place: Place) -> None:
    """The only copy of a stage, and no accelerator is free for another: past the drain's time it goes, and leaves a
    checkpoint, from which the job goes on once there is room."""
    seconds = 20
    place.patch({"runPolicy": {"drainTimeoutSeconds": seconds}})
    fillers = fill(place.kube, place.cluster)
    pod = place.member()
    name, host_name = pod["metadata"]["name"], pod["spec"]["nodeName"]
    began = time.monotonic()
    try:
        selector = f"--pod-selector={JOB_LABEL}"
        said = place.kube.run("drain", host_name, selector, "--delete-emptydir-data", "--timeout=120s")
        assert time.monotonic() - began >= seconds
        assert f"pod/{name} evicted" in said
        step = place.checkpointed()
        for filler in fillers:
            place.kube.delete("pod", filler)
        place.wait_resumed(step)
    finally:
        place.kube.run("uncordon", host_name)


def evict_where_nodes_are_not_seen(place: Place) -> None:
    """The only copy of a stage: the eviction passes, and the worker leaves a checkpoint."""
    with reinstalled(place.cluster, f"namespaces={{{place.kube.namespace}}}"):

        def may_go(budget: Object) -> bool:
            return bool(budget["status"].get("disruptionsAllowed") == 1)

        place.kube.wait("poddisruptionbudget", f"{JOB}-workers", may_go, "one worker may go", seconds=60)
        evict(place)
        place.wait_resumed(place.checkpointed())


def lose_node(place: Place) -> None:
    """A whole node falls silent, with all that ran on it; it comes back when the job is well without it."""
    if CONTEXT not in place.cluster.kubectl:
        pytest.skip("only nodes of the dev cluster can be stopped")
    layout = Layout()
    kept, name = host.node_name(0), host.node_name(1)  # the first has the only one of what clusters have two of, as DNS
    place.move_operator(kept)
    node.stop(layout, 1)
    try:
        place.wait("the loss is told", lambda job: job["status"].get("nodeLosses", 0) == 1)
        lost = {p["metadata"]["uid"] for p in place.kube.list("pods", JOB_LABEL) if p["spec"].get("nodeName") == name}

        def goes_on(job: Object) -> bool:
            generation = job["status"].get("generation")
            return (
                bool(generation)
                and _confirmed(generation)
                and not lost & {member["uid"] for member in generation["members"]}
            )

        place.wait("it goes on without the node", lambda job: _complete(job) or goes_on(job))
    finally:
        devcluster.up(layout)


def suspend(place: Place) -> None:
    place.patch({"suspend": True})
    place.wait("Suspended", has_condition("Suspended"))
    place.kube.wait_gone("pods", JOB_LABEL, seconds=90)
    step = place.status["checkpoint"]["step"]
    assert step > 0
    place.patch({"suspend": False})
    job = place.wait("it trains again", lambda job: _complete(job) or bool(job["status"].get("generation")))
    assert job["status"]["checkpoint"]["step"] >= step


def lose_operator_preparing(place: Place) -> None:
    place.lose_operator_when("Prepare")


def lose_operator_committing(place: Place) -> None:
    place.lose_operator_when("Commit")


def stop_api(place: Place) -> None:
    """Nobody can read or write for a minute; the job makes its steps meanwhile."""
    if CONTEXT not in place.cluster.kubectl:
        pytest.skip("only the API server of the dev cluster can be stopped")
    layout = Layout()
    Daemon("kube-apiserver", layout.run).stop()
    try:
        before = place.steps
        time.sleep(OUTAGE_SECONDS)
        after = place.steps
    finally:
        controlplane.start(layout)
    assert after > before, "the job stood still"


@contextmanager
def without_operator(place: Place) -> Iterator[None]:
    """No operator meanwhile."""
    system = place.cluster.kube(SYSTEM_NAMESPACE)
    system.run("scale", "deployment", "--selector", OPERATOR_LABELS, "--replicas=0")
    try:
        system.wait_gone("pods", OPERATOR_LABELS, seconds=60)
        yield
    finally:
        system.run("scale", "deployment", "--selector", OPERATOR_LABELS, "--replicas=1")


def end_without_operator(place: Place) -> None:
    """Nobody hears that the model is written, for then its leader is killed: the operator that comes later finds it."""
    with without_operator(place):
        leader = place.status["generation"]["leader"]

        def phases() -> list[tuple[bool, str]]:
            pods = place.kube.list("pods", JOB_LABEL)
            return sorted((pod["metadata"]["name"] == leader, pod["status"]["phase"]) for pod in pods)

        place.wait("all but the leader have ended", lambda _: phases() == [(False, "Succeeded"), (True, "Running")])
        place.signal(signal.SIGKILL, leader)
        place.wait("the leader is dead", lambda _: (True, "Failed") in phases())
        assert not _complete(place.kube.get("pipetrainingjob", JOB))


def kill_without_operator(place: Place) -> None:
    """Nobody tells the survivor how to go on: it waits, with its state, for the operator that comes later."""
    with without_operator(place):
        name = place.member()["metadata"]["name"]
        place.signal(signal.SIGKILL, name)
        place.kube.wait("pod", name, lambda pod: pod["status"]["phase"] == "Failed", "it is dead", seconds=60)
    place.wait("the loss is counted", lambda job: job["status"].get("failures", 0) == 1)


def lose_one_of_two_operators(place: Place) -> None:
    """The second waits, and takes over when the first is gone."""
    system = place.cluster.kube(SYSTEM_NAMESPACE)

    def leading() -> list[str]:
        """Pods that are ready, once there are two of which each has started."""
        pods = system.list("pods", OPERATOR_LABELS)
        started = [
            pod for pod in pods if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        ready = [
            pod["metadata"]["name"]
            for pod in started
            if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])
        ]
        return ready if len(started) == 2 else []

    system.run("scale", "deployment", "--selector", OPERATOR_LABELS, "--replicas=2")
    try:
        place.wait("one of two operators leads", lambda _: len(leading()) == 1)
        (first,) = leading()
        system.run("delete", "pod", first, "--grace-period=0", "--force", "--wait=false")
        place.wait("another leads", lambda _: len(leading()) == 1 and leading() != [first])
        place.patch({"elasticPolicy": {"maxWorkers": 3}})
        place.wait("the other acts", lambda job: _complete(job) or len(job["status"]["generation"]["members"]) == 3)
    finally:
        system.run("scale", "deployment", "--selector", OPERATOR_LABELS, "--replicas=1")


@dataclass(frozen=True)
class Row:
    """A fault and what becomes of its job.

    Attributes:
        strike: does it, to a job that trains.
        failures: counted against the job's budget.
        stages: of the job's pipelines on two workers.
        epochs: so many that it still trains then.
        checkpoints: it writes some while all is well.
    """

    strike: Callable[[Place], None]
    failures: int = 0
    stages: int = 1
    epochs: int = EPOCHS
    checkpoints: bool = True


ROWS = [
    Row(kill, failures=1),
    Row(stop, failures=1),
    Row(delete),
    Row(drain),
    Row(evict_where_nodes_are_not_seen, stages=2, epochs=400, checkpoints=False),
    Row(drain, stages=2),
    Row(drain_without_room, stages=2, epochs=200, checkpoints=False),
    Row(lose_node),
    Row(suspend),
    Row(lose_operator_preparing),
    Row(lose_operator_committing),
    Row(end_without_operator),
    Row(kill_without_operator, failures=1),
    Row(lose_one_of_two_operators, epochs=150),
    Row(stop_api, epochs=150),
]


def _complete(job: Object) -> bool:
    return has_condition("Complete")(job)


def _confirmed(generation: Object) -> bool:
    return bool(generation.get("confirmedGeneration", 0) >= generation["layoutGeneration"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.strike.__name__)
def test_a_job_completes_with_each_sample_exactly_once_whatever_happens_to(
    row: Row, kube: Kube, cluster: Cluster, shared: Path
) -> None:
    image = cluster.images["trainer"]
    job = small_job(JOB, image=image, shared=str(shared), stages=row.stages, epochs=row.epochs)
    if not row.checkpoints:
        del job["spec"]["checkpoint"]["everySteps"]
    kube.apply(job)
    place = Place(kube, cluster, shared)
    place.wait("it trains", lambda job: place.steps >= WARM)

    row.strike(place)

    done = place.wait("Complete", has_condition("Complete"))
    assert done["status"].get("failures", 0) == row.failures
    findings = check(shared / "output" / JOB, TRAIN_SAMPLES, row.epochs)
    assert findings.clean, findings


def crash(job: Object) -> None:
    job["spec"]["podTemplate"]["spec"]["containers"][0]["command"] = ["python", "-c", "raise SystemExit('no disk')"]


def refuse(job: Object) -> None:
    job["spec"]["data"]["name"] = "no.such.module:data"


def starve(job: Object) -> None:
    job["spec"]["podTemplate"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = "96Mi"


@pytest.mark.parametrize(
    ("spoil", "failures", "reason", "words"),
    [
        (crash, 2, "BackoffLimitExceeded", "exit code 1"),
        (starve, 2, "BackoffLimitExceeded", "OOMKilled: the worker needed more memory than its limit"),
        (refuse, 0, "InvalidSpec", "spec.data.name"),
    ],
    ids=["crash loop", "out of memory", "user error"],
)
def test_a_job_that_cannot_train_fails_in_the_words_of_its_worker(
    spoil: Callable[[Object], None], failures: int, reason: str, words: str, kube: Kube, cluster: Cluster, shared: Path
) -> None:
    job = small_job(JOB, image=cluster.images["trainer"], shared=str(shared))
    job["spec"]["runPolicy"] = {"backoffLimit": 1}
    spoil(job)
    kube.apply(job)

    status = kube.wait("pipetrainingjob", JOB, _failed, "Failed", seconds=SECONDS)["status"]

    condition = next(condition for condition in status["conditions"] if condition["type"] == "Failed")
    assert (status.get("failures", 0), condition["reason"]) == (failures, reason)
    assert words in condition["message"]


def _put_off(why: str) -> Callable[[Object], bool]:
    """Whether a job's start was put off for that reason."""

    def holds(job: Object) -> bool:
        conditions = {c["type"]: c for c in job.get("status", {}).get("conditions", [])}
        running = conditions.get("Running", {})
        return running.get("reason") == why and "Start postponed" in running["message"]

    return holds


def test_an_image_that_cannot_be_pulled_is_said_and_holds_no_gpu_for_long(
    kube: Kube, cluster: Cluster, shared: Path
) -> None:
    job = small_job(JOB, image=cluster.images["trainer"] + "-missing", shared=str(shared))
    job["spec"]["runPolicy"] = {"startTimeoutSeconds": 15}
    kube.apply(job)

    kube.wait("pipetrainingjob", JOB, _put_off("ImagePull"), "the start is put off", seconds=90, never=_failed)
    kube.wait_gone("pods", JOB_LABEL, seconds=45)


def test_a_start_for_which_there_is_no_room_holds_no_gpu_for_long(kube: Kube, cluster: Cluster, shared: Path) -> None:
    fillers = fill(kube, cluster, leave=1)
    job = small_job(JOB, image=cluster.images["trainer"], shared=str(shared), stages=2)
    job["spec"]["runPolicy"] = {"startTimeoutSeconds": 15}
    kube.apply(job)

    kube.wait("pipetrainingjob", JOB, _put_off("Unschedulable"), "the start is put off", seconds=90, never=_failed)
    kube.wait_gone("pods", JOB_LABEL, seconds=45)

    for filler in fillers:
        kube.delete("pod", filler)
    kube.wait("pipetrainingjob", JOB, has_condition("Complete"), "Complete", seconds=SECONDS, never=_failed)


def test_a_deleted_job_leaves_nothing_behind(kube: Kube, cluster: Cluster, shared: Path) -> None:
    kube.apply(small_job(JOB, image=cluster.images["trainer"], shared=str(shared)))
    kube.wait("pipetrainingjob", JOB, has_condition("Running"), "Running", seconds=SECONDS, never=_failed)

    kube.delete("pipetrainingjob", JOB)

    for kind in ("pods", "poddisruptionbudgets", "networkpolicies"):
        kube.wait_gone(kind, JOB_LABEL, seconds=90)
