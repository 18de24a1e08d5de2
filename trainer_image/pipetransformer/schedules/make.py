"""Makes the schedule that a spec names."""

from pipetransformer.errors import SpecError
from pipetransformer_contract.spec import ScheduleName

from .asynchronous import Asynchronous
from .flushed import GPipe, OneForwardOneBackward
from .operations import Schedule, ScheduleError
from .owners import OwnsSpans
from .tera import TeraPipe

_DEFAULT_SPANS = 2


def make_schedule(
    name: ScheduleName, script_schedule: Schedule | type | None = None, *, spans_per_worker: int | None = None
) -> Schedule:
    """The schedule of this name; for `Script` the schedule that the user's program passed.

    Args:
        name: the name in the spec.
        script_schedule: the program's schedule, for `Script`: a `Schedule`, or a schedule class of torch with a
            `pipeline_order`.
        spans_per_worker: spans of each worker, for schedules that can have several; 2 if it is None.

    Raises:
        SpecError: `script_schedule` is neither a `Schedule` nor such a class, or cannot be hashed.
    """
    match name:
        case ScheduleName.GPIPE:
            return GPipe()
        case ScheduleName.ONE_FORWARD_ONE_BACKWARD | ScheduleName.AUTO:  # a layout's cut names what `Auto` chose
            return OneForwardOneBackward()
        case ScheduleName.TERA_PIPE:
            return TeraPipe()
        case ScheduleName.PIPE_OPTIM | ScheduleName.PIPE_DREAM | ScheduleName.ASYNC_ONE_FORWARD_ONE_BACKWARD:
            return Asynchronous()
        case ScheduleName.SCRIPT:
            return _of_script(script_schedule, spans_per_worker)
        case ScheduleName.INTERLEAVED | ScheduleName.ZERO_BUBBLE | ScheduleName.ZERO_BUBBLE_V:
            from . import from_torch  # torch's schedules take long to import

            if name is ScheduleName.ZERO_BUBBLE_V:
                return from_torch.ZeroBubbleV()
            kind = from_torch.Interleaved if name is ScheduleName.INTERLEAVED else from_torch.ZeroBubble
            return kind(spans_per_worker or _DEFAULT_SPANS)


def _of_script(schedule: Schedule | type | None, spans_per_worker: int | None) -> Schedule:
    if isinstance(schedule, type):
        from . import from_torch  # torch's schedules take long to import

        default = _DEFAULT_SPANS if from_torch.has_several_spans(schedule) else 1
        try:
            return from_torch.FromTorch(schedule, spans_per_worker or default)
        except ScheduleError as error:
            raise SpecError("schedule", str(error)) from error
    if schedule is None or not callable(getattr(schedule, "actions", None)):
        raise SpecError(
            "schedule", f"{schedule!r} is neither a Schedule (it has no method actions) nor a schedule class of torch"
        )
    try:
        hash(schedule)
    except TypeError as error:
        advice = "make it a frozen dataclass, for example, and its lists tuples"
        raise SpecError("schedule", f"{type(schedule).__name__} must be hashable: {advice} ({error})") from error
    _check_spans(schedule, spans_per_worker)
    return schedule


def _check_spans(schedule: Schedule, spans_per_worker: int | None) -> None:
    """Check that the program's schedule has a number of spans, and the one that the spec asks for, if it asks."""
    if not isinstance(schedule, OwnsSpans):
        return
    spans = schedule.spans
    if not isinstance(spans, int) or spans < 1:
        raise SpecError("schedule", f"{type(schedule).__name__}.spans must be an int of at least 1, not {spans!r}")
    if spans_per_worker not in (None, spans):
        message = (
            f"is {spans_per_worker}, but the program's schedule {type(schedule).__name__} has {spans}: leave it out"
        )
        raise SpecError("spec.pipeline.spansPerWorker", message)
