"""How workers end: whether it is a failure of the job, when a start replaces the worker, and what messages say.

`LOSSES` is the only table for this. It cannot tell whether a silent worker's node is lost; `budget` decides that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter

from pipetransformer_contract.api.status import MAX_CONDITION_REASON, Reason
from pipetransformer_contract.messages import Outcome

from .last_words import MAX_WORKER_CHARACTERS, report_in
from .types import FailureCause, Worker

#: Exit code of a trainer that refuses the job's spec, because it cannot do what the spec says.
EXIT_USER_ERROR = 2
#: Exit code of a process that was killed with SIGKILL, as by the kernel when the memory limit is reached.
EXIT_KILLED = 137
#: Reason in the report of a trainer whose accelerator failed.
DEVICE_FAILED = "DeviceFailed"
#: Wait before a start replaces a failed worker, as for a Job's pods. Each failure in a row doubles it.
RETRY = timedelta(seconds=10)
#: Wait before a start replaces a worker whose pod the cluster removed, because the cause may still be there.
RETRY_TAKEN = timedelta(seconds=30)


# -- the trainer's termination message


def report_of(worker: Worker) -> dict[str, object]:
    """The trainer's own report; empty if it wrote none."""
    return report_in(worker.message)


def termination(worker: Worker) -> tuple[str, str]:
    """Reason and message of a trainer that has ended. Without a report the message is the end of its log."""
    return _text(worker, "reason")[:MAX_CONDITION_REASON], _text(worker, "message") or worker.message


def words(worker: Worker) -> str:
    """The trainer's explanation of its end: its report, or the end of its log."""
    if worker.exit_code == 0 and not _text(worker, "outcome"):
        return "it did not report the end of training; the command of the pod template must call train()"
    reason, message = termination(worker)
    return ": ".join(filter(None, [reason, message[:MAX_WORKER_CHARACTERS]]))


def says_succeeded(worker: Worker | None) -> bool:
    """Whether a worker exited because the training is done."""
    return worker is not None and _exited_as(worker, Outcome.SUCCEEDED)


def says_left(worker: Worker) -> bool:
    """Whether a worker exited because it was told to leave. The operator may want it again by now."""
    return _exited_as(worker, "Left")


def saved_step(worker: Worker) -> int:
    """Committed steps of the durable checkpoint that a worker wrote before it exited as told; 0 if it wrote none."""
    return _number(worker, "savedStep")


def blames_device(worker: Worker) -> bool:
    """Whether a worker ended because its accelerator failed."""
    return _failed_by(worker, DEVICE_FAILED)


def out_of_memory_at(worker: Worker) -> int:
    """If the worker ran out of memory: how many stages its pipeline had; otherwise 0."""
    return _number(worker, "stages") if _failed_by(worker, Reason.OUT_OF_MEMORY) else 0


def packed_too_tight(worker: Worker, longest: int) -> bool:
    """Whether the worker ran out of memory in a pipeline of fewer stages than `longest`, the spec's number."""
    return 0 < out_of_memory_at(worker) < longest


def _exited_as(worker: Worker, outcome: str) -> bool:
    return worker.exit_code == 0 and _text(worker, "outcome") == outcome


def _failed_by(worker: Worker, reason: str) -> bool:
    return bool(worker.exit_code) and _text(worker, "reason") == reason


def _number(worker: Worker, field: str) -> int:
    """A positive whole number in the trainer's report; 0 without one."""
    value = report_of(worker).get(field)
    return value if isinstance(value, int) and value > 0 else 0


def _text(worker: Worker, field: str) -> str:
    """A field of the trainer's report, as text without characters that JSON cannot encode."""
    return str(report_of(worker).get(field, "")).encode(errors="replace").decode()


# -- consequences for the job


@dataclass(frozen=True, slots=True)
class Loss:
    """What follows from the loss of a worker.

    Attributes:
        counts: whether the loss is a failure of the job and counts against `runPolicy.backoffLimit`.
        retry: how long a start waits before it replaces the worker; None to replace it at once.
        told: description for messages, which append the worker's own words. `{code}` stands for its exit code, and
            `{phase}` for its pod's phase.
    """

    counts: bool
    retry: timedelta | None
    told: str


_TAKEN_AWAY = "taken away"
_GONE = Loss(counts=False, retry=None, told="its pod is gone")
_PACKED_TOO_TIGHT = Loss(counts=False, retry=None, told="exit code {code}")
#: Ways in which a worker ends, and what follows. The first row whose question is true of the worker applies.
LOSSES: tuple[tuple[Callable[[Worker], bool], Loss], ...] = (
    (attrgetter("disrupted"), Loss(counts=False, retry=RETRY_TAKEN, told=_TAKEN_AWAY)),
    (attrgetter("terminating"), Loss(counts=False, retry=None, told=_TAKEN_AWAY)),
    (says_left, Loss(counts=False, retry=None, told="exit code {code}")),
    (says_succeeded, Loss(counts=False, retry=None, told="exit code {code}")),
    (lambda worker: worker.exit_code is not None, Loss(counts=True, retry=RETRY, told="exit code {code}")),
    (lambda worker: bool(words(worker)), Loss(counts=True, retry=RETRY, told="")),
    (bool, Loss(counts=True, retry=RETRY, told="{phase}")),
)


def loss_of(worker: Worker | None, longest: int = 0) -> Loss:
    """What follows from the loss of this worker.

    Args:
        worker: the lost worker. None if its pod is gone: the pod was removed, because a worker that fails leaves one.
        longest: the spec's number of stages; 0 if it does not matter. If a pipeline with fewer stages runs out of
            memory, this is not a failure, because the job continues with longer pipelines.
    """
    if worker is None:
        return _GONE
    if packed_too_tight(worker, longest):
        return _PACKED_TOO_TIGHT
    return next(loss for fits, loss in LOSSES if fits(worker))


def cause_of(worker: Worker) -> FailureCause:
    """Why a worker failed, for the metrics. Only for losses that are a failure of the job (`Loss.counts`)."""
    if worker.exit_code is None:
        return FailureCause.POD
    if blames_device(worker):
        return FailureCause.ACCELERATOR
    return FailureCause.KILLED if worker.exit_code == EXIT_KILLED else FailureCause.EXITED


def describe(worker: Worker | None) -> str:
    """How a worker was lost, in words for messages. None is a worker whose pod is gone."""
    told = loss_of(worker).told
    if worker is None:
        return told
    told = told.format(code=worker.exit_code, phase=worker.phase.value)
    silent = told == _TAKEN_AWAY and worker.exit_code == 0
    return ": ".join(filter(None, [told, "" if silent else words(worker)]))
