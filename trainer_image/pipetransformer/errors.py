"""What ends a job whoever trains it: the user's spec, model or storage is wrong. A worker exits with code 2.

A connection that breaks raises a `RuntimeError` or an `OSError` and is survived, and code of the user's may raise the
same. So wherever such code runs, what it raises becomes an error of this module.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class SpecError(ValueError):
    """A field of the job's spec cannot be trained.

    Attributes:
        field: path of the field, such as `spec.model.name`.
        reason: CamelCase reason for the job's condition, such as `InvalidSpec` or `DataUnreadable`.
    """

    def __init__(self, field: str, message: str, *, reason: str = "InvalidSpec") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = reason


class CallbackError(RuntimeError):
    """A callback of the user's program failed."""

    reason = "CallbackFailed"


class WorkersDifferError(Exception):
    """Workers of one job do not see the same data."""


class StorageError(Exception):
    """A checkpoint, the model or the run's record cannot be written, or read, where the spec says."""

    reason = "StorageFailed"


class StaleCheckpointError(Exception):
    """A newer layout generation has already left a durable checkpoint."""


class ModelError(RuntimeError):
    """The model itself failed, which no other worker can repair."""

    reason = "ModelFailed"


class BrokenGroupError(RuntimeError):
    """A connection broke in the middle of what belongs to the model: gradients are summed while its backward runs."""


def users_fault(error: BaseException) -> SpecError | ModelError | CallbackError | None:
    """Whose error `error` is or comes from, where that is the user's: torch wraps what a stage of its raises."""
    return next((cause for cause in _causes(error) if isinstance(cause, SpecError | ModelError | CallbackError)), None)


class RunningModel:
    """A context in which whatever is raised becomes a `ModelError` that says `what` failed; but for a broken
    connection, and for what already says whose fault it is."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception) or users_fault(error):
            return
        *_, origin = causes = list(_causes(error))
        if not any(isinstance(cause, BrokenGroupError) for cause in causes):
            raise ModelError(f"{self._what} failed: {type(origin).__name__}: {origin}") from error


@contextmanager
def building(field: str, what: str) -> Iterator[None]:
    """Whatever is raised in here becomes a `SpecError` about `field` that says `what` the user's code could not do."""
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(field, f"{what}: {type(error).__name__}: {error}") from error


@contextmanager
def storing(where: str) -> Iterator[None]:
    """An `OSError` in here, or that a checkpoint is stale, becomes a `StorageError` about `where`."""
    try:
        yield
    except (OSError, StaleCheckpointError) as error:
        raise StorageError(f"{where}: {error}") from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
