"""Errors that end a job (wrong spec, model or storage; exit code 2) or only this worker (accelerator; exit code 1).

A broken connection raises a `RuntimeError` or an `OSError`, and workers survive it. The user's code or a broken
accelerator may raise the same types. So where the trainer calls them, it turns their errors into errors of this module.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch

#: Part of CUDA's message when an `assert` in a kernel fails, as for an index out of bounds in the user's code.
_USERS_ASSERT = "device-side assert"

_Failure = torch.AcceleratorError | torch.OutOfMemoryError


class SpecError(ValueError):
    """The job's spec cannot be trained, because of one field.

    Attributes:
        field: path of the field, such as `spec.model.name`.
        reason: CamelCase reason for the job's condition, such as `InvalidSpec` or `DataUnreadable`.
    """

    def __init__(self, field: str, message: str, *, reason: str = "InvalidSpec") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Let loader processes pickle this error. By default pickle gives `__init__` only the message, and fails."""
        return SpecError.__new__, (SpecError, *self.args), self.__dict__


class CallbackError(RuntimeError):
    """A callback of the user's program failed."""

    reason = "CallbackFailed"


class WorkersDifferError(Exception):
    """Workers of one job do not see the same data."""


class StorageError(Exception):
    """A checkpoint, the model or the run's record cannot be written to the location in the spec, or read from it."""

    reason = "StorageFailed"


class StaleCheckpointError(Exception):
    """A newer layout generation, or another run, has already written a durable checkpoint at this location."""


class ModelError(RuntimeError):
    """The model's own code failed. It would fail on any other worker, too."""

    reason = "ModelFailed"


class DeviceError(RuntimeError):
    """The accelerator of this worker failed."""

    reason = "DeviceFailed"


class DeviceMemoryError(RuntimeError):
    """The accelerator of this worker has too little memory for its stage."""

    reason = "OutOfMemory"


class BrokenGroupError(RuntimeError):
    """A connection broke inside the model's backward pass, while gradients were being summed over the pipelines."""


#: Errors that end this worker, because it would fail again in the next generation.
Fault = SpecError | ModelError | CallbackError | DeviceError | DeviceMemoryError


def fault_of(error: BaseException, *, in_regroup: bool = False) -> Fault | None:
    """Find the fault behind `error`: the error itself, or one that caused it.

    Args:
        error: any error of a round or a regroup.
        in_regroup: whether a regroup raised it. Then memory that ran out is not a fault, because a failed regroup
            leaves all state unchanged.

    Returns:
        The fault; None if `error` may be a broken connection.
    """
    causes = list(_causes(error))
    if fault := _fault_among(causes):
        return fault
    failure = _device_failure(causes)
    if failure is None or (in_regroup and _ran_short(failure)):
        return None
    fault = _blame(failure, f"{type(failure).__name__}: {failure}")
    fault.__cause__ = failure
    return fault


class RunningModel:
    """A context that turns errors of the model into `ModelError`, `DeviceError` or `DeviceMemoryError`.

    A `Fault` and a `BrokenGroupError` pass unchanged.

    Args:
        what: what runs in the context, such as `backward`. The message is `WHAT failed`.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception):
            return
        *_, origin = causes = list(_causes(error))
        if not _fault_among(causes) and not any(isinstance(cause, BrokenGroupError) for cause in causes):
            words = f"{self._what} failed: {type(origin).__name__}: {origin}"
            raise _blame(_device_failure(causes), words) from error


def meant(given: str, known: Iterable[str]) -> str:
    """The words ` (did you mean "NAME"?)` with the known name closest to `given`; empty if no known name is close."""
    near = get_close_matches(given, list(known), n=1)
    return f' (did you mean "{near[0]}"?)' if near else ""


@contextmanager
def building(field: str, what: str) -> Iterator[None]:
    """A context that turns any error of the user's code into a `SpecError` about `field` that starts with `what`."""
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(field, f"{what}: {type(error).__name__}: {error}") from error


@contextmanager
def storing(where: str) -> Iterator[None]:
    """A context that turns an `OSError` or a `StaleCheckpointError` into a `StorageError` about `where`."""
    try:
        yield
    except (OSError, StaleCheckpointError) as error:
        raise StorageError(f"{where}: {error}") from error


def _blame(failure: _Failure | None, words: str) -> ModelError | DeviceError | DeviceMemoryError:
    """Make the error for a failure in the model's code. `failure` is the accelerator's error, or None."""
    if failure is None or _USERS_ASSERT in str(failure):
        return ModelError(words)
    return DeviceMemoryError(words) if _ran_short(failure) else DeviceError(words)


def _ran_short(failure: _Failure) -> bool:
    """Whether memory ran out. PyTorch's allocator has an error type for that; libraries only say so in the message."""
    return isinstance(failure, torch.OutOfMemoryError) or "out of memory" in str(failure)


def _device_failure(causes: Sequence[BaseException]) -> _Failure | None:
    """The accelerator's error; None if the accelerator works.

    Kernels fail asynchronously, and libraries raise their own error types. So without an accelerator's error among
    `causes`, this makes a call to CUDA. After a failure every such call raises it.
    """
    found = next((cause for cause in causes if isinstance(cause, _Failure)), None)
    if found is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.current_stream().query()  # waits for nothing
        except torch.AcceleratorError as error:
            return error
    return found


def _fault_among(causes: Sequence[BaseException]) -> Fault | None:
    return next((cause for cause in causes if isinstance(cause, Fault)), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
