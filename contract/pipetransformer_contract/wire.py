"""The names that operator and workers must agree on: environment variables of a worker, and paths of the channel.

The environment tells a worker all that stays the same while it lives: its job, its name, and what to train. The channel
and the leader tell it what changes: the generations.
"""

from typing import Final

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Wire(BaseModel):
    """Base class of messages. Names are snake_case in Python and camelCase in JSON. Readers ignore unknown fields."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    def to_wire(self) -> dict[str, object]:
        """Returns this message for JSON, with keys in camelCase, and without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Env:
    """Names of the environment variables of a worker."""

    JOB_NAMESPACE: Final = "PIPETRANSFORMER_JOB_NAMESPACE"
    JOB_NAME: Final = "PIPETRANSFORMER_JOB_NAME"
    JOB_UID: Final = "PIPETRANSFORMER_JOB_UID"
    #: JSON of `pipetransformer_contract.spec.TrainerSpec`.
    JOB_SPEC: Final = "PIPETRANSFORMER_JOB_SPEC"
    #: `<job>-w<id>`: the name of the worker and of its pod. It is never reused within a job.
    WORKER_NAME: Final = "PIPETRANSFORMER_WORKER_NAME"
    #: The pod's UID. For a local process a random one.
    WORKER_UID: Final = "PIPETRANSFORMER_WORKER_UID"
    #: Address of this worker for other workers: the pod's IP.
    WORKER_ADDRESS: Final = "PIPETRANSFORMER_WORKER_ADDRESS"
    NODE_NAME: Final = "PIPETRANSFORMER_NODE_NAME"
    #: Base URL of the channel, such as https://pipetransformer-operator.NAMESPACE.svc:8443
    CHANNEL_URL: Final = "PIPETRANSFORMER_CHANNEL_URL"
    #: File with the PEM certificates of the channel's authorities. Not set if the channel is local and without TLS.
    CHANNEL_CA_FILE: Final = "PIPETRANSFORMER_CHANNEL_CA_FILE"
    #: File with the bearer token. Read again for each request, because projected tokens are rotated in place.
    CHANNEL_TOKEN_FILE: Final = "PIPETRANSFORMER_CHANNEL_TOKEN_FILE"
    #: Folder for the run's record; on a cluster a folder beside the output.
    RUN_DIR: Final = "PIPETRANSFORMER_RUN_DIR"
    #: Port of the worker's metrics page on its own address. If unset or empty, the worker serves no metrics.
    METRICS_PORT: Final = "PIPETRANSFORMER_METRICS_PORT"
    #: File to which the worker writes its outcome: a pod's /dev/termination-log.
    TERMINATION_LOG: Final = "PIPETRANSFORMER_TERMINATION_LOG"
    #: For a worker on a CPU: bytes that its layers may take, in place of its container's limit. Only users set it.
    DEVICE_BYTES: Final = "PIPETRANSFORMER_DEVICE_BYTES"
    #: How operator and workers write log lines: `Text` or `Json`. The chart sets it for the operator. For workers only
    #: users set it, in the pod template.
    LOG_FORMAT: Final = "PIPETRANSFORMER_LOG_FORMAT"


class ChannelPath:
    """Paths of the channel. `docs/channel.md` lists the status codes."""

    #: POST `Ready`: this worker has warmed up, and its store listens. Answer: 204.
    READY: Final = "/v1/ready"
    #: GET ?after=G&timeoutSeconds=T: the `GenerationNotice` of the newest generation above G that names this worker.
    #: With members=true it is the `Generation` itself. 204: none was published in time. 410: the job has ended. So a
    #: worker whose pod was created again exits.
    GENERATION: Final = "/v1/generation"
    #: POST `Heartbeat`, by every worker. Answer: a `HeartbeatReply`; 410 once the job has ended.
    HEARTBEAT: Final = "/v1/heartbeat"
    #: POST `Report`, by the leader. Answer: a `ReportReply`, once the job's status contains the report.
    REPORT: Final = "/v1/report"


#: Audience of the projected ServiceAccount token that a worker authenticates with.
TOKEN_AUDIENCE: Final = "training.pipetransformer.io"
