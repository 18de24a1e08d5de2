"""Frozen forwards ahead of time, against frozen layers in place: 24 layers, 12 of them frozen, on 4 workers."""

from collections.abc import Sequence

from benchmarks.virtual import UnitTimes
from pipetransformer.schedules import GPipe, OneForwardOneBackward, RoundShape
from pipetransformer.schedules.ahead import Ahead, RoundSeconds

from .in_place import ONE_F_ONE_B, in_place, make_way
from .measured import upper_bound
from .part import Found
from .rig import measure
from .ways import Way, even_cut, even_units
from .zero_bubble import errors, predicted, seconds_per_action

_WORKERS, _UNITS, _FROZEN = 4, 24, 12
_AHEAD = f"{ONE_F_ONE_B}, frozen ahead"


def run(pairs: int) -> Found:
    """With 4 micro-batches against today's schedule alone, with 8 also against the best of all in place."""
    figures: dict[str, float] = {}
    ways = {}
    wrong: dict[str, float] = {}
    for chunks in (4, 8):
        ahead = ahead_way(even_units(_UNITS), _WORKERS, chunks, _FROZEN)
        others = in_place(even_units(_UNITS), _WORKERS, chunks, frozen=_FROZEN)
        compared = others if chunks == 8 else others[:1]
        alone = make_way("one micro-batch", even_units(_WORKERS), GPipe(), tuple(range(_WORKERS)), 1)
        measured = measure([ahead, *compared, alone], pairs)
        figures[f"ahead_over_today_m{chunks}"] = measured.low(ONE_F_ONE_B, _AHEAD)
        action_seconds = seconds_per_action(measured, alone)
        if chunks == 8:
            best = measured.best([way.name for way in others])
            figures["ahead_over_best"] = measured.low(best, _AHEAD)
            bound = ahead.declared_seconds
            figures["ahead_over_bound"] = upper_bound([seconds / bound for seconds in measured.seconds[_AHEAD]])
        name = f"{_UNITS} layers, {_FROZEN} frozen, K={_WORKERS}, M={chunks}"
        ways[name] = measured.table(predicted([ahead, *compared, alone], action_seconds))
        found = errors(measured, [ahead, *compared], action_seconds)
        wrong |= {f"{way}, {name}": error for way, error in found.items()}
    return Found(figures, ways, wrong)


def ahead_way(units: Sequence[UnitTimes], workers: int, chunks: int, frozen: int) -> Way:
    """1F1B over the units that train, with the others' forwards of the next round wherever a worker waits."""
    prefix, active = tuple(units[:frozen]), tuple(units[frozen:])
    cut = even_cut(active, workers)
    seconds = RoundSeconds(
        forward=tuple(sum(active[index].forward(1) for index in span) for span in cut),
        backward=tuple(_backward(active, span) for span in cut),
        prefix=tuple(unit.forward(1) for unit in prefix),
    )
    owners = tuple(range(workers))
    shape = RoundShape(owners, chunks, prefix_units=frozen, prefix_made=True, next_chunks=chunks)
    schedule = Ahead(OneForwardOneBackward(), seconds, holders=owners)
    return Way(_AHEAD, active, cut, schedule, shape, prefix=prefix)


def _backward(units: Sequence[UnitTimes], span: range) -> float:
    """Declared seconds of a span's backward. The first unit that trains computes no gradient of its input."""
    return sum(
        units[index].forward(1) * (units[index].weight_gradient + (index > 0) * units[index].input_gradient)
        for index in span
    )
