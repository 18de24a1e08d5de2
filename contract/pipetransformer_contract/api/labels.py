"""All labels of this project, and a check of a job's labels in the operator, because CEL does not see labels."""

from collections.abc import Mapping
from dataclasses import dataclass

from .job import GROUP, JobSpec

#: Name of the job, on all its objects.
JOB_LABEL = f"{GROUP}/job"
#: Id of the worker, on its pod.
WORKER_LABEL = f"{GROUP}/worker-id"
#: The operator places workers of one group close together, see `kube/workers/placement.py`.
PLACEMENT_GROUP_LABEL = f"{GROUP}/placement-group"
#: The scheduler gives workers of one group nodes all at once, see `kube/workers/pod_groups.py`.
POD_GROUP_LABEL = f"{GROUP}/pod-group"
#: On all objects that the operator creates for a job.
MANAGED_BY = {"app.kubernetes.io/managed-by": "pipetransformer-operator"}
#: Kueue's: the queue that a job waits in. Kueue may stop the job, so the job needs a checkpoint.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
#: Kueue's: UID of the job that a Workload is for.
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
#: Kueue's: the WorkloadPriorityClass of a job.
PRIORITY_CLASS_LABEL = "kueue.x-k8s.io/priority-class"
#: Kubernetes' own: name of a namespace, on the namespace.
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True, slots=True)
class FieldError:
    """An error of one field. `path` names it as the user wrote it, such as `spec.training.epochs`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def label_errors(labels: Mapping[str, str], spec: JobSpec) -> list[FieldError]:
    """Refuses a job that names a queue and has no checkpoint, because the queue may stop it."""
    if QUEUE_LABEL not in labels or spec.checkpoint is not None:
        return []
    message = "a queue may stop the job, which needs spec.checkpoint: without one all training is lost"
    return [FieldError(f"metadata.labels[{QUEUE_LABEL}]", message)]
