"""How a worker finds its job: the environment it starts with and the paths of the channel.

The environment tells a worker everything that cannot change while it lives: which job, which worker, what to train. The
channel or the leader tells it everything that can change: the generations.
"""

from typing import Final

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Wire(BaseModel):
    """Base of every wire type: camelCase on the wire, snake_case in Python. Readers ignore unknown fields."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    def to_wire(self) -> dict[str, object]:
        """Returns a form for JSON, with camelCase keys and without unset optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Env:
    """Names of the environment variables of a worker."""

    JOB_NAMESPACE: Final = "PIPETRANSFORMER_JOB_NAMESPACE"
    JOB_NAME: Final = "PIPETRANSFORMER_JOB_NAME"
    JOB_UID: Final = "PIPETRANSFORMER_JOB_UID"
    #: JSON of `pipetransformer_contract.spec.TrainerSpec`.
    JOB_SPEC: Final = "PIPETRANSFORMER_JOB_SPEC"
    #: `<job>-w<id>`: the pod's name, never reused within a job.
    WORKER_NAME: Final = "PIPETRANSFORMER_WORKER_NAME"
    #: The pod's UID (a random one for a local process).
    WORKER_UID: Final = "PIPETRANSFORMER_WORKER_UID"
    #: Address where the other workers reach this one (the pod's IP).
    WORKER_ADDRESS: Final = "PIPETRANSFORMER_WORKER_ADDRESS"
    NODE_NAME: Final = "PIPETRANSFORMER_NODE_NAME"
    #: Base URL of the channel, such as https://pipetransformer-operator.NAMESPACE.svc:8443
    CHANNEL_URL: Final = "PIPETRANSFORMER_CHANNEL_URL"
    #: File with the PEM certificates that sign the channel; unset for a plain local channel.
    CHANNEL_CA_FILE: Final = "PIPETRANSFORMER_CHANNEL_CA_FILE"
    #: File with the bearer token. Read again for each request, because projected tokens are rotated in place.
    CHANNEL_TOKEN_FILE: Final = "PIPETRANSFORMER_CHANNEL_TOKEN_FILE"
    #: Folder for the run's record; on a cluster a folder beside the output.
    RUN_DIR: Final = "PIPETRANSFORMER_RUN_DIR"
    #: Port of the worker's metrics page on its own address. If unset or empty, the worker serves no metrics.
    METRICS_PORT: Final = "PIPETRANSFORMER_METRICS_PORT"
    #: File that the worker writes its outcome to (a pod's /dev/termination-log).
    TERMINATION_LOG: Final = "PIPETRANSFORMER_TERMINATION_LOG"
    #: Bytes that the layers of a worker on a CPU may take, in place of its container's limit. A user sets it.
    DEVICE_BYTES: Final = "PIPETRANSFORMER_DEVICE_BYTES"


class Path:
    """Paths of the channel. `docs/channel.md` lists the status codes."""

    #: POST `Ready`: this worker is imported and warm, and listens on its store. 204.
    READY: Final = "/v1/ready"
    #: GET ?after=G&timeoutSeconds=T: the `GenerationNotice` of the newest generation above G that names this worker.
    #: With members=true it is the `Generation` itself. 204: none came in time. 410: the job has ended, so that a worker
    #: that was created again exits.
    GENERATION: Final = "/v1/generation"
    #: POST `Heartbeat` by members. The answer is a `HeartbeatReply`.
    HEARTBEAT: Final = "/v1/heartbeat"
    #: POST `Report` by the leader. The answer is a `ReportReply`, once what must be durable is durable.
    REPORT: Final = "/v1/report"


#: Audience of the projected ServiceAccount token that a worker authenticates with.
TOKEN_AUDIENCE: Final = "training.pipetransformer.io"
