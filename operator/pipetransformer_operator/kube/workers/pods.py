"""Reads a worker's pod."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pipetransformer_contract.api import KIND, PipeTrainingJob
from pipetransformer_contract.api.labels import PLACEMENT_GROUP_LABEL, POD_GROUP_LABEL, WORKER_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.kube.node_health.health import NodeHealth
from pipetransformer_operator.plan import NOT_SET_UP, Worker, WorkerPhase
from pipetransformer_operator.plan.last_words import MAX_WORKER_CHARACTERS, last_words, report_in

_LABELS = (WORKER_LABEL, PLACEMENT_GROUP_LABEL, POD_GROUP_LABEL)
_CONDITIONS = ("PodScheduled", "DisruptionTarget", "PodReadyToStartContainers")
_STATUSES = ("initContainerStatuses", "containerStatuses")


def controller_uid(pod: Object) -> str:
    """UID of the object that controls the pod; empty without one."""
    owners = pod["metadata"].get("ownerReferences", [])
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def is_owned_by_name(kept: Object, job: PipeTrainingJob) -> bool:
    """Whether the job, or a deleted job of the same name, owns the object."""
    owners = {(one["kind"], one["name"]) for one in kept["metadata"].get("ownerReferences", [])}
    return (KIND, job.metadata.name) in owners


def worker_id(pod: Object) -> int | None:
    """The worker's id from the pod's label; None if the label is missing or not a number."""
    label = str(pod["metadata"].get("labels", {}).get(WORKER_LABEL, ""))
    return int(label) if label.isdecimal() else None


def observable(pod: Mapping[str, Any]) -> Object:
    """The part of a pod that the operator uses: a twentieth of it, because all pods are kept in memory."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    names = ("name", "uid", "resourceVersion", "deletionTimestamp")
    return {
        "metadata": {
            **{key: metadata[key] for key in names if key in metadata},
            "labels": {key: value for key, value in metadata.get("labels", {}).items() if key in _LABELS},
            "ownerReferences": [
                {"controller": owner.get("controller", False), "uid": owner["uid"]}
                for owner in metadata.get("ownerReferences", [])
            ],
        },
        "spec": {
            **{key: spec[key] for key in ("nodeName", "priority") if key in spec},
            **({"tolerations": kept} if (kept := tolerations(pod)) else {}),
        },
        "status": {
            **{key: status[key] for key in ("phase", "podIP", "reason", "message") if key in status},
            "conditions": [one for one in status.get("conditions", []) if one["type"] in _CONDITIONS],
            **{
                key: [{name: one[name] for name in ("name", "state", "started") if name in one} for one in status[key]]
                for key in _STATUSES
                if key in status
            },
        },
    }


def tolerations(pod: Mapping[str, Any]) -> list[Object]:
    """The pod's tolerations, except those of taints by which nodes report a problem, because every pod tolerates some
    of these for a while."""
    found = pod["spec"].get("tolerations") or ()
    return [one for one in found if not str(one.get("key")).startswith("node.kubernetes.io/")]


def holds_accelerators(pod: Object | None) -> bool:
    """Whether the pod has a node and has not ended, so that no other pod can have its accelerators."""
    if pod is None or not pod["spec"].get("nodeName"):
        return False
    return pod.get("status", {}).get("phase", "Pending") in (WorkerPhase.PENDING, WorkerPhase.RUNNING)


def is_unattended(pod: Object) -> bool:
    """Whether the pod has a node whose kubelet has not reported its containers, which usually takes a moment."""
    status = pod.get("status", {})
    said = status.get("phase", "Pending") != "Pending" or any(key in status for key in _STATUSES)
    return bool(pod["spec"].get("nodeName")) and not said


def observe(
    pod: Object, trainer: str, nodes: NodeHealth | None = None, unattended_since: datetime | None = None
) -> Worker | None:
    """What the plan needs to know of a pod; None if it is not a worker's pod.

    Args:
        pod: as the API server gives it.
        trainer: name of the trainer container; only its exit counts.
        nodes: knows which nodes have a problem; None if nodes are not watched.
        unattended_since: see `Worker`.
    """
    number = worker_id(pod)
    if number is None:
        return None
    metadata, status, node = pod["metadata"], pod.get("status", {}), pod["spec"].get("nodeName") or ""
    phase = WorkerPhase(status.get("phase", "Pending")) if status.get("phase") != "Unknown" else WorkerPhase.FAILED
    rejected = _is_rejected(status)
    ended, holds = _ended(status, trainer), phase in (WorkerPhase.PENDING, WorkerPhase.RUNNING)
    if ended is not None:
        phase = WorkerPhase.SUCCEEDED if ended["exitCode"] == 0 else WorkerPhase.FAILED
    return Worker(
        id=number,
        name=metadata["name"],
        uid=metadata["uid"],
        phase=phase,
        terminating="deletionTimestamp" in metadata,
        end_time=datetime.fromisoformat(metadata["deletionTimestamp"]) if "deletionTimestamp" in metadata else None,
        node=node,
        address=status.get("podIP") or "",
        exit_code=None if ended is None else int(ended["exitCode"]),
        message=_message(status, ended),
        scheduled=bool(node),
        lingers=ended is not None and holds,
        why_pending=_why_pending(status),
        priority=int(pod["spec"].get("priority") or 0),
        disrupted=_condition(status, "DisruptionTarget").get("status") == "True" or rejected,
        rejected=rejected,
        draining=nodes is not None and node in nodes.draining,
        drain_reason=nodes.why_draining.get(node, "") if nodes is not None else "",
        node_lost=nodes is not None and node in nodes.lost,
        node_gone=nodes is not None and nodes.is_gone(node),
        node_doubted=nodes is not None and nodes.doubts(node),
        unattended_since=unattended_since,
    )


def _is_rejected(status: Object) -> bool:
    """Whether the kubelet rejected the pod, for example because of a broken device, before anything ran."""
    if status.get("phase") != "Failed" or not status.get("reason"):
        return False
    states = [container.get("state", {}) for key in _STATUSES for container in status.get(key, [])]
    return not any("running" in state or "terminated" in state for state in states)


def _ended(status: Object, trainer: str) -> Object | None:
    for container in status.get("containerStatuses", []):
        if container["name"] == trainer and "terminated" in container.get("state", {}):
            terminated: Object = container["state"]["terminated"]
            return terminated
    return None


def _condition(status: Object, kind: str) -> Object:
    return next((condition for condition in status.get("conditions", []) if condition["type"] == kind), {})


def _why_pending(status: Object) -> str:
    """Why the pod does not run yet: no node takes it, or one of its containers cannot start."""
    placed = _condition(status, "PodScheduled")
    if placed.get("status") == "False":
        return _words(placed)
    inits = status.get("initContainerStatuses", [])
    states = [container.get("state", {}) for container in (*inits, *status.get("containerStatuses", []))]
    words = next((_words(state["waiting"]) for state in states if state.get("waiting")), "")
    if words and _condition(status, "PodReadyToStartContainers").get("status") == "False":
        return f"{NOT_SET_UP}: it waits for its volumes and its network ({words})"
    if words and (running := next((one["name"] for one in inits if _holds_up(one)), "")):
        return f"{words}: init container {running} is not done"
    return words


def _holds_up(init: Object) -> bool:
    """Whether it is a running init container. A sidecar that has started holds up no other container."""
    return "running" in init.get("state", {}) and not init.get("started")


def _words(one: Object) -> str:
    return ": ".join(str(one[key]) for key in ("reason", "message") if one.get(key))


def _message(status: Object, ended: Object | None) -> str:
    if ended is not None and ended.get("reason") == "OOMKilled":
        return "OOMKilled: the worker needed more memory than its limit"
    said = _words(status)[:MAX_WORKER_CHARACTERS]  # the cluster puts the cause first
    if ended is not None:
        left = str(ended.get("message") or "")
        if report_in(left):
            return left
        return str(said or last_words(left, int(ended["exitCode"])) or ended.get("reason") or "")
    for container in status.get("initContainerStatuses", []):
        failed: Object = container.get("state", {}).get("terminated", {})
        if failed.get("exitCode") and status.get("phase") == "Failed":
            return ": ".join(filter(None, [f"init container {container['name']}", _words(failed)]))
    return said
