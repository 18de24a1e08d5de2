"""Renders a worker's pod from the job's template.

The operator creates pods once and never updates them. So a pod that an older operator rendered stays until it ends.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pipetransformer_contract.api import GROUP, KIND, VERSION, JobStatus, PipeTrainingJob, trainer_spec
from pipetransformer_contract.api.job import ClaimFrom
from pipetransformer_contract.api.labels import (
    CLAIMED_LABEL,
    JOB_LABEL,
    MANAGED_BY,
    PLACEMENT_GROUP_LABEL,
    WORKER_LABEL,
)
from pipetransformer_contract.api.requests import Object
from pipetransformer_contract.api.template import CHANNEL_FOLDER
from pipetransformer_contract.spec import Output
from pipetransformer_contract.wire import TOKEN_AUDIENCE, Env
from pipetransformer_operator.controller.ports import Refused
from pipetransformer_operator.kube.trust.authority import CA_CONFIG_MAP, CA_FILE
from pipetransformer_operator.plan import worker_name

from .placement import FAR, NEAR, PREFERRED, REQUIRED, Wish, exclude_nodes, prefer_other_nodes, wishes

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
    claimed: str = ""  #: of claimed workers, even if the template names another; they are preempted before others
    autoscaled: str = ""  #: of claimed workers with `claimFrom: Autoscaler`: autoscalers ignore the lower priority

    def of_claims(self, job: PipeTrainingJob) -> str:
        """The class of the job's claimed workers: `claimed` also where `autoscaled` is empty."""
        autoscales = job.spec.elastic_policy.claim_from is ClaimFrom.AUTOSCALER
        return (self.autoscaled if autoscales else "") or self.claimed

    def of(self, job: PipeTrainingJob, *, claimed: bool) -> str:
        """The class of a worker: that of claims if it is claimed, otherwise the template's or `base`; may be empty."""
        own = (job.spec.pod_template.spec.model_extra or {}).get("priorityClassName")
        return (self.of_claims(job) if claimed else "") or own or self.base


NO_CLASSES = PriorityClasses()


class Assignment(NamedTuple):
    """Metadata and placement that a pod needs to run on the nodes that its quota is for."""

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
    alone: bool = False,
    begins: Object | None = None,
    doubted: Collection[str] = (),
    unfit: Collection[str] = (),
    avoided: Collection[str] = (),
) -> Object:
    """Returns the pod of a worker: the user's template, plus everything that the trainer needs.

    Args:
        job: the worker's job.
        worker_id: id of the worker.
        status: status of the job, which says which workers are claimed.
        channel_url: base URL of the channel, as pods reach it.
        classes: PriorityClasses of base and claimed workers.
        assignment: metadata and placement that its quota requires.
        group: the pod prefers nodes near others of this group.
        alone: the job has no other group.
        begins: the preference for the nodes where its group should begin; None for any.
        doubted: nodes of the job's workers that may be lost. The pod prefers other nodes.
        unfit: further nodes that the pod prefers not to run on.
        avoided: nodes that the pod never runs on.

    Raises:
        Refused: a field of the template must be a list or an object, but is not. The API server checks the rest.
    """
    template = job.spec.pod_template.model_dump(mode="json", by_alias=True, exclude_unset=True)
    metadata = template.get("metadata", {})
    # The API server treats null as absent, so a null must not replace the operator's default.
    spec = {field: value for field, value in template["spec"].items() if value is not None}
    name = worker_name(job.metadata.name, worker_id)
    container = _trainer(spec["containers"], job.spec.pod_template.trainer().name)
    _set_environment(container, _environment(job, name, status, channel_url))
    _set_up_network(spec, container)
    _set_up_end(spec, container, job)
    _mount_volumes(spec, container)
    spec.setdefault("automountServiceAccountToken", False)
    _set_priority(spec, job, classes, claimed=worker_id in status.claimed_ids)
    _assign(spec, assignment)
    _place(spec, wishes(job, group, alone=alone), doubted, unfit, begins)
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
                CLAIMED_LABEL: str(worker_id in status.claimed_ids).lower(),
                PLACEMENT_GROUP_LABEL: group,
                **MANAGED_BY,
            },
            "ownerReferences": [owner_reference(job)],
            **({"finalizers": metadata["finalizers"]} if metadata.get("finalizers") else {}),
        },
        "spec": spec,
    }


def owner_reference(job: PipeTrainingJob) -> Object:
    """The reference that makes the job own an object, so that Kubernetes deletes it with the job."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _set_up_network(spec: Object, container: Object) -> None:
    if spec.get("hostNetwork"):
        # The node's own DNS does not know the channel's Service. ClusterFirst, the default, means that DNS here.
        if spec.get("dnsPolicy") in (None, "", "ClusterFirst"):
            spec["dnsPolicy"] = "ClusterFirstWithHostNet"
        _serve_no_metrics(container)  # the port would be the node's, so only one worker could run there
    else:
        _serve_metrics(container)


def _set_up_end(spec: Object, container: Object, job: PipeTrainingJob) -> None:
    spec["restartPolicy"] = "Never"
    spec.setdefault("terminationGracePeriodSeconds", job.spec.run_policy.stop_timeout_seconds)
    container["terminationMessagePath"] = TERMINATION_LOG
    # If a trainer crashes before it can report why, the end of its log shows it.
    container["terminationMessagePolicy"] = container.get("terminationMessagePolicy") or "FallbackToLogsOnError"
    for field in ("restartPolicy", "restartPolicyRules"):  # they would override the pod's
        container.pop(field, None)


def _mount_volumes(spec: Object, container: Object) -> None:
    _mount(spec, container, "pipetransformer-channel", CHANNEL_FOLDER, _channel_volume())  # always read-only
    _mount(spec, container, "pipetransformer-scratch", SCRATCH_FOLDER, {"emptyDir": {}})
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY_SIZE}}
    _mount(spec, container, "pipetransformer-shm", SHARED_MEMORY, memory)


def _set_priority(spec: Object, job: PipeTrainingJob, classes: PriorityClasses, *, claimed: bool) -> None:
    if name := classes.of(job, claimed=claimed):
        spec["priorityClassName"] = name
        spec.pop("priority", None)  # the class has its own, and the API server refuses another
    if claimed and classes.of_claims(job):
        spec.pop("preemptionPolicy", None)  # the class has its own


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
    # A kubelet replaces $(NAME) by the variable, and $$ by $.
    return [*by_field, *({"name": key, "value": value.replace("$", "$$")} for key, value in values.items())]


def _run_dir(job: PipeTrainingJob) -> str:
    """The folder of the run's record: beside the model if the output is a path. Otherwise it is a scratch folder, which
    is lost with the pod."""
    location = job.spec.output.location if job.spec.output else ""
    return _results(location if location.startswith("/") else f"{SCRATCH_FOLDER}/run", job)


def _results(location: str, job: PipeTrainingJob) -> str:
    """A separate folder for the job, so that jobs may share an output location."""
    return f"{location.rstrip('/')}/{job.metadata.name}"


def _set_environment(container: Object, environment: list[Object]) -> None:
    """Puts the operator's variables first, so that the user's variables can refer to them.

    The operator's variables win over the user's, except those of scratch folders."""
    theirs = _items(container, "env")
    given = [entry.get("name") for entry in theirs]  # no set: a name may be anything until the API server refuses it
    ours = [
        entry for entry in environment if entry["name"] not in given or entry["name"].startswith("PIPETRANSFORMER_")
    ]
    names = [entry["name"] for entry in ours]
    container["env"] = [*ours, *(entry for entry in theirs if entry.get("name") not in names)]


def _serve_metrics(container: Object) -> None:
    """Tells the trainer to serve metrics, and tells Prometheus the port."""
    container["env"].append({"name": Env.METRICS_PORT, "value": str(METRICS_PORT)})
    ports = _items(container, "ports")
    if not any(port.get("containerPort") == METRICS_PORT for port in ports):
        ports.append({"name": METRICS_PORT_NAME, "containerPort": METRICS_PORT, "protocol": "TCP"})


def _serve_no_metrics(container: Object) -> None:
    """Tells the trainer to serve no metrics, unless the template sets a port.

    It always sets the variable. Otherwise a Service named pipetransformer-metrics would set it to a URL."""
    if not any(entry.get("name") == Env.METRICS_PORT for entry in container["env"]):
        container["env"].insert(0, {"name": Env.METRICS_PORT, "value": ""})


def _mount(spec: Object, container: Object, name: str, path: str, source: Object) -> None:
    """Mounts one of the operator's volumes, unless the template mounts something at its path."""
    mounts = _items(container, "volumeMounts")
    if any(str(mount.get("mountPath")).rstrip("/") == path for mount in mounts):
        return
    mounts.append({"name": name, "mountPath": path})
    _items(spec, "volumes").append({"name": name, **source})


def _assign(spec: Object, assignment: Assignment) -> None:
    """Adds the placement that the worker's quota requires."""
    _object(spec, "nodeSelector").update(assignment.node_selector)
    _items(spec, "tolerations").extend(assignment.tolerations)


def _place(
    spec: Object,
    wished_for: Sequence[Wish],
    doubted: Collection[str],
    unfit: Collection[str],
    begins: Object | None,
) -> None:
    """Adds nodes to avoid, where the group begins, and where the job's other pods are, to the template's affinity.

    A template with an affinity to pods, or with spread constraints, gets only what `spec.placement` asks for. If nodes
    are doubted, the pod prefers to avoid them to being near other workers, which may be there. If nodes are unfit, it
    does not prefer distance from other groups, because the nodes without any worker may be the unfit ones.
    """
    affinity = _object(spec, "affinity")
    wished = "topologySpreadConstraints" in spec or any(affinity.get(kind) is not None for kind in (NEAR, FAR))
    avoided = sorted({*doubted, *unfit})
    for preference in ([prefer_other_nodes(avoided)] if avoided else []) + ([begins] if begins else []):
        _items(_object(affinity, "nodeAffinity"), PREFERRED).append(preference)
    for wish in wished_for:
        hinders = doubted or (avoided and wish.kind == FAR)
        if wish.required or not (hinders or (wished and not wish.asked)):
            _items(_object(affinity, wish.kind), wish.rule).append(wish.entry)


def _keep_off(spec: Object, avoided: Collection[str]) -> None:
    """Keeps the pod off these nodes.

    A preference is not enough, because in a full cluster the node where workers fail has room. Terms of a selector are
    alternatives, so each term needs the requirement."""
    if not avoided:
        return
    required = _object(_object(_object(spec, "affinity"), "nodeAffinity"), REQUIRED)
    terms = _items(required, "nodeSelectorTerms")
    if not terms:
        terms.append({})
    for term in terms:
        _items(term, "matchFields").extend(exclude_nodes(sorted(avoided)))


def _object(holder: Object, field: str) -> Object:
    """An object in the template, to extend. Created if it is absent or null."""
    if holder.get(field) is None:
        holder[field] = {}
    part = holder[field]
    if not isinstance(part, dict):
        raise Refused(f"{field}: must be an object")
    return part


def _items(holder: Object, field: str) -> list[Object]:
    """A list in the template, to extend. Created if it is absent or null."""
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
