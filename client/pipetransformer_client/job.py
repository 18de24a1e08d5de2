"""A job on the cluster and its events, as the client returns them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from pipetransformer_contract.api import JobStatus
from pipetransformer_contract.api.job import TRAINER_CONTAINER
from pipetransformer_contract.api.status import ConditionType

from .errors import ClientError


@dataclass(frozen=True)
class Job:
    """A `PipeTrainingJob`. The manifest is plain JSON, so that the client can show jobs with fields that it does not
    know. Only the status has a type."""

    name: str
    namespace: str
    uid: str
    manifest: Mapping[str, Any]

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "Job":
        """Makes a job from an object of the API server."""
        metadata = manifest["metadata"]
        return cls(metadata["name"], metadata["namespace"], metadata["uid"], manifest)

    @cached_property
    def status(self) -> JobStatus:
        """What the operator says of the job.

        Raises:
            ClientError: it does not fit this client's types.
        """
        try:
            return JobStatus.model_validate(self.manifest.get("status") or {})
        except ValidationError as error:
            first = error.errors()[0]
            where, field = f"{self.namespace}/{self.name}", ".".join(map(str, first["loc"]))
            words = f"the status of {where} is newer than this client: upgrade the client ({field}: {first['msg']})"
            raise ClientError(words) from error

    @property
    def finished(self) -> bool:
        """Whether the job has completed or failed."""
        return self.status.finished

    @property
    def failure(self) -> str:
        """Why the job failed; empty if it did not fail."""
        failed = self.status.condition(ConditionType.FAILED)
        if failed is None or not self.status.is_true(ConditionType.FAILED):
            return ""
        return f"{failed.reason}: {failed.message}"

    @property
    def created(self) -> datetime:
        """When the job was created."""
        return datetime.fromisoformat(self.manifest["metadata"]["creationTimestamp"])

    @property
    def trainer(self) -> str:
        """Name of the container that trains."""
        names = [container["name"] for container in self.manifest["spec"]["podTemplate"]["spec"]["containers"]]
        return TRAINER_CONTAINER if TRAINER_CONTAINER in names else str(names[0])

    @property
    def results(self) -> str | None:
        """Folder or URL with the job's model; None without `spec.output`. A folder also has the record."""
        output = self.manifest["spec"].get("output")
        return None if output is None else f"{output['location'].rstrip('/')}/{self.name}"

    @property
    def on_volume(self) -> bool:
        """Whether the results are on a mounted volume."""
        return self.results is not None and "://" not in self.results

    def rank(self, worker: str) -> int | None:
        """Rank of the worker with this name in the current generation; None if it is not a member."""
        members = self.status.generation.members if self.status.generation else []
        return next((rank for rank, member in enumerate(members) if member.name == worker), None)


@dataclass(frozen=True)
class Event:
    """A Kubernetes event about a job.

    Attributes:
        uid: UID of the event.
        time: when it last happened.
        reason: its reason, in one word.
        message: its message.
        warning: whether its type is Warning.
    """

    uid: str
    time: datetime
    reason: str
    message: str
    warning: bool

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Event":
        time = body.get("lastTimestamp") or body.get("eventTime") or body["metadata"]["creationTimestamp"]
        return cls(
            body["metadata"]["uid"],
            datetime.fromisoformat(time),
            body.get("reason", ""),
            body.get("message", ""),
            body.get("type") == "Warning",
        )
