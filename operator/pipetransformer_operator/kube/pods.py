"""A worker as a pod: how it is rendered from the job's template, and what its status says.

Pods are created once and never updated, so a pod rendered by an older operator stays as it is until it ends.
"""

import copy
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple

from pipetransformer_contract.spec import Output
from pipetransformer_contract.wire import TOKEN_AUDIENCE, Env

from ..api import GROUP, KIND, VERSION, JobStatus, PipeTrainingJob, trainer_spec
from ..controller.ports import Refused
from ..plan import Worker, WorkerPhase, worker_name
from ..plan.accounting import JOB_LABEL
from .nodes import Nodes
from .placement import GROUP_LABEL, affinity, placement_group

Object = dict[str, Any]
WORKER_LABEL = f"{GROUP}/worker-id"
CA_CONFIG_MAP = "pipetransformer-channel-ca"
CA_FILE = "ca.crt"
CHANNEL_FOLDER = "/var/run/pipetransformer"
SCRATCH_FOLDER = "/scratch"
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_SIZE = "2Gi"
TOKEN_SECONDS = 3600
TERMINATION_LOG = "/dev/termination-log"
METRICS_PORT = 9464
METRICS_PORT_NAME = "pt-metrics"
_CONDITIONS = ("PodScheduled", "DisruptionTarget")
_STATUSES = ("initContainerStatuses", "containerStatuses")


class PriorityClasses(NamedTuple):
    """Names of PriorityClasses; empty for none."""

    base: str = ""  #: of workers up to the job's starting size, unless the template names one
    claimed: str = ""  #: of workers beyond it, whatever the template says: they go first


NO_CLASSES = PriorityClasses()


class Assignment(NamedTuple):
    """What a pod has to carry to run on the nodes that its quota is for."""

    labels: Mapping[str, str] = MappingProxyType({})
    annotations: Mapping[str, str] = MappingProxyType({})
    node_selector: Mapping[str, str] = MappingProxyType({})
    tolerations: Sequence[Object] = ()


ANYWHERE = Assignment()


def render(
    job: PipeTrainingJob,
    worker_id: int,
    status: JobStatus,
    *,
    channel_url: str,
    classes: PriorityClasses = NO_CLASSES,
    assignment: Assignment = ANYWHERE,
    avoided: Sequence[str] = (),
) -> Object:
    """The pod of a worker: the user's template and what the trainer needs besides; not on the `avoided` nodes if others
    will do.

    Raises:
        Refused: the template cannot be added to, for a list in it is none. All else the API server says.
    """
    template = job.spec.pod_template.model_dump(mode="json", by_alias=True, exclude_unset=True)
    metadata, spec = template.get("metadata", {}), copy.deepcopy(template["spec"])
    name = worker_name(job.metadata.name, worker_id)
    container = _trainer(spec["containers"], job.spec.pod_template.trainer().name)
    _set_environment(container, _environment(job, name, status, channel_url))
    if not spec.get("hostNetwork"):  # there it would be a port of the node, and one worker a node
        _serve_metrics(container)
    container["terminationMessagePath"] = TERMINATION_LOG
    _mount(spec, container, "pipetransformer-channel", CHANNEL_FOLDER, _channel_volume(), read_only=True)
    _mount(spec, container, "pipetransformer-scratch", SCRATCH_FOLDER, {"emptyDir": {}})
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY_SIZE}}
    _mount(spec, container, "pipetransformer-shm", SHARED_MEMORY, memory)
    spec["restartPolicy"] = "Never"
    spec.setdefault("automountServiceAccountToken", False)
    if worker_id in status.claimed_ids and classes.claimed:
        spec["priorityClassName"] = classes.claimed
        spec.pop("preemptionPolicy", None)  # the class's own
    elif classes.base:
        spec.setdefault("priorityClassName", classes.base)
    if assignment.node_selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **assignment.node_selector}
    if assignment.tolerations:
        _items(spec, "tolerations").extend(assignment.tolerations)
    group = placement_group(job, worker_id)
    if "topologySpreadConstraints" not in spec:
        spec.setdefault("affinity", affinity(job, group, avoided))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.metadata.namespace,
            "annotations": {**metadata.get("annotations", {}), **assignment.annotations},
            "labels": {
                **metadata.get("labels", {}),
                **assignment.labels,
                JOB_LABEL: job.metadata.name,
                WORKER_LABEL: str(worker_id),
                GROUP_LABEL: group,
                "app.kubernetes.io/managed-by": "pipetransformer-operator",
            },
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }


def owner_reference(job: PipeTrainingJob) -> Object:
    """Makes an object the job's: it goes when the job does."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def controller_uid(pod: Object) -> str:
    """UID of the object that controls the pod; empty without one."""
    owners = pod["metadata"].get("ownerReferences", [])
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def worker_id(pod: Object) -> int | None:
    """The worker's id by the pod's label, or None when the label is missing or no number."""
    label = str(pod["metadata"].get("labels", {}).get(WORKER_LABEL, ""))
    return int(label) if label.isdecimal() else None


def observable(pod: Mapping[str, Any]) -> Object:
    """The part of a pod that is ever looked at: a twentieth of it, for all pods are kept in memory."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    names = ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp")
    return {
        "metadata": {
            **{key: metadata[key] for key in names if key in metadata},
            "labels": {key: value for key, value in metadata.get("labels", {}).items() if key == WORKER_LABEL},
            "ownerReferences": [
                {"controller": owner.get("controller", False), "uid": owner["uid"]}
                for owner in metadata.get("ownerReferences", [])
            ],
        },
        "spec": {key: spec[key] for key in ("nodeName", "priority") if key in spec},
        "status": {
            **{key: status[key] for key in ("phase", "podIP", "reason", "message") if key in status},
            "conditions": [one for one in status.get("conditions", []) if one["type"] in _CONDITIONS],
            **{
                key: [{"name": one["name"], "state": one.get("state", {})} for one in status[key]]
                for key in _STATUSES
                if key in status
            },
        },
    }


def is_unattended(pod: Object) -> bool:
    """Whether the pod has a node that has said nothing of it: a kubelet names its containers within a moment."""
    status = pod.get("status", {})
    said = status.get("phase", "Pending") != "Pending" or any(key in status for key in _STATUSES)
    return bool(pod["spec"].get("nodeName")) and not said


def observe(
    pod: Object, trainer: str, nodes: Nodes | None = None, unattended_since: datetime | None = None
) -> Worker | None:
    """What the plan needs to know of a pod; None when it is no worker's pod.

    Args:
        pod: as the API server gives it.
        trainer: name of the trainer container, whose exit alone decides.
        nodes: that something is wrong with; None where nodes are not watched.
        unattended_since: see `Worker`.
    """
    number = worker_id(pod)
    if number is None:
        return None
    metadata, status = pod["metadata"], pod.get("status", {})
    phase = WorkerPhase(status.get("phase", "Pending")) if status.get("phase") != "Unknown" else WorkerPhase.FAILED
    ended, holds = _ended(status, trainer), phase in (WorkerPhase.PENDING, WorkerPhase.RUNNING)
    if ended is not None:
        phase = WorkerPhase.SUCCEEDED if ended["exitCode"] == 0 else WorkerPhase.FAILED
    return Worker(
        id=number,
        name=metadata["name"],
        uid=metadata["uid"],
        phase=phase,
        terminating="deletionTimestamp" in metadata,
        node=pod["spec"].get("nodeName") or "",
        address=status.get("podIP") or "",
        exit_code=None if ended is None else int(ended["exitCode"]),
        message=_message(status, ended),
        scheduled=bool(pod["spec"].get("nodeName")),
        lingers=ended is not None and holds,
        waiting=_waiting(status),
        priority=int(pod["spec"].get("priority") or 0),
        disrupted=_condition(status, "DisruptionTarget").get("status") == "True",
        draining=nodes is not None and pod["spec"].get("nodeName") in nodes.cordoned,
        node_lost=nodes is not None and pod["spec"].get("nodeName") in nodes.lost,
        node_gone=nodes is not None and nodes.is_gone(pod["spec"].get("nodeName", "")),
        node_doubted=nodes is not None and nodes.doubts(pod["spec"].get("nodeName", "")),
        unattended_since=unattended_since,
    )


def _ended(status: Object, trainer: str) -> Object | None:
    for container in status.get("containerStatuses", []):
        if container["name"] == trainer and "terminated" in container.get("state", {}):
            terminated: Object = container["state"]["terminated"]
            return terminated
    return None


def _condition(status: Object, kind: str) -> Object:
    return next((condition for condition in status.get("conditions", []) if condition["type"] == kind), {})


def _waiting(status: Object) -> str:
    """Why the pod does not run yet: no node takes it, or a container of it cannot start."""
    placed = _condition(status, "PodScheduled")
    if placed.get("status") == "False":
        return _words(placed)
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    waiting = (container.get("state", {}).get("waiting", {}) for container in containers)
    return next((_words(one) for one in waiting if one), "")


def _words(one: Object) -> str:
    return ": ".join(str(one[key]) for key in ("reason", "message") if one.get(key))


def _message(status: Object, ended: Object | None) -> str:
    if ended is not None and ended.get("reason") == "OOMKilled":
        return "OOMKilled: the worker needed more memory than its limit"
    if ended is not None:
        return str(ended.get("message") or ended.get("reason") or "")
    return _words(status)


def _trainer(containers: list[Object], name: str) -> Object:
    return next(container for container in containers if container["name"] == name)


def _environment(job: PipeTrainingJob, name: str, status: JobStatus, channel_url: str) -> list[Object]:
    spec = trainer_spec(job.spec, num_shards=status.num_shards, workers=status.initial_workers)
    if spec.output:
        spec = spec.model_copy(update={"output": Output(location=_results(spec.output.location, job))})
    fields = {
        Env.WORKER_UID: "metadata.uid",
        Env.WORKER_ADDRESS: "status.podIP",
        Env.NODE_NAME: "spec.nodeName",
    }
    values = {
        Env.JOB_NAMESPACE: job.metadata.namespace,
        Env.JOB_NAME: job.metadata.name,
        Env.JOB_UID: job.metadata.uid,
        Env.JOB_SPEC: spec.to_environment(),
        Env.WORKER_NAME: name,
        Env.CHANNEL_URL: channel_url,
        Env.CHANNEL_CA_FILE: f"{CHANNEL_FOLDER}/{CA_FILE}",
        Env.CHANNEL_TOKEN_FILE: f"{CHANNEL_FOLDER}/token",
        Env.RUN_DIR: _run_dir(job),
        Env.TERMINATION_LOG: TERMINATION_LOG,
        "TMPDIR": SCRATCH_FOLDER,
        "HF_HOME": f"{SCRATCH_FOLDER}/huggingface",
    }
    by_field = [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()]
    # A kubelet puts variables in the place of $(NAME), and $ in that of $$.
    return [*by_field, *({"name": key, "value": value.replace("$", "$$")} for key, value in values.items())]


def _run_dir(job: PipeTrainingJob) -> str:
    """The run's record lies beside the model if the output is a path, else it goes with the pod."""
    location = job.spec.output.location if job.spec.output else ""
    return _results(location if location.startswith("/") else f"{SCRATCH_FOLDER}/run", job)


def _results(location: str, job: PipeTrainingJob) -> str:
    """A folder of the job's own, so that jobs may share an output location."""
    return f"{location.rstrip('/')}/{job.metadata.name}"


def _set_environment(container: Object, environment: list[Object]) -> None:
    """Ours first, so that the user's may refer to it; ours wins over the user's of the same name, but for the scratch
    folders."""
    theirs = _items(container, "env")
    given = {entry.get("name") for entry in theirs}
    ours = [
        entry for entry in environment if entry["name"] not in given or entry["name"].startswith("PIPETRANSFORMER_")
    ]
    names = {entry["name"] for entry in ours}
    container["env"] = [*ours, *(entry for entry in theirs if entry.get("name") not in names)]


def _serve_metrics(container: Object) -> None:
    """Tells the trainer to show its metrics, and Prometheus where."""
    container["env"].append({"name": Env.METRICS_PORT, "value": str(METRICS_PORT)})
    ports = _items(container, "ports")
    if not any(port.get("containerPort") == METRICS_PORT for port in ports):
        ports.append({"name": METRICS_PORT_NAME, "containerPort": METRICS_PORT, "protocol": "TCP"})


def _mount(spec: Object, container: Object, name: str, path: str, source: Object, *, read_only: bool = False) -> None:
    """Mounts a volume of ours unless the template mounts something there itself."""
    mounts = _items(container, "volumeMounts")
    if any(str(mount.get("mountPath")).rstrip("/") == path for mount in mounts):
        return
    mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})})
    _items(spec, "volumes").append({"name": name, **source})


def _items(holder: Object, field: str) -> list[Object]:
    """A list of the template, to be added to; made where there is none, or null."""
    if holder.get(field) is None:
        holder[field] = []
    items = holder[field]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Refused(f"{field}: must be a list of objects")
    return items


def _channel_volume() -> Object:
    token = {"audience": TOKEN_AUDIENCE, "expirationSeconds": TOKEN_SECONDS, "path": "token"}
    authority = {"name": CA_CONFIG_MAP, "items": [{"key": CA_FILE, "path": CA_FILE}]}
    return {"projected": {"sources": [{"serviceAccountToken": token}, {"configMap": authority}]}}
