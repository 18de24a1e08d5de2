"""What goes wrong in a life: each kind strikes a victim that is picked when it strikes, and ends by itself."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from .cluster import Exit
from .scenario import Fault
from .trainer import Worker

if TYPE_CHECKING:
    from .life import World


def strike(world: "World", fault: Fault) -> None:
    """The fault begins."""
    world.trace.note("fault", fault.kind, fault.pick)
    KINDS[fault.kind](world, fault)


def _later(world: "World", seconds: float, call: Callable[[], object]) -> None:
    asyncio.get_running_loop().call_later(seconds, call, context=world.process.context)


def _worker(world: "World", fault: Fault) -> Worker | None:
    pods = world.cluster.running()
    if not pods:
        return None
    program = world.cluster.program_of(pods[fault.pick % len(pods)]["metadata"]["uid"])
    return program if isinstance(program, Worker) else None


def _end(world: "World", worker: Worker) -> None:
    pod = world.server.get("api/v1", "pods", worker.namespace, worker.name)
    if pod is not None and pod["metadata"]["uid"] == worker.uid:
        world.cluster.crash(pod, Exit(1, "Traceback: it hung"))


def _crash(world: "World", fault: Fault) -> None:
    """A worker's process ends with an error."""
    if (worker := _worker(world, fault)) is not None:
        world.oracle.on_failure(worker.job)
        _end(world, worker)


def _hang(world: "World", fault: Fault) -> None:
    """A worker does nothing any more, until its own watchdog ends its process."""
    if (worker := _worker(world, fault)) is not None:
        world.oracle.on_failure(worker.job)
        worker.hang()
        _later(world, fault.seconds, lambda: _end(world, worker))


def _break_group(world: "World", fault: Fault) -> None:
    """The workers of a job lose their connections to each other."""
    jobs = [job for job in world.jobs.values() if any(group.trains for group in job.groups.values())]
    if jobs:
        job = jobs[fault.pick % len(jobs)]
        world.oracle.on_failure(job)
        for group in job.groups.values():
            if group.trains:
                group.break_up()


def _evict(world: "World", fault: Fault) -> None:
    """A pod is preempted."""
    if (worker := _worker(world, fault)) is not None:
        pod = world.server.get("api/v1", "pods", worker.namespace, worker.name)
        assert pod is not None
        _note_unseen(world, worker)
        world.cluster.evict(pod)


def _delete_pod(world: "World", fault: Fault) -> None:
    """A user deletes a pod."""
    if (worker := _worker(world, fault)) is not None:
        _note_unseen(world, worker)
        world.cluster.delete(("api/v1", "pods", worker.namespace, worker.name))


def _note_unseen(world: "World", worker: Worker) -> None:
    """While the operator cannot see that a pod goes, the worker's silence may count as a failure."""
    if world.network.weather.away or world.network.weather.cut:
        world.oracle.on_failure(worker.job)


def _kill_node(world: "World", fault: Fault) -> None:
    """A node loses its power, and comes back empty."""
    nodes = sorted(world.cluster.nodes)
    if nodes:
        name = nodes[fault.pick % len(nodes)]
        world.cluster.kill_node(name, fault.seconds - 10)


def _drain(world: "World", fault: Fault) -> None:
    """An admin drains a node."""
    nodes = sorted(world.cluster.nodes)
    if nodes:
        world.cluster.cordon(nodes[fault.pick % len(nodes)], fault.seconds - 6)


def _kill_operator(world: "World", fault: Fault) -> None:
    """The operator that leads is killed, and starts again."""
    if (operator := world.leader()) is not None:
        operator.kill()
        _later(world, fault.seconds, world.start_operator)


def _stop_operator(world: "World", fault: Fault) -> None:
    """The operator that leads is told to end, and another one starts."""
    if (operator := world.leader()) is not None:
        operator.stop()
        _later(world, fault.seconds, world.start_operator)


def _pause_operator(world: "World", fault: Fault) -> None:
    """The process of the operator that leads is frozen."""
    if (operator := world.leader()) is not None:
        operator.process.pause()
        _later(world, fault.seconds, operator.process.resume)


def _api_away(world: "World", fault: Fault) -> None:
    """Nobody reaches the API server."""
    _weather(world, fault, "away", True)
    for watch in list(world.server.watches):
        world.server.close(watch, ConnectionResetError("the API server is away"))


def _api_slow(world: "World", fault: Fault) -> None:
    """Requests and events take up to some seconds."""
    _weather(world, fault, "slow", (2.0, 6.0, 12.0)[fault.pick % 3])


def _lost_answers(world: "World", fault: Fault) -> None:
    """Writes are done, and their answers are lost."""
    _weather(world, fault, "lost_answers", 0.5)


def _api_errors(world: "World", fault: Fault) -> None:
    """The API server refuses many requests, because it is overloaded."""
    _weather(world, fault, "errors", 0.4)


def _weather(world: "World", fault: Fault, name: str, value: object) -> None:
    calm = type(world.network.weather)()
    setattr(world.network.weather, name, value)
    _later(world, fault.seconds, lambda: setattr(world.network.weather, name, getattr(calm, name)))


def _cut_watches(world: "World", fault: Fault) -> None:
    """All watches break, and what they have not shown is forgotten: they begin again with a list."""
    for watch in list(world.server.watches):
        world.server.close(watch, ConnectionResetError("cut"))
    if fault.pick % 2:
        world.server.compact()


def _stale_reads(world: "World", fault: Fault) -> None:
    """After a fail-over, reads and lists show an older state for a while, and watches begin again."""
    world.server.reads_behind = 1 + fault.pick % 20
    for watch in list(world.server.watches):
        world.server.close(watch, ConnectionResetError("fail-over"))

    def end() -> None:
        world.server.reads_behind = 0

    _later(world, fault.seconds, end)


def _cut_operator(world: "World", fault: Fault) -> None:
    """The operator that leads does not reach the API server; another one would."""
    if (operator := world.leader()) is not None:
        cut = world.network.weather.cut
        cut.add(operator.name)
        for watch in [watch for watch in world.server.watches if watch.client == operator.name]:
            world.server.close(watch, ConnectionResetError("cut"))
        _later(world, fault.seconds, lambda: cut.discard(operator.name))


def _cut_workers(world: "World", fault: Fault) -> None:
    """The workers of a node do not reach the operator, but each other."""
    nodes = sorted(world.cluster.nodes)
    if nodes:
        name = nodes[fault.pick % len(nodes)]
        world.service.cut_nodes.add(name)
        world.oracle.on_unheard(name)
        _later(world, fault.seconds, lambda: world.service.cut_nodes.discard(name))


def _touch_job(world: "World", fault: Fault) -> None:
    """Another client writes to a job's object, so that its version grows."""
    for key, stored in list(world.server.objects.items()):
        if key[1] == "pipetrainingjobs":
            metadata = {**stored.body["metadata"], "annotations": {"touched": str(fault.at)}}
            world.server.put(key, {**stored.body, "metadata": metadata})


def _take_protection(world: "World", fault: Fault) -> None:
    """Another client deletes what protects workers, and what they trust."""
    plural = ("networkpolicies", "poddisruptionbudgets", "configmaps")[fault.pick % 3]
    for key in [key for key in world.server.objects if key[1] == plural]:
        world.server.put(key, None)


def _suspend(world: "World", fault: Fault) -> None:
    """A user suspends a job, and resumes it."""
    names = [plan.name for plan in world.scenario.jobs if plan.saves_every]
    if names:
        name = names[fault.pick % len(names)]
        _set_spec(world, name, suspend=True)
        _later(world, fault.seconds, lambda: _set_spec(world, name, suspend=False))


def _resize(world: "World", fault: Fault) -> None:
    """A user changes how many workers a job may have, and changes it back."""
    plan = world.scenario.jobs[fault.pick % len(world.scenario.jobs)]
    elastic = plan.manifest()["spec"]["elasticPolicy"]
    most = plan.stages if fault.pick % 2 else plan.most + plan.stages
    _set_spec(world, plan.name, elasticPolicy={**elastic, "maxWorkers": most})
    _later(world, fault.seconds, lambda: _set_spec(world, plan.name, elasticPolicy=elastic))


def _set_spec(world: "World", name: str, **fields: object) -> None:
    job = world.job_object(name)
    if job is None:
        return
    metadata = {**job["metadata"], "generation": job["metadata"]["generation"] + 1}
    key = ("apis/training.pipetransformer.io/v1alpha1", "pipetrainingjobs", metadata["namespace"], name)
    world.server.put(key, {**job, "metadata": metadata, "spec": {**job["spec"], **fields}})


def _delete_job(world: "World", fault: Fault) -> None:
    """A user deletes a job."""
    plan = world.scenario.jobs[fault.pick % len(world.scenario.jobs)]
    job = world.job_object(plan.name)
    if job is not None:
        key = ("apis/training.pipetransformer.io/v1alpha1", "pipetrainingjobs", job["metadata"]["namespace"], plan.name)
        world.server.put(key, None)


def _intruder(world: "World", fault: Fault) -> None:
    """A pod of another owner takes a free GPU for a while."""
    name = f"other-{fault.at:.3f}".replace(".", "-")
    key = ("api/v1", "pods", "default", name)
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    world.server.create(key, {"metadata": {"labels": {}}, "spec": {"containers": [container]}})
    _later(world, fault.seconds, lambda: world.server.put(key, None))


#: Kinds that disturb the ways between the API server, the operator that leads, and workers.
ON_THE_WAY = frozenset(
    {
        "kill_operator",
        "stop_operator",
        "pause_operator",
        "api_away",
        "api_slow",
        "api_errors",
        "lost_answers",
        "cut_watches",
        "stale_reads",
        "cut_operator",
        "cut_workers",
    }
)
KINDS: dict[str, Callable[["World", Fault], None]] = {
    "crash": _crash,
    "hang": _hang,
    "break_group": _break_group,
    "evict": _evict,
    "delete_pod": _delete_pod,
    "kill_node": _kill_node,
    "drain": _drain,
    "kill_operator": _kill_operator,
    "stop_operator": _stop_operator,
    "pause_operator": _pause_operator,
    "api_away": _api_away,
    "api_slow": _api_slow,
    "api_errors": _api_errors,
    "lost_answers": _lost_answers,
    "cut_watches": _cut_watches,
    "stale_reads": _stale_reads,
    "cut_operator": _cut_operator,
    "cut_workers": _cut_workers,
    "touch_job": _touch_job,
    "take_protection": _take_protection,
    "suspend": _suspend,
    "resize": _resize,
    "delete_job": _delete_job,
    "intruder": _intruder,
}
#: Seconds that a fault of each kind may last; 0 for those that strike once.
SECONDS = {
    "hang": (90.0, 100.0),
    "kill_node": (130.0, 160.0),
    "drain": (40.0, 80.0),
    "kill_operator": (1.0, 40.0),
    "stop_operator": (1.0, 20.0),
    "pause_operator": (1.0, 40.0),
    "api_away": (1.0, 40.0),
    "api_slow": (5.0, 30.0),
    "api_errors": (2.0, 20.0),
    "lost_answers": (2.0, 20.0),
    "stale_reads": (0.5, 10.0),
    "cut_operator": (2.0, 40.0),
    "cut_workers": (3.0, 40.0),
    "suspend": (5.0, 40.0),
    "resize": (5.0, 60.0),
    "intruder": (5.0, 60.0),
}
