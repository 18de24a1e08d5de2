"""The synchronous schedules that run frozen layers in place, over the same units."""

from collections.abc import Sequence

from benchmarks.virtual import UnitTimes
from pipetransformer.schedules import GPipe, OneForwardOneBackward, RoundShape, Schedule
from pipetransformer.schedules.from_torch import Interleaved, ZeroBubble, ZeroBubbleV

from .ways import Way, even_cut

ONE_F_ONE_B = "1F1B"
ZERO_BUBBLES = ("zero bubble", "zero bubble V")


def in_place(units: Sequence[UnitTimes], workers: int, chunks: int, *, frozen: int = 0) -> list[Way]:
    """Each schedule with its own best cut by declared times, 1F1B first."""
    once = tuple(range(workers))
    schedules: dict[str, tuple[Schedule, tuple[int, ...]]] = {
        ONE_F_ONE_B: (OneForwardOneBackward(), once),
        "GPipe": (GPipe(), once),
        "interleaved": (Interleaved(), Interleaved().owners(workers)),
        ZERO_BUBBLES[0]: (ZeroBubble(), ZeroBubble().owners(workers)),
        ZERO_BUBBLES[1]: (ZeroBubbleV(), ZeroBubbleV().owners(workers)),
    }
    return [
        make_way(name, units, schedule, owners, chunks, frozen=frozen) for name, (schedule, owners) in schedules.items()
    ]


def make_way(
    name: str,
    units: Sequence[UnitTimes],
    schedule: Schedule,
    owners: tuple[int, ...],
    chunks: int,
    *,
    frozen: int = 0,
) -> Way:
    """A schedule over the exact cut of `units` into the spans of `owners`."""
    cut = even_cut(units, len(owners), frozen=frozen)
    first_trained = sum(span.stop <= frozen for span in cut)
    shape = RoundShape(owners, chunks, first_trained)
    return Way(name, tuple(units), cut, schedule, shape, frozen)
