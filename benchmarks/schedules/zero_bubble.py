"""Backwards in halves against 1F1B, and how well a simulation predicts each schedule: 4 workers, 8 micro-batches.

The time of an action beside its declared one is measured in the same run, by a round of one micro-batch: all of its
actions follow each other. With it the simulation predicts the rounds of the other lists, whose actions take 10 ms or
more.
"""

from collections.abc import Sequence

from pipetransformer.schedules import GPipe

from .in_place import ONE_F_ONE_B, ZERO_BUBBLES, in_place, make_way
from .measured import Measured
from .part import Found
from .rig import measure
from .ways import Way, even_units

_WORKERS, _CHUNKS = 4, 8
#: Shortest action of a list whose time is predicted: 10 ms, except for rounding.
_SHORTEST = 0.00999


def run(pairs: int) -> Found:
    """Two units a worker, so that each can own two spans.

    The better zero-bubble schedule is picked by the pairs that also give its bound. That favours it a little.
    """
    units = even_units(2 * _WORKERS)
    ways = in_place(units, _WORKERS, _CHUNKS)
    alone = make_way("one micro-batch", units, GPipe(), tuple(range(_WORKERS)), 1)
    measured = measure([*ways, alone], pairs)
    action_seconds = seconds_per_action(measured, alone)
    best = measured.best(ZERO_BUBBLES)
    return Found(
        {"zero_bubble_over_1f1b": measured.low(ONE_F_ONE_B, best), "seconds_per_action": action_seconds},
        {f"no layer frozen, K={_WORKERS}, M={_CHUNKS}": measured.table(predicted([*ways, alone], action_seconds))},
        errors(measured, ways, action_seconds),
    )


def seconds_per_action(measured: Measured, alone: Way) -> float:
    """Seconds of an action beside its declared ones, message included."""
    actions = sum(len(mine) for mine in alone.schedule.actions(alone.shape))
    return max(0.0, measured.median(alone.name) - alone.declared_seconds) / actions


def predicted(ways: Sequence[Way], action_seconds: float) -> dict[str, float]:
    """Simulated seconds of each way."""
    return {way.name: way.simulated(action_seconds).seconds for way in ways}


def errors(measured: Measured, ways: Sequence[Way], action_seconds: float) -> dict[str, float]:
    """How far each way's median is from its simulation, as a share of the median. Ways with short actions are left
    out, because there Python's own time decides."""
    long = [way for way in ways if way.least_action_seconds >= _SHORTEST]
    simulated = predicted(long, action_seconds)
    return {way.name: abs(simulated[way.name] / measured.median(way.name) - 1) for way in long}
