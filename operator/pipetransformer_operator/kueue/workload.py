"""A quota request as a Workload: its rendering, the meaning of Kueue's answers, and what is written back."""

from datetime import datetime

from pipetransformer_contract.api import GROUP, PipeTrainingJob
from pipetransformer_contract.api.labels import JOB_LABEL, JOB_UID_LABEL, PRIORITY_CLASS_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_contract.api.status import QuotaRequest
from pipetransformer_contract.messages import Generation
from pipetransformer_operator.kube.workers.rendering import Assignment, owner_reference
from pipetransformer_operator.plan import Answer, worker_name

API = "kueue.x-k8s.io/v1beta2"
#: Keeps the quota until we drop it: Kueue frees a deleted Workload's quota at once, but pods take longer to end.
FINALIZER = f"{GROUP}/pods-gone"
POD_SET = "workers"
#: Below the priority of every job's starting size, so that Kueue preempts claims first.
CLAIMED_PRIORITY = -1_000_000_000
_EVICTED, _RESERVED, _ADMITTED, _PODS_READY = "Evicted", "QuotaReserved", "Admitted", "PodsReady"


def render(job: PipeTrainingJob, request: QuotaRequest, *, claimed: bool, class_value: int | None) -> Object:
    """The Workload of a request.

    Args:
        job: the job that requests quota.
        request: the request; its size never changes.
        claimed: whether it is for claimed workers. Of two claims Kueue preempts the newer one first.
        class_value: value of the WorkloadPriorityClass that the job names; None if it names none.
    """
    template = job.spec.pod_template.model_dump(mode="json", by_alias=True, exclude_unset=True)
    pods = {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}
    spec: Object = {
        "queueName": request.queue,
        "podSets": [{"name": POD_SET, "count": request.workers, "template": pods}],
    }
    if claimed:
        spec["priority"] = CLAIMED_PRIORITY + (class_value or 0) - int(request.name.rpartition("-q")[2])
    elif class_value is not None:
        name = job.metadata.labels[PRIORITY_CLASS_LABEL]
        spec["priority"] = class_value
        spec["priorityClassRef"] = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": name}
    return {
        "apiVersion": API,
        "kind": "Workload",
        "metadata": {
            "name": request.name,
            "namespace": job.metadata.namespace,
            "labels": {JOB_LABEL: job.metadata.name, JOB_UID_LABEL: job.metadata.uid},
            "ownerReferences": [owner_reference(job)],
            "finalizers": [FINALIZER],
        },
        "spec": spec,
    }


def answer(workload: Object) -> Answer:
    """Kueue's answer. While Kueue evicts a Workload older conditions remain, so it is not admitted then."""
    if is_ending(workload):
        return Answer(False, f"Workload {workload['metadata']['name']} was deleted", withdrawn=True)
    if is_true(workload, _ADMITTED) and not is_true(workload, _EVICTED):
        return Answer(True)
    return Answer(False, _why_not(workload))


def is_ending(workload: Object) -> bool:
    """Whether it was deleted and only finalizers keep it."""
    return "deletionTimestamp" in workload["metadata"]


def is_evicted(workload: Object) -> bool:
    """Whether Kueue reclaims quota that the Workload still holds."""
    return is_true(workload, _EVICTED) and bool(workload.get("status", {}).get("admission"))


def has_old_class(workload: Object, job: PipeTrainingJob) -> bool:
    """Whether it holds no quota, and its WorkloadPriorityClass is not the one that the job names now."""
    named, known = job.metadata.labels.get(PRIORITY_CLASS_LABEL, ""), workload["spec"].get("priorityClassRef", {})
    name = known["name"] if known.get("kind") == "WorkloadPriorityClass" else ""
    return flavors(workload) is None and name != named


def is_true(workload: Object, kind: str) -> bool:
    """Whether the condition of that type is True."""
    return _condition(workload, kind).get("status") == "True"


def returned(workload: Object) -> int:
    """How many pods' quota was returned."""
    pods = workload.get("status", {}).get("reclaimablePods", [])
    return sum(int(one["count"]) for one in pods)


def usage(workload: Object, request: QuotaRequest, generation: Generation | None, now: datetime) -> Object | None:
    """What to apply to the Workload's status: returned quota, and whether all pods run. None if nothing changed."""
    job = workload["metadata"]["labels"][JOB_LABEL]
    names = {worker_name(job, key) for key in request.worker_ids}
    train = (
        generation is not None
        and generation.confirmed
        and bool(names)
        and names <= {member.name for member in generation.members}
    )
    was_ready = is_true(workload, _PODS_READY)
    ready = request.admitted and (train or was_ready)
    if request.returned <= returned(workload) and ready == was_ready:
        return None
    status: Object = {"reclaimablePods": [{"name": POD_SET, "count": request.returned}]}
    if ready:
        before = _condition(workload, _PODS_READY)
        status["conditions"] = [before if was_ready else _new(_PODS_READY, "True", "Started", "all workers train", now)]
    of_theirs = workload["metadata"]
    metadata = {"name": request.name, "namespace": of_theirs["namespace"], "uid": of_theirs["uid"]}
    return {"apiVersion": API, "kind": "Workload", "metadata": metadata, "status": status}


def requeued(workload: Object, request: QuotaRequest, now: datetime) -> Object:
    """A merge patch of the status that ends an eviction: it returns the quota, and the Workload waits in its old place.
    It is one write, because Kueue may answer within milliseconds."""
    evicted = _condition(workload, _EVICTED)
    reason = evicted.get("reason", "Evicted")
    changed = {
        _RESERVED: _new(_RESERVED, "False", "Pending", evicted.get("message", ""), now),
        _ADMITTED: _new(_ADMITTED, "False", "NoReservation", "The workload has no reservation", now),
        "Requeued": _new("Requeued", "True", reason, "all workers have ended", now),
    }
    kept = [one for one in workload["status"]["conditions"] if one["type"] not in {*changed, _PODS_READY}]
    back = [{"name": POD_SET, "count": request.returned}] if request.returned else None
    status = {"admission": None, "reclaimablePods": back, "conditions": [*kept, *changed.values()]}
    return {"metadata": {"resourceVersion": workload["metadata"]["resourceVersion"]}, "status": status}


def flavors(workload: Object) -> tuple[str, ...] | None:
    """Names of the ResourceFlavors that it was admitted to; None if it holds no quota."""
    admission = workload.get("status", {}).get("admission")
    if not admission:
        return None
    names = (name for one in admission.get("podSetAssignments", []) for name in one.get("flavors", {}).values())
    return tuple(dict.fromkeys(names))


def reserved_at(workload: Object) -> str:
    """When Kueue began or ceased to reserve quota for it; empty if that is unknown."""
    return str(_condition(workload, _RESERVED).get("lastTransitionTime", ""))


def assignment(workload: Object, resource_flavors: list[Object]) -> Assignment:
    """What pods on this quota must carry, according to its flavors and admission checks."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    selector: dict[str, str] = {}
    tolerations: list[Object] = []
    for flavor in resource_flavors:
        selector |= flavor.get("spec", {}).get("nodeLabels", {})
        tolerations += flavor.get("spec", {}).get("tolerations", [])
    for check in workload.get("status", {}).get("admissionChecks", []):
        for update in check.get("podSetUpdates", []):
            labels |= update.get("labels", {})
            annotations |= update.get("annotations", {})
            selector |= update.get("nodeSelector", {})
            tolerations += update.get("tolerations", [])
    return Assignment(labels, annotations, selector, tolerations)


def _why_not(workload: Object) -> str:
    """Why it is not admitted, in Kueue's words. The condition Evicted stays True until quota is reserved again."""
    reserved = is_true(workload, _RESERVED)
    evicted = is_true(workload, _EVICTED) and (reserved or workload["spec"].get("active") is False)
    if evicted or not reserved:
        return str(_condition(workload, _EVICTED if evicted else _RESERVED).get("message", ""))
    checks = (one for one in workload["status"].get("admissionChecks", []) if one["state"] != "Ready")
    return "; ".join(f"admission check {one['name']}: {one.get('message') or one['state']}" for one in checks)


def _condition(workload: Object, kind: str) -> Object:
    conditions = workload.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == kind), {})


def _new(kind: str, status: str, reason: str, message: str, now: datetime) -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": f"{now:%Y-%m-%dT%H:%M:%SZ}",
    }
