"""A worker's pod, rendered from the job's template.

Pods are created once and never updated, so a pod rendered by an older operator stays as it is until it ends.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pipetransformer_contract.api import GROUP, KIND, VERSION, JobStatus, PipeTrainingJob, trainer_spec
from pipetransformer_contract.api.job import ClaimFrom
from pipetransformer_contract.api.labels import JOB_LABEL, MANAGED_BY, PLACEMENT_GROUP_LABEL, WORKER_LABEL
from pipetransformer_contract.api.template import CHANNEL_FOLDER
from pipetransformer_contract.spec import Output
from pipetransformer_contract.wire import TOKEN_AUDIENCE, Env
from pipetransformer_operator.controller.ports import Refused
from pipetransformer_operator.kube.client.api import Object
from pipetransformer_operator.kube.trust.authority import CA_CONFIG_MAP, CA_FILE
from pipetransformer_operator.plan import worker_name

from .placement import PREFERRED, REQUIRED, none_of, off, proximity

SCRATCH_FOLDER = "/scratch"
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_SIZE = "2Gi"
TOKEN_SECONDS = 3600
TERMINATION_LOG = "/dev/termination-log"
METRICS_PORT = 9464
METRICS_PORT_NAME = "pt-metrics"


class PriorityClasses(NamedTuple):
    """Names of PriorityClasses; empty for none."""

    base: str = ""  #: of workers up to the job's starting size, unless the template names one
    claimed: str = ""  #: of workers beyond it, whatever the template says: they go first
    autoscaled: str = ""  #: of those of jobs with `claimFrom: Autoscaler`; autoscalers ignore the lower priority


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
    group: str = "",
    doubted: Collection[str] = (),
    unfit: Collection[str] = (),
    avoided: Collection[str] = (),
) -> Object:
    """The pod of a worker: the user's template and what the trainer needs besides; near those of its `group`, and not
    on nodes that are `doubted` or `unfit`, if others will do. Of the doubted ones these are where the job has workers.
    It never runs on a node that is `avoided`.

    Raises:
        Refused: the template cannot be added to, for a list or an object in it is none. All else the API server says.
    """
    template = job.spec.pod_template.model_dump(mode="json", by_alias=True, exclude_unset=True)
    metadata = template.get("metadata", {})
    # The API server takes a null for absent, too: it must not stand in the way of what is the default here.
    spec = copy.deepcopy({field: value for field, value in template["spec"].items() if value is not None})
    name = worker_name(job.metadata.name, worker_id)
    container = _trainer(spec["containers"], job.spec.pod_template.trainer().name)
    _set_environment(container, _environment(job, name, status, channel_url))
    if spec.get("hostNetwork"):
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")  # the node's own does not know the channel's Service
        _serve_no_metrics(container)  # it would be a port of the node, and one worker a node
    else:
        _serve_metrics(container)
    container["terminationMessagePath"] = TERMINATION_LOG
    # Where a trainer crashes before it can say why, its log does.
    container["terminationMessagePolicy"] = container.get("terminationMessagePolicy") or "FallbackToLogsOnError"
    for field in ("restartPolicy", "restartPolicyRules"):  # they would outrank the pod's
        container.pop(field, None)
    _mount(spec, container, "pipetransformer-channel", CHANNEL_FOLDER, _channel_volume(), read_only=True)
    _mount(spec, container, "pipetransformer-scratch", SCRATCH_FOLDER, {"emptyDir": {}})
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY_SIZE}}
    _mount(spec, container, "pipetransformer-shm", SHARED_MEMORY, memory)
    spec["restartPolicy"] = "Never"
    spec.setdefault("terminationGracePeriodSeconds", job.spec.run_policy.stop_timeout_seconds)
    spec.setdefault("automountServiceAccountToken", False)
    autoscaled = job.spec.elastic_policy.claim_from is ClaimFrom.AUTOSCALER
    claimed = classes.autoscaled if autoscaled and classes.autoscaled else classes.claimed
    if worker_id in status.claimed_ids and claimed:
        spec["priorityClassName"] = claimed
        spec.pop("preemptionPolicy", None)  # the class's own
    elif classes.base:
        spec.setdefault("priorityClassName", classes.base)
    if assignment.node_selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **assignment.node_selector}
    if assignment.tolerations:
        _items(spec, "tolerations").extend(assignment.tolerations)
    _place(spec, job, group, doubted, unfit)
    _keep_off(spec, avoided)
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
                PLACEMENT_GROUP_LABEL: group,
                **MANAGED_BY,
            },
            "ownerReferences": [owner_reference(job)],
            **({"finalizers": metadata["finalizers"]} if metadata.get("finalizers") else {}),
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


def _serve_no_metrics(container: Object) -> None:
    """Unless the template has a port for them. Said in any case: a Service pipetransformer-metrics of the namespace
    would set the variable, to no number."""
    if not any(entry.get("name") == Env.METRICS_PORT for entry in container["env"]):
        container["env"].insert(0, {"name": Env.METRICS_PORT, "value": ""})


def _mount(spec: Object, container: Object, name: str, path: str, source: Object, *, read_only: bool = False) -> None:
    """Mounts a volume of ours unless the template mounts something there itself."""
    mounts = _items(container, "volumeMounts")
    if any(str(mount.get("mountPath")).rstrip("/") == path for mount in mounts):
        return
    mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})})
    _items(spec, "volumes").append({"name": name, **source})


def _place(spec: Object, job: PipeTrainingJob, group: str, doubted: Collection[str], unfit: Collection[str]) -> None:
    """Adds to the template's affinity: nodes to be avoided in any case, and pods unless the template speaks of them.

    Whom a worker would lie near may be on the doubted nodes, so to keep off these is then all that is wanted. Nobody
    of the job is on an unfit one to draw others there; to lie far from the others would, for it is empty.
    """
    affinity = _object(spec, "affinity")
    wished = any(affinity.get(kind) is not None for kind in ("podAffinity", "podAntiAffinity"))
    kinds = {} if wished else proximity(job, group)
    if avoided := sorted({*doubted, *unfit}):
        _items(_object(affinity, "nodeAffinity"), PREFERRED).append(off(avoided))
        kinds.pop("podAntiAffinity", None)
    if not doubted and "topologySpreadConstraints" not in spec:
        affinity.update(kinds)


def _keep_off(spec: Object, avoided: Collection[str]) -> None:
    """Adds to what the template requires of nodes that they are none of these. A preference would not do: in a full
    cluster the node on which workers fail is the one with room. The terms are alternatives, so each has to say it."""
    if not avoided:
        return
    required = _object(_object(_object(spec, "affinity"), "nodeAffinity"), REQUIRED)
    terms = _items(required, "nodeSelectorTerms")
    if not terms:
        terms.append({})
    for term in terms:
        _items(term, "matchFields").extend(none_of(sorted(avoided)))


def _object(holder: Object, field: str) -> Object:
    """A part of the template, to be added to; made where there is none, or null."""
    if holder.get(field) is None:
        holder[field] = {}
    part = holder[field]
    if not isinstance(part, dict):
        raise Refused(f"{field}: must be an object")
    return part


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
