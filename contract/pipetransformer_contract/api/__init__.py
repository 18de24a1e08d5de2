"""The `PipeTrainingJob` API: its types are the one source of the CRD, of validation and of what the operator reads."""

from .job import GROUP, KIND, PLURAL, VERSION, JobSpec, Metadata, PipeTrainingJob, trainer_spec
from .status import JobStatus

__all__ = [
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "JobSpec",
    "JobStatus",
    "Metadata",
    "PipeTrainingJob",
    "trainer_spec",
]
