"""What the channel answers instead of doing what it was asked: one kind a cause, with its status code."""

from enum import Enum


class Refusal(Enum):
    """(name in the metrics, HTTP status code). Those with 429 and 503 say: come again; 410: go."""

    NO_TOKEN = "NoToken", 401  #: no bearer token
    INVALID_TOKEN = "InvalidToken", 401  #: unknown, expired, for another audience, or bound to no pod
    FOREIGN_NAMESPACE = "ForeignNamespace", 403  #: the token's pod lives in another namespace than the job
    FOREIGN_WORKER = "ForeignWorker", 403  #: the token's pod is not the worker that the request names
    FOREIGN_JOB = "ForeignJob", 403  #: the token's pod is no worker of the job
    NOT_MEMBER = "NotMember", 403  #: a report of a worker that is not in the published generation
    UNPUBLISHED = "Unpublished", 409  #: a report of a generation that was never published
    BAD_QUERY = "BadQuery", 400
    NO_JSON = "NoJson", 400
    TOO_LONG = "TooLong", 413
    DOES_NOT_FIT = "DoesNotFit", 422  #: JSON, but not such a message: the text names the field
    TOO_MANY = "TooMany", 429  #: more requests than a worker, an address with bad tokens, or all polls may
    UNKNOWN_JOB = "UnknownJob", 503  #: the job was not seen yet, or another operator holds the lease
    CANNOT_TELL = "CannotTell", 503  #: a token that nobody can check now
    NOT_DURABLE = "NotDurable", 503  #: the status does not hold the report yet
    ENDED = "Ended", 410  #: the job has ended

    @property
    def label(self) -> str:
        """As a metric's label."""
        return self.value[0]

    @property
    def code(self) -> int:
        """HTTP status code."""
        return self.value[1]


class RefusedError(Exception):
    """A request that is not served; the text goes to the worker.

    Args:
        kind: why.
        text: in words.
        retry_after: seconds until the same request may be served.
    """

    def __init__(self, kind: Refusal, text: str, *, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.retry_after = retry_after
