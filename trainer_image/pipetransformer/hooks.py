"""Named moments in the life of a worker, between which it may die: the seam of tests that make it die there."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class HookPoint(StrEnum):
    """A point of a round comes with its step (from 0), one of a regroup with the layout generation it leads to."""

    COMPUTED = "Computed"  #: gradients are computed, not yet reduced
    REDUCED = "Reduced"  #: gradients are reduced; nobody has voted
    VOTED = "Voted"  #: all have voted; this worker has not committed
    STEPPED = "Stepped"  #: the optimizer has stepped; the ledger does not say so yet
    COMMITTED = "Committed"  #: the step is committed; what follows it (freeze, evaluation, checkpoint) is not done
    ENDED = "Ended"  #: the round and all that follows it is done
    FOUND = "Found"  #: this worker knows the next generation; it has not come to its rendezvous
    MET = "Met"  #: everybody of the generation has come; its groups are not made
    MOVING = "Moving"  #: sends and receives of state are under way, or it is about to be built or read
    ASSEMBLED = "Assembled"  #: this worker has all that it needs; it has not voted for the generation
    AGREED = "Agreed"  #: all have voted for the generation; nothing old is dropped


#: Called with the point and its number.
Reached = Callable[[HookPoint, int], None]


def ignore(point: HookPoint, number: int) -> None:
    """What a worker does at its moments outside of tests."""


@dataclass
class Hooks:
    """Seams for the process and for tests.

    Attributes:
        reached: called at each point of the worker's life.
        on_broken: called when the generation broke: `Trainer.lost_peers` says whom this worker no longer reaches.
        stop_requested: whether this worker shall leave at the end of the round.
        ends_soon: whether a worker that shall leave does so when its group breaks, because no generation will name it.
        out_of_time: whether the checkpoint that a worker leaves is given up when the storage does not take it.
    """

    reached: Reached = ignore
    on_broken: Callable[[], None] = lambda: None
    stop_requested: Callable[[], bool] = lambda: False
    ends_soon: Callable[[], bool] = lambda: True
    out_of_time: Callable[[], bool] = lambda: True
