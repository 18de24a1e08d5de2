"""The API of `PipeTrainingJob`s. The CRD, its validation and the operator's types are all made from these types."""

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
