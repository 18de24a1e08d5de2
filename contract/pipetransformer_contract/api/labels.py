"""What a job's labels forbid: CEL does not see them, so the operator looks for itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from .job import QUEUE_LABEL, JobSpec

#: On all objects that belong to a job: its name.
JOB_LABEL = "training.pipetransformer.io/job"


@dataclass(frozen=True, slots=True)
class FieldError:
    """`path` is the field as the user wrote it, such as `spec.training.epochs`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def label_errors(labels: Mapping[str, str], spec: JobSpec) -> list[FieldError]:
    """What the API server had to let through: a queue may stop a job that has no checkpoint to start from."""
    if QUEUE_LABEL not in labels or spec.checkpoint is not None:
        return []
    message = "a queue may stop the job, which needs spec.checkpoint: without one all training is lost"
    return [FieldError(f"metadata.labels[{QUEUE_LABEL}]", message)]
