"""What ends a job whoever trains it: the user's spec, model or storage is wrong. A worker exits with code 2. And what
ends this worker alone: its accelerator failed, or has not the memory. It exits with code 1, and another, or a longer
pipeline, may do better.

A connection that breaks raises a `RuntimeError` or an `OSError` and is survived, and code of the user's, or a broken
accelerator, may raise the same. So wherever such code runs, what it raises becomes an error of this module.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch

#: What CUDA calls an index out of bounds, or any other `assert` in a kernel, of the user's.
_USERS_ASSERT = "device-side assert"

_Failure = torch.AcceleratorError | torch.OutOfMemoryError


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

    def __reduce__(self) -> tuple[Any, ...]:
        """From a process that reads samples: what `__init__` takes is not what an exception keeps."""
        return SpecError.__new__, (SpecError, *self.args), self.__dict__


class CallbackError(RuntimeError):
    """A callback of the user's program failed."""

    reason = "CallbackFailed"


class WorkersDifferError(Exception):
    """Workers of one job do not see the same data."""


class StorageError(Exception):
    """A checkpoint, the model or the run's record cannot be written, or read, where the spec says."""

    reason = "StorageFailed"


class StaleCheckpointError(Exception):
    """A newer layout generation, or another run, has already left a durable checkpoint."""


class ModelError(RuntimeError):
    """The model itself failed, which no other worker can repair."""

    reason = "ModelFailed"


class DeviceError(RuntimeError):
    """The accelerator of this worker failed."""

    reason = "DeviceFailed"


class DeviceMemoryError(RuntimeError):
    """The accelerator of this worker has not the memory that its stage needs."""

    reason = "OutOfMemory"


class BrokenGroupError(RuntimeError):
    """A connection broke in the middle of what belongs to the model: gradients are summed while its backward runs."""


#: What no other generation of this worker would survive.
Fault = SpecError | ModelError | CallbackError | DeviceError | DeviceMemoryError


def fault_of(error: BaseException, *, in_regroup: bool = False) -> Fault | None:
    """What `error` is or comes from, if that ends this worker: torch wraps what a stage of its raises. None where a
    connection may have broken; or where a regroup ran out of memory, before which all state is as it was."""
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
    """A context in which whatever is raised becomes a `ModelError` that says `what` failed, a `DeviceError` or a
    `DeviceMemoryError`; but for a broken connection, and for what already says whose fault it is."""

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
    """` (did you mean "NAME"?)` for a name that is close to a known one; nothing where none is."""
    near = get_close_matches(given, list(known), n=1)
    return f' (did you mean "{near[0]}"?)' if near else ""


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


def _blame(failure: _Failure | None, words: str) -> ModelError | DeviceError | DeviceMemoryError:
    """Whose fault it is, given what the accelerator says."""
    if failure is None or _USERS_ASSERT in str(failure):
        return ModelError(words)
    return DeviceMemoryError(words) if _ran_short(failure) else DeviceError(words)


def _ran_short(failure: _Failure) -> bool:
    """Whether it is about memory, of which what is not PyTorch's allocator tells in words of CUDA."""
    return isinstance(failure, torch.OutOfMemoryError) or "out of memory" in str(failure)


def _device_failure(causes: Sequence[BaseException]) -> _Failure | None:
    """What the accelerator failed with. Kernels fail after they were called, and libraries tell it in words of their
    own; but all that is asked of CUDA from then on fails alike."""
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
