"""Lists of the schedule classes of `torch.distributed.pipelining`."""

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from .actions import Schedule, ScheduleError
from .flushed import GPipe, OneForwardOneBackward


def from_torch(schedule: type) -> Schedule:
    """The schedule that computes in the order of one of torch's classes.

    Raises:
        ScheduleError: the class has no order that can be read.
    """
    if schedule is Schedule1F1B:
        return OneForwardOneBackward()
    if schedule is ScheduleGPipe:
        return GPipe()
    raise ScheduleError(f"{schedule.__name__} has no pipeline_order, which says in which order its workers compute")
