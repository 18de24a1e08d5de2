"""Judges a life by what an outside observer sees: objects, requests, and what is true of each job.

It imports nothing of the operator and of the contract, because it must not share their errors.
"""

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from .api_server import Change, Key, Object
from .faults import ON_THE_WAY
from .network import Write
from .truth import Job

if TYPE_CHECKING:
    from .life import World

JOB_LABEL = "training.pipetransformer.io/job"
_ENDED = ("Succeeded", "Failed")
#: What protects a job's workers, and what they trust, is there again within this time, if nothing disturbs that.
PROTECTED_SECONDS = 5.0
#: What a fault delayed is done this long after its end.
CALM_SECONDS = 30.0
_PROTECTING = ("networkpolicies", "poddisruptionbudgets", "configmaps")


class Oracle:
    """See the module. Each finding begins with the rule that is broken.

    Attributes:
        violations: what was found.
    """

    def __init__(self, world: "World") -> None:
        self.violations: list[str] = []
        self._world = world
        self._generations: dict[str, dict[int, Object]] = {}
        self._failures: Counter[str] = Counter()
        self._members: set[tuple[str, str]] = set()
        self._releasing: dict[str, set[int]] = {}
        self._unheard: dict[str, float] = {}
        self._holders: list[str] = []
        self._taken: set[str] = set()  # UIDs of pods that another client than the operator deleted first
        self._expected: dict[Key, float] = {}  # when what was deleted has to be there again
        world.server.listeners.append(self._on_change)
        world.network.on_sent.append(self._on_sent)
        world.network.on_done.append(self._on_done)

    def violate(self, rule: str, what: str) -> None:
        """A rule is broken."""
        time = asyncio.get_running_loop().time()
        self._world.trace.note("VIOLATION", rule, what)
        self.violations.append(f"{rule}: {what} (at {time:.1f} s)")

    # What faults say.

    def on_failure(self, job: Job) -> None:
        """A failure that may count against the job's budget."""
        self._failures[job.uid] += 1

    def on_unheard(self, node: str) -> None:
        """The workers of a node reach no operator for a while, so it may take them for lost."""
        self._unheard[node] = asyncio.get_running_loop().time()
        for job in self._world.jobs.values():
            self._failures[job.uid] += sum(pod["spec"].get("nodeName") == node for pod in self._pods(job.name))

    # What happens.

    def on_committed(self, job: Job) -> None:
        """A group made a step, or committed a generation."""
        # A worker whose pod is being deleted may train on for a moment: the cluster ends it, and its writes are older.
        # A group of which a member is gone makes no step.
        trains = [group.number for group in job.groups.values() if group.trains and not group.ends]
        if len(trains) > 1:
            self.violate("holders", f"{job.name} trains in generations {trains} at once")
        for rule, what in (problem.split(": ", 1) for problem in job.problems):
            if rule != "copies" or not self._has_unheard(job):
                self.violate(rule, what)
        job.problems.clear()

    def _on_sent(self, write: Write) -> None:
        """Only the holder of the Lease writes."""
        lease = self._world.server.get("apis/coordination.k8s.io/v1", "leases", "system", "pipetransformer-operator")
        if write.method == "PUT" and not ((write.body or {}).get("metadata") or {}).get("resourceVersion"):
            self.violate("versions", f"{write.client} sent PUT {write.url} without the version that it replaces")
        if "/leases" in write.url or "/tokenreviews" in write.url or lease is None:
            return
        holder = lease["spec"].get("holderIdentity")
        if holder != f"system/{write.client}":
            self.violate("writers", f"{write.client} sent {write.method} {write.url} although {holder!r} leads")

    def _on_done(self, write: Write, code: int) -> None:
        if write.method == "DELETE" and "/pods/" in write.url and 200 <= code < 300:
            self._judge_deletion(write)

    def _judge_deletion(self, write: Write) -> None:
        """The operator deletes a pod: no copy and no released GPU may go too early."""
        name = write.url.partition("?")[0].rpartition("/")[2]
        options: Any = write.body or {}
        uid = options.get("preconditions", {}).get("uid", "")
        if uid in self._taken:
            return
        job = next((one for one in self._world.jobs.values() if uid in one.peers), None)
        found = self._world.job_object(job.name) if job else None
        if job is None or found is None or found["metadata"]["uid"] != job.uid or job.done:
            return
        status, peer = found["status"], job.peers[uid]
        if status.get("stop") or status.get("completionTime") or found["spec"].get("suspend") or peer.hangs:
            return
        pod = self._world.server.get("api/v1", "pods", "default", name)
        node = pod["spec"].get("nodeName", "") if pod else ""
        if self._is_unheard(node):
            return
        going = self._going(job)
        others = [one for one in job.living() if one not in going and one != uid]
        held = job.held.get(uid)
        durable = job.durable.step if job.durable else 0
        holds = held is not None and held[0] == job.step > durable
        if holds and job.covered([*others, uid], job.step) and not job.covered(others, job.step):
            self.violate("copies", f"{name} is deleted and has the only copy of its layers of step {job.step}")
        self._judge_release(job, found, uid, name, node)

    def _judge_release(self, job: Job, found: Object, uid: str, name: str, node: str) -> None:
        """A worker that a layout no longer needs stays until a checkpoint knows the boundary."""
        status = found["status"]
        generation = status.get("generation") or {}
        cordoned = self._world.server.get("api/v1", "nodes", "", node)
        if not job.script.saves_every or (cordoned and cordoned["spec"].get("unschedulable")):
            return
        if uid not in [one["uid"] for one in generation.get("leavers", [])]:
            return
        durable = job.durable
        knows = durable is not None and (
            durable.step >= generation.get("boundaryStep", 0) or durable.generation >= generation["layoutGeneration"]
        )
        if not knows:
            self.violate(
                "durability",
                f"{name} is released before a checkpoint of step {generation.get('boundaryStep')} is durable",
            )

    def _is_unheard(self, node: str) -> bool:
        """Whether the operator may not have heard the node's workers for some time."""
        cut = self._unheard.get(node)
        lost = self._world.cluster.nodes.get(node)
        return (cut is not None and asyncio.get_running_loop().time() < cut + 200) or lost is None or lost.dead

    def _has_unheard(self, job: Job) -> bool:
        """Whether a living worker reaches no operator, so that the operator does without what the worker holds."""
        living = set(job.living())
        return any(
            pod["metadata"]["uid"] in living and self._is_unheard(pod["spec"].get("nodeName", ""))
            for pod in self._pods(job.name)
        )

    def _going(self, job: Job) -> set[str]:
        """UIDs of the job's pods that are being deleted."""
        return {pod["metadata"]["uid"] for pod in self._pods(job.name) if _goes(pod)}

    def _pods(self, job: str) -> list[Object]:
        return [one for one in self._world.cluster.pods() if one["metadata"].get("labels", {}).get(JOB_LABEL) == job]

    def _on_change(self, change: Change, client: str) -> None:
        kind = change.key[1]
        if kind == "pipetrainingjobs" and change.after is not None:
            self._judge_status(change.after.body, change.before.body if change.before else None)
        elif kind == "pods" and change.after is not None:
            if change.before is None:
                self._judge_creation(change.after.body)
            elif change.after.body["spec"].get("nodeName") != change.before.body["spec"].get("nodeName"):
                self._judge_holders()
            elif client == "cluster" and _goes(change.after.body) and not _goes(change.before.body):
                self._taken.add(change.after.body["metadata"]["uid"])
        elif kind == "leases" and change.after is not None:
            self._holders.append(change.after.body["spec"].get("holderIdentity", ""))
        elif kind in _PROTECTING and change.after is None and client == "cluster":
            self._expect_again(change.key)

    def _expect_again(self, key: Key) -> None:
        """Another client deleted what a job needs: the operator writes it again."""
        loop = asyncio.get_running_loop()
        self._expected[key] = until = loop.time() + PROTECTED_SECONDS
        if self._world.leader() is not None and self._is_calm(loop.time(), until):
            loop.call_at(until, self._judge_protection, key, until)

    def _exists(self, job: Job) -> bool:
        """Whether the job was not deleted. Its workers may train on for a while, without what the cluster removes."""
        found = self._world.job_object(job.name)
        return found is not None and found["metadata"]["uid"] == job.uid

    def _judge_protection(self, key: Key, until: float) -> None:
        if until < self._expected[key]:
            return  # it was written again, and then deleted again
        trains = [
            job
            for job in self._world.jobs.values()
            if any(group.trains for group in job.groups.values()) and self._exists(job)
        ]
        needed = [job.name for job in trains if key[1] == "configmaps" or key[3].startswith(f"{job.name}-")]
        if needed and key not in self._world.server.objects:
            self.violate("protection", f"{key[1]} {key[3]} was deleted, and {', '.join(needed)} trains without it")

    def _is_calm(self, begin: float, end: float) -> bool:
        """Whether no fault disturbs the operator or the ways to it in this time, or did shortly before."""
        return all(
            fault.at >= end or fault.end + CALM_SECONDS <= begin
            for fault in self._world.scenario.faults
            if fault.kind in ON_THE_WAY
        )

    def _may_lose_its_leader(self, job: Job) -> bool:
        """Whether a fault ends workers, such as the leader before its first report."""
        return self._failures[job.uid] > 0 or any(fault.kind == "kill_node" for fault in self._world.scenario.faults)

    def _judge_holders(self) -> None:
        """Each GPU has one holder."""
        held: Counter[str] = Counter()
        for pod in self._world.cluster.pods():
            node = pod["spec"].get("nodeName")
            if node and pod.get("status", {}).get("phase") not in _ENDED:
                held[node] += 1
        for name, node in self._world.cluster.nodes.items():
            if held[name] > node.gpus:
                self.violate("holders", f"{held[name]} pods on the {node.gpus} GPUs of {name}")

    def _judge_creation(self, pod: Object) -> None:
        owners = pod["metadata"].get("ownerReferences", [])
        if not owners:
            return
        key = owners[0]["uid"], pod["metadata"]["name"]
        if key in self._members:
            self.violate("names", f"pod {key[1]} is created again, and was a member before")
        job = self._world.jobs[owners[0]["uid"]]
        found = self._world.job_object(job.name)
        if found is None or found["metadata"]["uid"] != job.uid:
            return
        wanted = {f"{job.name}-w{one}" for one in found["status"].get("workerIds", [])}
        if key[1] not in wanted:
            self.violate("durable", f"pod {key[1]} was created although the status does not want it")

    def _judge_status(self, body: Object, before: Object | None) -> None:
        metadata, status = body["metadata"], body.get("status", {})
        job = self._world.jobs.get(metadata["uid"])
        if job is None or before is None:
            return
        old = before.get("status", {})
        self._judge_generation(job, body, old)
        for name in ("layoutGeneration", "nextWorkerId"):
            if status.get(name, 0) < old.get(name, 0):
                self.violate("order", f"{job.name}: {name} fell from {old[name]} to {status.get(name, 0)}")
        if status.get("gpus", {}).get("released", 0) < old.get("gpus", {}).get("released", 0):
            self.violate("accounting", f"{job.name}: released fell")
        releasing = self._releasing.setdefault(job.uid, set())
        releasing.update(status.get("releasingIds", []), self._released_without_pod(job, status, old))
        # A job that has ended does not wait for the cluster to say whether a silent node is lost.
        if status.get("failures", 0) > self._failures[job.uid] and not status.get("completionTime"):
            self.violate(
                "budget", f"{job.name} counts {status['failures']} failures, and {self._failures[job.uid]} happened"
            )
        report, generation = status.get("lastReport") or {}, status.get("generation") or {}
        number = generation.get("layoutGeneration")
        if report and report.get("layoutGeneration") == number != generation.get("confirmedGeneration"):
            self.violate("order", f"{job.name}: the leader of generation {number} reports, and it is not confirmed")
        if report.get("step", 0) > job.step + job.lost:
            self.violate("truth", f"{job.name} is said to have made step {report['step']}, and has made {job.step}")
        if self._is(status, "Complete") and not job.done:
            self.violate("truth", f"{job.name} is Complete at step {job.step} of {job.script.steps}")
        if self._is(status, "Failed") and self._failures[job.uid] <= self._world.plans[job.uid].backoff:
            self.violate("budget", f"{job.name} failed after {self._failures[job.uid]} failures")
        checkpoint = status.get("checkpoint")
        if checkpoint and (job.durable is None or checkpoint["step"] > job.durable.step + job.lost):
            self.violate("truth", f"{job.name} is said to have a checkpoint of step {checkpoint['step']}")

    def _released_without_pod(self, job: Job, status: Object, old: Object) -> set[int]:
        """Ids of workers whose pods another client removed before they were released: no status says that they go."""
        numbers = {(one.get("generation") or {}).get("layoutGeneration") for one in (status, old)}
        if len(numbers) > 1 or not status.get("workerIds") or status.get("stop"):
            return set()  # a job that stops gives all workers back, and counts none of them as released
        return set(old.get("surplusIds", [])) - set(status["workerIds"]) - _ids(self._pods(job.name))

    def _judge_generation(self, job: Job, body: Object, old: Object) -> None:
        generation = body["status"].get("generation")
        if not generation:
            return
        known = self._generations.setdefault(job.uid, {})
        number = generation["layoutGeneration"]
        essence = {
            name: generation.get(name) for name in ("stages", "pipelines", "members", "leavers", "nonce", "leader")
        }
        if number in known:
            if known[number] != essence:
                self.violate("order", f"{job.name}: generation {number} was published twice, differently")
            return
        if known and number < max(known):
            self.violate("order", f"{job.name}: generation {number} was published after {max(known)}")
        known[number] = essence
        self._members |= {(job.uid, one["name"]) for one in (*generation["members"], *generation.get("leavers", []))}
        workers = len(generation["members"])
        plan, spec = self._world.plans[job.uid], body["spec"]
        if workers != generation["stages"] * generation["pipelines"]:
            self.violate(
                "sizes", f"{job.name}: {workers} workers in {generation['stages']} x {generation['pipelines']}"
            )
        if generation["stages"] > plan.stages or plan.stages % generation["stages"]:
            self.violate("sizes", f"{job.name}: {generation['stages']} stages")
        # Workers may stay in the layout that they have, or go back to the one that they last confirmed.
        before = old.get("generation") or {}
        kept = [before, known.get(before.get("confirmedGeneration", 0), {})]
        most = max(spec["elasticPolicy"]["maxWorkers"], *(len(one.get("members", [])) for one in kept))
        if workers > most:
            self.violate("sizes", f"{job.name}: {workers} workers, and at most {most} are allowed")
        uids = [one["uid"] for one in (*generation["members"], *generation.get("leavers", []))]
        if len(uids) != len(set(uids)):
            self.violate("sizes", f"{job.name}: generation {number} names a worker twice")

    @staticmethod
    def _is(status: Object, kind: str) -> bool:
        return any(one["type"] == kind and one["status"] == "True" for one in status.get("conditions", []))

    # At the end.

    def all_done(self) -> bool:
        """Whether each job that still exists has ended."""
        return all(
            found is None or self._is(found["status"], "Complete") or self._is(found["status"], "Failed")
            for found in map(self._world.job_object, (plan.name for plan in self._world.scenario.jobs))
        )

    def judge_liveness(self) -> None:
        """Jobs that fit have been trained by now."""
        for plan in self._world.scenario.jobs:
            found = self._world.job_object(plan.name)
            if found is None or self._is(found["status"], "Complete") or self._is(found["status"], "Failed"):
                continue
            job = self._world.jobs[found["metadata"]["uid"]]
            said = "; ".join(
                f"{one['type']}={one['status']} {one['reason']}: {one.get('message', '')[:80]}"
                for one in found["status"].get("conditions", [])
            )
            rule = "starved" if job.generation == 0 else "progress"
            self.violate(rule, f"{plan.name} fits, and is at step {job.step} of {plan.steps}: {said or 'no condition'}")

    def judge_rest(self, writes: list[tuple[Write, int]]) -> None:
        """Nothing is left to do, so nothing is written, and all is accounted for."""
        for write, code in writes:
            if "/leases" not in write.url:
                self.violate("rest", f"{write.method} {write.url} ({code}) is sent although nothing happens")
                break
        for operator in self._world.service.operators:
            name = f"system/{operator.name}"
            if operator.process.alive and not operator.ended and operator.led and name != self._holders[-1]:
                self.violate("writers", f"{name} goes on, although it lost the Lease to {self._holders[-1]}")
        for plan in self._world.scenario.jobs:
            found, pods = self._world.job_object(plan.name), self._pods(plan.name)
            if found is None:
                if pods:
                    self.violate("accounting", f"{len(pods)} pods of the deleted job {plan.name} are left")
                continue
            self._judge_accounts(found, pods)
            job = self._world.jobs[found["metadata"]["uid"]]
            calm = self._is_calm(0.0, asyncio.get_running_loop().time())
            if job.done and not job.acknowledged and calm and not self._may_lose_its_leader(job):
                self.violate("truth", f"{plan.name} is trained, and no report of its leader was acknowledged")
        for pod in self._world.cluster.pods():
            if pod.get("status", {}).get("phase") not in _ENDED and JOB_LABEL in pod["metadata"].get("labels", {}):
                self.violate("accounting", f"pod {pod['metadata']['name']} is left, and no job needs it")

    def _judge_accounts(self, found: Object, pods: list[Object]) -> None:
        """Pods that are held and pods that were released are those that existed."""
        name, uid, status = found["metadata"]["name"], found["metadata"]["uid"], found["status"]
        holding = [pod for pod in pods if pod.get("status", {}).get("phase") not in _ENDED]
        if status["gpus"]["held"] != len(holding):
            self.violate("accounting", f"{name} holds {status['gpus']['held']}, and {len(holding)} pods hold a GPU")
        if status.get("workers", 0) != len(pods):
            self.violate("accounting", f"{name} has {status.get('workers', 0)} workers, and {len(pods)} pods exist")
        released = self._releasing.get(uid, set()) - _ids(pods)
        if status["gpus"].get("released", 0) != len(released):
            self.violate(
                "accounting", f"{name} released {status['gpus'].get('released', 0)}, and {len(released)} were released"
            )


def _ids(pods: list[Object]) -> set[int]:
    return {int(pod["metadata"]["labels"]["training.pipetransformer.io/worker-id"]) for pod in pods}


def _goes(pod: Object) -> bool:
    """Whether somebody has deleted the pod."""
    return "deletionTimestamp" in pod["metadata"]
