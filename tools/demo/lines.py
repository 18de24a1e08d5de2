"""The lines of `make demo`: each decision of the freezing run, and the unfrozen run at the same step beside it."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pipetransformer_client.timeline import Record, read_record
from pipetransformer_client.timeline.record import Regroup

ACCURACY = "accuracy"


@dataclass(frozen=True)
class Decision:
    """Layers froze, or the layout changed, before a step.

    Attributes:
        step: the first step with it.
        time: seconds since the run began.
        words: what was decided.
    """

    step: int
    time: float
    words: str


def decisions(record: Record) -> list[Decision]:
    """All freezes and changes of the layout, in their order."""
    frozen = [Decision(one.step, one.time, f"{one.frozen} of {record.num_layers} frozen") for one in record.freezes]
    moved = [
        Decision(one.first_step, one.time, f"{_move(before, one)}, pause {one.pause_seconds:.2f} s")
        for before, one in zip(record.regroups, record.regroups[1:], strict=False)
    ]
    return sorted([*frozen, *moved], key=lambda decision: (decision.step, decision.time))


def _move(before: Regroup, after: Regroup) -> str:
    old, new = (f"{one.stages}x{one.pipelines}" for one in (before, after))
    return f"{old} -> {new}" if old != new else "stages rebalanced"


def at_step(record: Record, step: int) -> str:
    """Layout, time and newest held-out accuracy when `step` steps were committed."""
    time = record.steps[step - 1].time if 0 < step <= len(record.steps) else record.seconds
    return f"{layout(record, time):<4} {time:5.1f} s  {held_out(record, time)}"


def layout(record: Record, time: float) -> str:
    """Stages x pipelines at a time."""
    at = bisect_right([one.time for one in record.regroups], time)
    one = record.regroups[max(at - 1, 0)]
    return f"{one.stages}x{one.pipelines}"


def held_out(record: Record, time: float) -> str:
    """The newest held-out accuracy at a time; a dash before the first."""
    found = [one.metrics[ACCURACY] for one in record.evaluations if one.time <= time and ACCURACY in one.metrics]
    return f"{found[-1]:.1%}" if found else "-"


class Lines:
    """Prints the lines of a run as its record grows.

    Args:
        folder: of the run.
        out: where the lines go.
        lines_of: all lines of a record, in their order.
    """

    def __init__(self, folder: Path, out: Console, lines_of: Callable[[Record], Sequence[str]]) -> None:
        self._folder, self._out, self._lines_of = folder, out, lines_of
        self._shown = 0

    def changed(self) -> None:
        """Print what is new in the record."""
        record = _read(self._folder)
        lines = [] if record is None else self._lines_of(record)
        for line in lines[self._shown :]:
            self._out.print(line, highlight=False)
        self._shown = max(self._shown, len(lines))


def alone(record: Record) -> list[str]:
    """A line for each evaluation of the unfrozen run."""
    return [
        f"{'':8}{layout(record, one.time):<4} {one.time:5.1f} s  {held_out(record, one.time)}"
        for one in record.evaluations
    ]


def side_by_side(record: Record, unfrozen: Record) -> list[str]:
    """A line for each decision of the freezing run, with the other run at the same step."""
    return [
        f"{one.step:>6}  {at_step(unfrozen, one.step):<20} | {layout(record, one.time):<4} {one.time:5.1f} s"
        f"  {held_out(record, one.time):<6}  {one.words}"
        for one in decisions(record)
    ]


def _read(folder: Path) -> Record | None:
    """The record so far; None before the first layout."""
    try:
        return read_record(folder)
    except ValueError:
        return None
