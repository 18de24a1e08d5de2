"""A Python client of PipeTrainingJobs, and the command `pipetransformer`, which is also a kubectl plugin."""

from pipetransformer_contract.api.manifest import InvalidManifest

from .client import Client
from .errors import AlreadyExists, ClientError, InvalidName, NotFound, NothingToFetch, Refused, Unavailable
from .job import Event, Job
from .logs import LogLine

__all__ = [
    "AlreadyExists",
    "Client",
    "ClientError",
    "Event",
    "InvalidManifest",
    "InvalidName",
    "Job",
    "LogLine",
    "NotFound",
    "NothingToFetch",
    "Refused",
    "Unavailable",
]
