"""The pipeline schedule of torch that a job runs."""

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from pipetransformer.errors import SpecError
from pipetransformer_contract.spec import ScheduleName

#: A schedule with one stage per worker, such as torch's `Schedule1F1B`.
ScheduleClass = type[PipelineScheduleSingle]


def schedule_class(name: ScheduleName, own: ScheduleClass | None = None) -> ScheduleClass:
    """The schedule that a spec names; `own` for `Script`.

    Raises:
        SpecError: `own` is not a schedule with one stage per worker (others lose gradients next to frozen layers).
    """
    match name:
        case ScheduleName.GPIPE:
            return ScheduleGPipe
        case ScheduleName.ONE_FORWARD_ONE_BACKWARD:
            return Schedule1F1B
        case ScheduleName.SCRIPT:
            if not isinstance(own, type) or not issubclass(own, PipelineScheduleSingle):
                raise SpecError(
                    "schedule", f"{own!r} is not a subclass of torch.distributed.pipelining's PipelineScheduleSingle"
                )
            return own
        case _:
            raise SpecError("spec.pipeline.schedule", f"{name} needs several spans a worker")


def one_forward_one_backward(schedule: ScheduleClass) -> bool:
    """Whether a schedule's steps are predicted as 1F1B. Others are predicted as GPipe, which needs the most memory of
    all orders."""
    return issubclass(schedule, Schedule1F1B)
