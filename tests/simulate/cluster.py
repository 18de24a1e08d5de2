"""What a cluster does on its own: scheduler, kubelets, node lifecycle, garbage collector. It knows no plan.

A pod's program is a coroutine, which the kubelet starts in a process of its own and ends with the pod.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from .api_server import ApiServer, Change, Key, Object
from .loop import Process
from .trace import Trace

GPU = "nvidia.com/gpu"
#: Until the control plane says that a silent node is not ready, and until it then evicts the node's pods.
NODE_GRACE_SECONDS, EVICTION_SECONDS = 40.0, 60.0
_ENDED = ("Succeeded", "Failed")


@dataclass
class Exit:
    """How a pod's program ended."""

    code: int
    message: str = ""


class Program(Protocol):
    """What runs in a pod."""

    async def run(self) -> Exit:
        """Runs to its end."""
        ...

    def on_told_to_end(self) -> None:
        """The pod is being deleted: the process has a moment left."""
        ...

    def on_killed(self, *, silently: bool) -> None:
        """The process is gone; `silently` with its node, so that no peer's connection is reset."""
        ...


class Idle:
    """What runs in a pod of another owner: nothing, endlessly."""

    async def run(self) -> Exit:
        """See `Program`."""
        await asyncio.get_running_loop().create_future()
        return Exit(0)

    def on_told_to_end(self) -> None:
        """See `Program`."""

    def on_killed(self, *, silently: bool) -> None:
        """See `Program`."""


@dataclass
class Node:
    """One machine.

    Attributes:
        gpus: that it has.
        dead: nothing runs there, and its kubelet says nothing.
        running: by UID of the pod, what runs there.
    """

    name: str
    gpus: int
    dead: bool = False
    cordoned: bool = False
    running: dict[str, tuple[Process, Program]] = field(default_factory=dict)


class Cluster:
    """See the module.

    Args:
        server: that keeps the cluster's objects.
        process: in whose context the cluster works.
        random: of delays.
        trace: is told what happens to pods.
        program: makes what runs in a worker's pod.
    """

    def __init__(
        self,
        server: ApiServer,
        process: Process,
        random: Random,
        trace: Trace,
        program: Callable[[Object, Process], Program],
    ) -> None:
        self.server = server
        self.nodes: dict[str, Node] = {}
        self._process = process
        self._random = random
        self._trace = trace
        self._program = program
        self._addresses = 0
        self._scheduling = False
        self._deleted: set[str] = set()  # UIDs of jobs
        server.listeners.append(self._on_change)

    def add_node(self, name: str, gpus: int) -> None:
        """A machine joins the cluster."""
        self.nodes[name] = Node(name, gpus)
        self.server.create(("api/v1", "nodes", "", name), _node(name, gpus))

    # What may be done to the cluster.

    def kill_node(self, name: str, back_after: float) -> None:
        """The machine loses its power. Later it is removed, and another of its name joins."""
        node = self.nodes[name]
        if node.dead:
            return
        node.dead = True
        for process, program in node.running.values():
            process.kill()
            program.on_killed(silently=True)
        node.running.clear()
        self._later(NODE_GRACE_SECONDS, self._mark_lost, node)
        self._later(NODE_GRACE_SECONDS + EVICTION_SECONDS, self._evict_all, node)
        self._later(max(back_after, NODE_GRACE_SECONDS + EVICTION_SECONDS + 10), self._replace, node)

    def cordon(self, name: str, seconds: float) -> None:
        """An admin drains the node, and takes it back into service later."""
        node = self.nodes[name]
        if node.dead or node.cordoned:
            return
        node.cordoned = True
        self._set_node(name, lambda body: {**body, "spec": {"unschedulable": True}})
        end = asyncio.get_running_loop().time() + seconds
        self._later(5.0, self._drain, node, end)

    def evict(self, pod: Object) -> None:
        """The pod is taken away, for example for one of higher priority."""
        key = _key(pod)
        found = self.server.get(*key)
        if found is None or "deletionTimestamp" in found["metadata"]:
            return
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        status = {**found["status"], "conditions": [*found["status"].get("conditions", []), condition]}
        self.server.put(key, {**found, "status": status})
        self.delete(key)

    def crash(self, pod: Object, exit_: Exit) -> None:
        """The pod's program ends by itself."""
        node = self.nodes.get(pod["spec"].get("nodeName") or "")
        uid = pod["metadata"]["uid"]
        if node is None or uid not in node.running:
            return
        process, program = node.running.pop(uid)
        process.kill()
        program.on_killed(silently=False)
        self._later(0.1, self._set_ended, _key(pod), uid, exit_)

    def delete(self, key: Key) -> None:
        """Deletes a pod as any other client would."""
        self.server.answer("DELETE", f"/api/v1/namespaces/{key[2]}/pods/{key[3]}", {}, "", "", "cluster")

    def pods(self) -> list[Object]:
        """All pods, in the order of their creation."""
        return list(self.server.all("api/v1", "pods"))

    def running(self) -> list[Object]:
        """Pods whose program runs."""
        uids = {uid for node in self.nodes.values() for uid in node.running}
        return [pod for pod in self.pods() if pod["metadata"]["uid"] in uids]

    def program_of(self, uid: str) -> Program | None:
        """What runs in a pod."""
        return next((node.running[uid][1] for node in self.nodes.values() if uid in node.running), None)

    # The rest.

    def _later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, call, *arguments, context=self._process.context)

    def _soon(self, shortest: float, longest: float) -> float:
        return shortest + (longest - shortest) * self._random.random()

    def _on_change(self, change: Change, client: str) -> None:
        plural = change.key[1]
        if change.before is None and change.after is not None:
            for owner in change.after.body["metadata"].get("ownerReferences", []):
                if owner["uid"] in self._deleted:  # this request was on its way when the owner was deleted
                    self._collect_soon(owner["uid"])
        if plural == "pods":
            self._on_pod(change)
        elif plural == "pipetrainingjobs" and change.after is None and change.before is not None:
            self._deleted.add(change.before.body["metadata"]["uid"])
            self._collect_soon(change.before.body["metadata"]["uid"])
        elif plural == "nodes":
            self._wake_scheduler()

    def _on_pod(self, change: Change) -> None:
        before, after = change.before, change.after
        if after is None:
            self._wake_scheduler()
            return
        metadata = after.body["metadata"]
        if before is None:
            self._wake_scheduler()
        elif "deletionTimestamp" in metadata and "deletionTimestamp" not in before.body["metadata"]:
            if (program := self.program_of(metadata["uid"])) is not None:
                program.on_told_to_end()
            self._later(self._soon(0.1, 3.0), self._terminate, change.key, metadata["uid"])
        elif after.body.get("status", {}).get("phase") in _ENDED:
            self._wake_scheduler()

    # The scheduler.

    def _wake_scheduler(self) -> None:
        if not self._scheduling:
            self._scheduling = True
            self._later(self._soon(0.01, 0.5), self._schedule)

    def _schedule(self) -> None:
        self._scheduling = False
        free = {node.name: node.gpus for node in self.nodes.values() if not node.cordoned}
        pending = []
        for pod in self.pods():
            name = pod["spec"].get("nodeName")
            if name and pod.get("status", {}).get("phase") not in _ENDED and name in free:
                free[name] -= gpus_of(pod)
            elif not name and "deletionTimestamp" not in pod["metadata"]:
                pending.append(pod)
        for pod in sorted(pending, key=lambda one: -int(one["spec"].get("priority") or 0)):
            wanted, avoided = gpus_of(pod), _avoided(pod)
            takers = [name for name, left in free.items() if left >= wanted and name not in avoided]
            takers = [name for name in takers if self._is_ready(name)]
            if takers:
                name = max(takers, key=lambda one: (free[one], one)) if self._random.random() < 0.5 else takers[0]
                free[name] -= wanted
                self._bind(pod, name)
            else:
                self._refuse(pod)

    def _is_ready(self, name: str) -> bool:
        found = self.server.get("api/v1", "nodes", "", name)
        return found is not None and all(one["status"] == "True" for one in found["status"]["conditions"])

    def _bind(self, pod: Object, node: str) -> None:
        self._trace.note("bind", pod["metadata"]["name"], node)
        conditions = [{"type": "PodScheduled", "status": "True"}]
        body = {**pod, "spec": {**pod["spec"], "nodeName": node}, "status": {**pod["status"], "conditions": conditions}}
        self.server.put(_key(pod), body)
        self._later(self._soon(0.1, 2.0), self._start, _key(pod), pod["metadata"]["uid"])

    def _refuse(self, pod: Object) -> None:
        if any(one["type"] == "PodScheduled" for one in pod["status"].get("conditions", [])):
            return
        words = f"0/{len(self.nodes)} nodes are available: {len(self.nodes)} Insufficient {GPU}."
        no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
        self.server.put(_key(pod), {**pod, "status": {**pod["status"], "conditions": [no]}})

    # The kubelets.

    def _start(self, key: Key, uid: str) -> None:
        pod = self.server.get(*key)
        if pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]:
            return
        node = self.nodes.get(pod["spec"]["nodeName"])
        if node is None or node.dead or uid in node.running:
            return
        self._addresses += 1
        container = {"name": "trainer", "state": {"running": {}}, "started": True}
        status = {
            **pod["status"],
            "phase": "Running",
            "podIP": f"10.0.{self._addresses // 250}.{self._addresses % 250}",
            "containerStatuses": [container],
        }
        pod = self.server.put(key, {**pod, "status": status})
        assert pod is not None
        process = Process(pod["metadata"]["name"])
        program = self._program(pod, process)
        node.running[uid] = process, program
        process.start(self._supervise(key, uid, node, process, program))

    async def _supervise(self, key: Key, uid: str, node: Node, process: Process, program: Program) -> None:
        exit_ = await program.run()
        if uid in node.running and node.running[uid][1] is program:
            del node.running[uid]
            self._later(self._soon(0.05, 0.5), self._set_ended, key, uid, exit_)
            process.kill()

    def _set_ended(self, key: Key, uid: str, exit_: Exit) -> None:
        pod = self.server.get(*key)
        if pod is None or pod["metadata"]["uid"] != uid or self.nodes[pod["spec"]["nodeName"]].dead:
            return
        self._trace.note("ended", key[3], exit_.code)
        ended = {"name": "trainer", "state": {"terminated": {"exitCode": exit_.code, "message": exit_.message}}}
        phase = "Succeeded" if exit_.code == 0 else "Failed"
        self.server.put(key, {**pod, "status": {**pod["status"], "phase": phase, "containerStatuses": [ended]}})
        if "deletionTimestamp" in pod["metadata"]:
            self.server.put(key, None)

    def _terminate(self, key: Key, uid: str) -> None:
        pod = self.server.get(*key)
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        node = self.nodes.get(pod["spec"]["nodeName"])
        if node is not None and node.dead:
            return  # until the node is removed
        if node is not None and uid in node.running:
            process, program = node.running.pop(uid)
            process.kill()
            program.on_killed(silently=False)
        self._trace.note("gone", key[3])
        self.server.put(key, None)

    # Nodes and garbage.

    def _set_node(self, name: str, change: Callable[[Object], Object]) -> None:
        found = self.server.get("api/v1", "nodes", "", name)
        if found is not None:
            self.server.put(("api/v1", "nodes", "", name), change(found))

    def _mark_lost(self, node: Node) -> None:
        unknown = [{"type": "Ready", "status": "Unknown"}]
        self._set_node(node.name, lambda body: {**body, "status": {**body["status"], "conditions": unknown}})

    def _evict_all(self, node: Node) -> None:
        for pod in self.pods():
            if pod["spec"].get("nodeName") == node.name:
                self.evict(pod)

    def _replace(self, node: Node) -> None:
        self.server.put(("api/v1", "nodes", "", node.name), None)
        for pod in self.pods():
            if pod["spec"].get("nodeName") == node.name:
                self._trace.note("gone", pod["metadata"]["name"])
                self.server.put(_key(pod), None)
        del self.nodes[node.name]
        self._later(5.0, self.add_node, node.name, node.gpus)

    def _drain(self, node: Node, end: float) -> None:
        """Evicts what the budgets allow, every few seconds, until the node is empty and its time is over."""
        if node.dead:
            return
        there = [pod for pod in self.pods() if pod["spec"].get("nodeName") == node.name]
        for pod in there:
            if "deletionTimestamp" not in pod["metadata"] and self._may_evict(pod):
                self.evict(pod)
        if asyncio.get_running_loop().time() >= end:
            node.cordoned = False
            self._set_node(node.name, lambda body: {**body, "spec": {}})
        else:
            self._later(5.0, self._drain, node, end)

    def _may_evict(self, pod: Object) -> bool:
        """Whether no PodDisruptionBudget speaks against it."""
        namespace, labels = pod["metadata"]["namespace"], pod["metadata"].get("labels", {})
        for budget in self.server.all("apis/policy/v1", "poddisruptionbudgets"):
            wanted = budget["spec"]["selector"]["matchLabels"]
            if budget["metadata"]["namespace"] != namespace or not wanted.items() <= labels.items():
                continue
            healthy = [
                one
                for one in self.pods()
                if wanted.items() <= one["metadata"].get("labels", {}).items()
                and one.get("status", {}).get("phase") == "Running"
                and "deletionTimestamp" not in one["metadata"]
            ]
            if pod.get("status", {}).get("phase") == "Running" and len(healthy) <= budget["spec"]["minAvailable"]:
                return False
        return True

    def _collect_soon(self, owner: str) -> None:
        self._later(self._soon(0.1, 2.0), self._collect, owner)

    def _collect(self, owner: str) -> None:
        """Deletes what a deleted job owned."""
        for key, stored in list(self.server.objects.items()):
            if any(one["uid"] == owner for one in stored.body["metadata"].get("ownerReferences", [])):
                if key[1] == "pods":
                    self.delete(key)
                else:
                    self.server.put(key, None)


def gpus_of(pod: Object) -> int:
    """GPUs that a pod asks for."""
    return sum(
        int((one.get("resources", {}).get("limits") or {}).get(GPU, 0)) for one in pod["spec"].get("containers", [])
    )


def _avoided(pod: Object) -> set[str]:
    """Names of nodes that the pod must not run on."""
    affinity = pod["spec"].get("affinity") or {}
    required = (affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or []
    wants = [one for term in terms for one in (*term.get("matchFields", ()), *term.get("matchExpressions", ()))]
    return {name for one in wants if one["operator"] == "NotIn" for name in one["values"]}


def _key(pod: Object) -> Key:
    return "api/v1", "pods", pod["metadata"]["namespace"], pod["metadata"]["name"]


def _node(name: str, gpus: int) -> Object:
    return {
        "metadata": {"labels": {"kubernetes.io/hostname": name}},
        "spec": {},
        "status": {
            "allocatable": {GPU: str(gpus), "cpu": "64", "memory": "256Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
