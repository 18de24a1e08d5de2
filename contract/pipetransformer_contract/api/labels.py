"""All labels that the operator reads or sets, and a check of a job's labels, which the CRD's CEL rules cannot see."""

from collections.abc import Mapping

from .field_error import FieldError
from .job import GROUP, JobSpec

#: On all objects of a job: the job's name.
JOB_LABEL = f"{GROUP}/job"
#: On a worker's pod: the worker's id.
WORKER_LABEL = f"{GROUP}/worker-id"
#: On a worker's pod: "true" if the worker is claimed, otherwise "false". It never changes.
CLAIMED_LABEL = f"{GROUP}/claimed"
#: On a worker's pod: its group. The workers of a group are placed close together (`kube/workers/placement.py`).
PLACEMENT_GROUP_LABEL = f"{GROUP}/placement-group"
#: On a worker's pod: its group. The scheduler binds the workers of a group all at once (`kube/workers/pod_groups.py`).
POD_GROUP_LABEL = f"{GROUP}/pod-group"
#: Annotation of a job: a token by which a user asks for a checkpoint now. A new token asks again.
CHECKPOINT_NOW_ANNOTATION = f"{GROUP}/checkpoint-now"
#: On all objects that the operator creates for a job.
MANAGED_BY = {"app.kubernetes.io/managed-by": "pipetransformer-operator"}
#: A label of Kueue on a job: the queue that the job asks. Kueue may stop the job, so the job needs a checkpoint.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
#: A label of Kueue on a Workload: UID of its job.
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
#: A label of Kueue on a job: its WorkloadPriorityClass.
PRIORITY_CLASS_LABEL = "kueue.x-k8s.io/priority-class"
#: A label of Kubernetes on a namespace: the namespace's name.
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def label_errors(labels: Mapping[str, str], spec: JobSpec) -> list[FieldError]:
    """Returns an error if the job names a queue but has no checkpoint, because the queue may stop the job."""
    if not labels.get(QUEUE_LABEL) or spec.checkpoint is not None:
        return []
    message = "a queue may stop the job, so the job needs spec.checkpoint: without one all training would be lost"
    return [FieldError(f"metadata.labels[{QUEUE_LABEL}]", message)]
