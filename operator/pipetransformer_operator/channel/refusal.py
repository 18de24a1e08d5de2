"""Why the channel refuses requests: one kind for each cause, with its HTTP status code."""

from enum import Enum


class Refusal(Enum):
    """(name in the metrics, HTTP status code). 429 and 503: try again; 410: exit."""

    NO_TOKEN = "NoToken", 401  #: no bearer token
    INVALID_TOKEN = "InvalidToken", 401  #: unknown, expired, for another audience, or bound to no pod
    FOREIGN_NAMESPACE = "ForeignNamespace", 403  #: the token's pod is in another namespace than the job
    FOREIGN_WORKER = "ForeignWorker", 403  #: the token's pod is not the worker that the request names
    FOREIGN_JOB = "ForeignJob", 403  #: the token's pod is not a worker of the job
    NOT_MEMBER = "NotMember", 403  #: a report of a worker that is not in the published generation
    UNPUBLISHED = "Unpublished", 409  #: a report of a generation that was never published
    BAD_QUERY = "BadQuery", 400
    NO_JSON = "NoJson", 400
    TOO_LONG = "TooLong", 413
    DOES_NOT_FIT = "DoesNotFit", 422  #: valid JSON, but not a valid message: the text names the field
    TOO_MANY = "TooMany", 429  #: too many requests of a worker, bad tokens of an address, or polls
    UNKNOWN_JOB = "UnknownJob", 503  #: the operator has not seen the job yet, or does not hold the lease
    CANNOT_TELL = "CannotTell", 503  #: the token cannot be checked now
    NOT_DURABLE = "NotDurable", 503  #: the report is not in the status yet
    ENDED = "Ended", 410  #: the job has ended

    @property
    def label(self) -> str:
        """Name in the metrics."""
        return self.value[0]

    @property
    def code(self) -> int:
        """HTTP status code."""
        return self.value[1]


class RefusedError(Exception):
    """A refused request. The text goes to the worker.

    Args:
        kind: why.
        text: what is wrong.
        retry_after: seconds until the same request may be served.
    """

    def __init__(self, kind: Refusal, text: str, *, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.retry_after = retry_after
