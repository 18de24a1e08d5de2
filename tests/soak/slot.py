"""One job after another: each trains, suffers its faults one at a time, recovers from each, and has to complete."""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.controller.ports import Conflict, Unavailable
from pipetransformer_operator.kube.client.api import NotFound
from tests.testkit.trainer.ledger_checker import check

from .accounts import Account
from .draw import EPOCHS, FAILURES, SAMPLES, Fault, Kind, Moment, draw_job
from .nodes import Nodes, Worker
from .patient import PatientApi
from .watch import Watch

START_SECONDS = 300
RECOVERY_SECONDS = 300
END_SECONDS = 300
#: For a change of the layout after the ceiling was moved, and for one that can be struck in the phase that was drawn.
RESIZE_SECONDS = 5
MOMENT_SECONDS = 20
_PHASES = {Moment.PREPARED: ("Prepare",), Moment.PUBLISHED: ("Commit", "Clean")}


@dataclass(frozen=True)
class Hit:
    """A fault that struck.

    Attributes:
        phase: of the resize that it struck in; empty when there was none.
        seconds: until the job trained again, all as it should be.
    """

    fault: Fault
    job: str
    evidence: str
    phase: str
    seconds: float


#: Breaks something that all share for so many seconds, as soon as the given moment has come and nobody else breaks it.
Break = Callable[[float, Callable[[], Awaitable[None]]], Awaitable[str]]


@dataclass
class World:
    """What the slots share. `break_operator` and `break_api` last as long as they are awaited.

    Attributes:
        blind: when the operator saw nothing, in monotonic seconds.
        accounts: of all jobs that have ended.
        bereft: jobs that lost a worker with its node, whichever slot's fault that was.
    """

    api: PatientApi
    jobs: Watch
    pods: Watch
    nodes: Nodes
    namespace: str
    folder: Path
    break_operator: Break
    break_api: Break
    blind: list[tuple[float, float]]
    path: str
    problems: list[str] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    bereft: set[str] = field(default_factory=set)


class NotHit(Exception):
    """There was nothing to strike: the job ended, or the worker did, or the job does not change its layout."""


class Slot:
    """See the module."""

    def __init__(self, world: World, seed: int, number: int, faults: list[Fault]) -> None:
        self._world = world
        self._seed = seed
        self._number = number
        self._faults = list(faults)
        self.hits: list[Hit] = []
        self.jobs: list[str] = []
        self._name = ""

    async def run(self) -> None:
        """Runs jobs until all faults have struck, and the last job is complete."""
        try:
            await self._run()
        except (AssertionError, TimeoutError):
            print(f"{self._name}: {json.dumps(self._status, indent=1)}", flush=True)
            await self._keep_events()
            raise

    async def _run(self) -> None:
        """Each job, until its end."""
        while self._faults:
            account = await self._begin()
            while self._faults and not self._ended:
                fault = self._faults.pop(0)
                try:
                    hit = await self._suffer(fault)
                except NotHit:
                    self._faults.append(fault)
                    continue
                self.hits.append(hit)
                print(
                    f"{hit.job}: {hit.fault.kind.value}: {hit.evidence}{hit.phase and ', in ' + hit.phase};"
                    f" trains after {hit.seconds:.1f} s; {len(self._faults)} faults left",
                    flush=True,
                )
            await self._finish(account)

    # -- one job

    async def _begin(self) -> Account:
        job = draw_job(self._seed, self._number, len(self.jobs), str(self._world.folder))
        manifest = job.manifest()
        self._name = manifest["metadata"]["name"]
        manifest["metadata"]["namespace"] = self._world.namespace
        account = Account(self._name, manifest["spec"]["pipeline"]["stages"])
        self._world.jobs.listeners.append(
            lambda kind, one, time: (
                account.status(one.get("status", {}), time)
                if kind != "DELETED" and one["metadata"]["name"] == account.job
                else None
            )
        )
        self._world.pods.listeners.append(
            lambda kind, pod, time: account.pod(kind, pod, time) if _job_of(pod) == account.job else None
        )
        self.jobs.append(self._name)
        with contextlib.suppress(Conflict):  # asked again
            await self._world.api.request("POST", self._world.path, manifest)
        await self._trains("has begun", START_SECONDS, step=2)
        return account

    async def _finish(self, account: Account) -> None:
        """Waits for the job's end, and judges it by what it left behind."""
        await self._world.jobs.until(f"{self._name} completes", lambda: self._ended, END_SECONDS)
        await self._world.pods.until(f"{self._name} has ended all workers", lambda: not self._workers(), START_SECONDS)
        problems = self._world.problems
        problems += account.check(self._world.blind)
        self._world.accounts.append(account)
        findings = check(self._run_dir, SAMPLES, EPOCHS)
        if not findings.clean:
            problems.append(f"{self._name}: {findings}")
        real = [hit for hit in self.hits if hit.job == self._name and hit.fault.kind in FAILURES]
        failures = self._status.get("failures", 0)
        print(f"{self._name}: complete, {findings.redone} steps redone, {failures} failures", flush=True)
        if failures and not real and self._name not in self._world.bereft:
            problems.append(f"{self._name}: {failures} failures without one")
        await self._keep_events()
        await self._world.api.request("DELETE", f"{self._world.path}/{self._name}")

    async def _keep_events(self) -> None:
        """Writes down what the operator said of the job: the API server does not outlive the soak."""
        query = f"fieldSelector=involvedObject.name%3D{self._name}"
        events = (await self._world.api.get(f"{self._core}/events?{query}"))["items"]
        lines = [f"{event['lastTimestamp']} {event['reason']}: {event['message']}\n" for event in events]
        self._run_dir.mkdir(parents=True, exist_ok=True)
        (self._run_dir / "events.txt").write_text("".join(sorted(lines)))

    @property
    def _status(self) -> Object:
        job = self._world.jobs.named(self._name)
        status: Object = {} if job is None else job.get("status", {})
        return status

    @property
    def _ended(self) -> bool:
        state = self._status.get("state")
        if state == "Failed":
            raise AssertionError(f"{self._name} failed: {json.dumps(self._status['conditions'], indent=1)}")
        return bool(state == "Complete")

    @property
    def _run_dir(self) -> Path:
        return self._world.folder / "output" / self._name

    @property
    def _step(self) -> int:
        """Steps that the record knows; redone ones count again, so it only grows."""
        file = self._run_dir / "steps.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def _workers(self) -> dict[str, Worker]:
        """Processes that run, by their pod's uid."""
        return {uid: w for uid, w in self._world.nodes.workers.items() if w.job == self._name and w.runs}

    def _members(self) -> list[Worker]:
        """The published generation's members that run and stay, its leader first."""
        generation, workers = self._status.get("generation"), self._workers()
        if not generation:
            return []
        members = [workers[m["uid"]] for m in generation["members"] if m["uid"] in workers]
        staying = [worker for worker in members if not worker.deleted.is_set()]
        return sorted(staying, key=lambda worker: worker.name != generation["leader"])

    async def _trains(self, what: str, timeout: float, *, step: int) -> None:
        """Waits until all members of a confirmed generation live and make steps past `step`."""

        def well() -> bool:
            if self._ended:
                return True
            generation = self._status.get("generation")
            if not generation or generation.get("confirmedGeneration", 0) < generation["layoutGeneration"]:
                return False
            return len(self._members()) == len(generation["members"]) and self._step > step

        await self._world.jobs.until(f"{self._name} {what}", well, timeout)

    # -- one fault

    async def _suffer(self, fault: Fault) -> Hit:
        phase, began, step = "", 0.0, 0

        async def moment() -> None:
            nonlocal phase, began, step
            phase = await self._moment(fault)
            began, step = time.monotonic(), self._step

        evidence = await self._strike(fault, moment)
        await self._trains(f"recovers from {fault.kind.value} ({evidence})", RECOVERY_SECONDS, step=step + 1)
        return Hit(fault, self._name, evidence, phase, time.monotonic() - began)

    async def _moment(self, fault: Fault) -> str:
        """Waits until the job does what the fault was drawn for; returns the phase of its resize, if it is in one.

        Raises:
            NotHit: it does not, although its ceiling was moved.
        """
        wanted = _PHASES.get(fault.moment)
        if wanted is None:
            await asyncio.sleep(fault.delay)
            return self._phase
        deadline = time.monotonic() + MOMENT_SECONDS
        while time.monotonic() < deadline and not self._ended:
            if not self._phase:
                await self._move_ceiling()
            with contextlib.suppress(TimeoutError):
                await self._world.jobs.until("resizes", lambda: self._phase in wanted or self._ended, RESIZE_SECONDS)
                await asyncio.sleep(fault.delay)
                if (phase := self._phase) in wanted:
                    return phase
        raise NotHit

    @property
    def _phase(self) -> str:
        """The phase of the resize that is under way."""
        resize = self._status.get("resize")
        return str(resize["phase"]) if resize else ""

    async def _move_ceiling(self) -> None:
        """Lets the job grow if it has its starting size, else takes back what it has beyond that."""
        job, generation = self._world.jobs.named(self._name), self._status.get("generation")
        if job is None:
            raise NotHit
        elastic = job["spec"]["elasticPolicy"]
        workers, stages = (
            (generation["stages"] * generation["pipelines"], generation["stages"]) if generation else (0, 1)
        )
        ceiling = elastic["workers"]
        if workers <= ceiling:  # more than before, and another number than the last time: an edit is tried at once
            ceiling += stages if elastic["maxWorkers"] != ceiling + stages else 2 * stages
        patch = {"spec": {"elasticPolicy": {"maxWorkers": ceiling}}}
        with contextlib.suppress(NotFound):
            path = f"{self._world.path}/{self._name}"
            await self._world.api.request("PATCH", path, patch, content_type=MERGE_PATCH)

    async def _strike(self, fault: Fault, moment: Callable[[], Awaitable[None]]) -> str:
        """Does it when the moment has come; returns what proves that it struck.

        Raises:
            NotHit: there was nothing to strike.
        """
        match fault.kind:
            case Kind.KILL_OPERATOR:
                return await self._world.break_operator(fault.seconds, moment)
            case Kind.CUT_API:
                return await self._world.break_api(fault.seconds, moment)
        await moment()
        members = self._members()
        if self._ended or len(members) < 2:
            await self._trains("is well", RECOVERY_SECONDS, step=0)
            raise NotHit
        leader, others = members[0], members[1:]
        victim = others[fault.victim % len(others)]
        match fault.kind:
            case Kind.KILL_WORKER:
                return await self._kill(victim)
            case Kind.KILL_LEADER:
                return await self._kill(leader)
            case Kind.STOP:
                return await self._stop(members[fault.victim % len(members)], fault.seconds)
            case Kind.DELETE:
                return await self._delete(members[fault.victim % len(members)])
            case Kind.EVICT:
                return await self._evict(members[fault.victim % len(members)])
            case _:
                node = victim.pod["spec"]["nodeName"]
                lost = self._world.nodes.lose(node)
                self._world.bereft |= {worker.job for worker in lost}
                if victim not in lost:
                    raise NotHit
                return f"{node} with {', '.join(worker.name for worker in lost)}"

    async def _kill(self, worker: Worker) -> str:
        worker.signal(signal.SIGKILL)
        await self._world.pods.until(f"{worker.name} is dead", lambda: not worker.runs, 30)
        if worker.process.exitcode != -signal.SIGKILL:
            raise NotHit
        return f"{worker.name} died by SIGKILL"

    async def _stop(self, worker: Worker, seconds: float) -> str:
        worker.signal(signal.SIGSTOP)
        await self._world.pods.until("the kernel has stopped it", lambda: worker.stopped or not worker.runs, 10)
        if not worker.stopped:
            raise NotHit
        asyncio.get_running_loop().call_later(seconds, worker.signal, signal.SIGCONT)
        return f"{worker.name} stood still for {seconds:g} s"

    async def _delete(self, worker: Worker) -> str:
        uid = worker.pod["metadata"]["uid"]
        body = {"preconditions": {"uid": uid}}
        await self._request("DELETE", f"/pods/{worker.name}", body)
        await self._world.pods.until("the deletion shows", worker.deleted.is_set, 30)
        return f"{worker.name} was deleted"

    async def _evict(self, worker: Worker) -> str:
        """As `kubectl drain` does: asks, and where that is refused cordons the node and asks on."""
        metadata = {"name": worker.name, "namespace": self._world.namespace}
        options = {"preconditions": {"uid": worker.pod["metadata"]["uid"]}}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options}
        node = worker.pod["spec"]["nodeName"]
        refused = 0
        try:
            while not worker.deleted.is_set() and worker.runs:
                try:
                    await self._world.api.once.request("POST", f"{self._core}/pods/{worker.name}/eviction", body)
                    return f"{worker.name} was evicted, refused {refused} times"
                except (Conflict, NotFound):
                    break
                except Unavailable:  # 429: the budget allows none
                    refused += 1
                    await self._world.nodes.cordon(node, cordoned=True)
                await asyncio.sleep(0.5)
        finally:
            await self._world.nodes.cordon(node, cordoned=False)
        if not refused or self._ended:
            raise NotHit
        return f"{worker.name} left its cordoned node, its eviction was refused {refused} times"

    @property
    def _core(self) -> str:
        return f"/api/v1/namespaces/{self._world.namespace}"

    async def _request(self, method: str, path: str, body: dict[str, Any]) -> None:
        try:
            await self._world.api.request(method, self._core + path, body)
        except (Conflict, NotFound) as error:
            raise NotHit from error


def _job_of(pod: Object) -> str:
    owners = pod["metadata"].get("ownerReferences", [])
    return str(owners[0]["name"]) if owners else ""
