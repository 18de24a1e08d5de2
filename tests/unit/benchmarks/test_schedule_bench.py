"""The bench of schedules: what ways should take, and that tiny ones run."""

import json
from dataclasses import dataclass, replace

import pytest

from benchmarks.schedules import auto, stock, terapipe
from benchmarks.schedules.__main__ import merged
from benchmarks.schedules.ahead import ahead_way
from benchmarks.schedules.in_place import ONE_F_ONE_B, in_place, make_way
from benchmarks.schedules.measured import Measured, upper_bound
from benchmarks.schedules.part import Found
from benchmarks.schedules.rig import measure
from benchmarks.schedules.ways import Way, even_cut, even_units
from benchmarks.schedules.zero_bubble import errors, seconds_per_action
from benchmarks.virtual import UnitTimes
from pipetransformer.schedules import Action, ActionKind, GPipe, RoundShape, TeraPipe
from tools.docs.benchmarks import FIGURES

#: Too short to notice, and long enough to need a wait.
_TINY = 0.001


@dataclass(frozen=True)
class Halves:
    """GPipe on two workers, with backwards in halves on the second."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        first, second = GPipe().actions(shape)
        halves = {ActionKind.BACKWARD: (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)}
        return [
            first,
            [replace(action, kind=kind) for action in second for kind in halves.get(action.kind, (action.kind,))],
        ]


def test_a_round_without_frozen_units_takes_the_turns_of_1f1b() -> None:
    one_f_one_b, *_ = in_place(even_units(8, 1.0), workers=4, chunks=8)

    # The first unit computes no gradient of its input, so the first worker waits a little for the others.
    assert one_f_one_b.name == ONE_F_ONE_B
    assert one_f_one_b.declared_seconds == pytest.approx((8 + 4 - 1) * 2 * 3.0 - 1)


def test_frozen_units_count_their_forward_alone_and_the_cut_follows() -> None:
    cut = even_cut(even_units(6, 1.0), 2, frozen=3)
    way, *_ = in_place(even_units(6, 1.0), workers=2, chunks=1, frozen=3)

    assert cut == (range(4), range(4, 6)), "3 forwards and 2 seconds of the first that trains, against 6"
    assert way.declared_seconds == pytest.approx(6 + 3 * 2 - 1)


def test_frozen_forwards_ahead_reach_the_published_bound() -> None:
    ahead = ahead_way(even_units(24, 1.0), 4, 8, 12)
    today, *_ = in_place(even_units(24, 1.0), 4, 8, frozen=12)

    assert (today.declared_seconds, ahead.declared_seconds) == (131, 98)


@pytest.mark.parametrize(("case", "uniform", "whole"), terapipe.CASES, ids=lambda each: str(each))
def test_declared_times_allow_what_is_asked_of_slices(case: terapipe.Case, uniform: str, whole: str) -> None:
    asked = {figure.path: figure.at_least for figure in FIGURES["schedules"]}
    planned = terapipe.planned_way(case).declared_seconds

    assert sum(terapipe.planned_way(case).slices) == 256
    for key, others in ((uniform, terapipe.uniform_ways(case)), (whole, [terapipe.whole_way(case)])):
        limit = asked.get(key)
        assert limit is None or min(way.declared_seconds for way in others) / planned > limit


def test_bounds_are_of_the_median_ratio() -> None:
    measured = Measured({"slow": [2.0, 2.2, 2.4, 2.6, 2.8], "quick": [1.0] * 5})

    assert measured.low("slow", "quick") == 2.0
    assert upper_bound(measured.ratios("slow", "quick")) == 2.8
    assert measured.best(["slow", "quick"]) == "quick"


def test_the_result_has_the_worst_error_of_all_parts_and_can_be_written() -> None:
    parts = [
        Found({"a": 1.0}, {"case": {"way": {"median": 1.0}}}, {"GPipe": 0.01}),
        Found({"b": 2.0}, {}, {"1F1B": 0.04}),
    ]
    document = json.loads(json.dumps(merged(parts)))

    assert document["prediction_error"] == 0.04
    assert (document["a"], document["b"]) == (1, 2)
    assert document["ways"] == {"case": {"way": {"median": 1.0}}}


def test_a_result_without_predictions_has_no_error() -> None:
    assert "prediction_error" not in merged([Found({"a": 1.0})])


def test_each_way_runs_in_turns_on_processes_and_takes_what_was_declared() -> None:
    units = (UnitTimes(fixed=_TINY),) * 4
    ways: list[Way] = [
        *in_place(units, workers=2, chunks=3),
        *(replace(way, name=f"{way.name} frozen") for way in in_place(units, workers=2, chunks=3, frozen=2)),
        ahead_way(units, 2, 3, 2),
        Way("halves", units, even_cut(units, 2), Halves(), RoundShape((0, 1), 3)),
        Way("slices", units, even_cut(units, 2), TeraPipe(), RoundShape((0, 1), 6, slices=3), slices=(4, 2, 1)),
    ]

    measured = measure(ways, pairs=2, rounds=1)

    assert list(measured.seconds) == [way.name for way in ways]
    for way in ways:
        assert len(measured.seconds[way.name]) == 2
        assert min(measured.seconds[way.name]) > 0.9 * way.declared_seconds


def test_our_executor_and_torchs_runtime_run_in_turns() -> None:
    measured = stock.compare(stock.Case(workers=2, chunks=2, samples=1, rounds=1), pairs=2)

    assert [len(seconds) for seconds in measured.seconds.values()] == [2, 2]
    assert all(seconds > 0 for each in measured.seconds.values() for seconds in each)


def test_a_prediction_takes_the_time_of_actions_from_a_round_of_one_micro_batch() -> None:
    units = even_units(4, 1.0)
    alone = make_way("alone", units, GPipe(), (0, 1), 1)
    way, *_ = in_place(units, workers=2, chunks=2)
    seconds = alone.declared_seconds + 4 * 0.25

    action_seconds = seconds_per_action(Measured({"alone": [seconds]}), alone)
    found = errors(Measured({way.name: [way.simulated(0.25).seconds * 1.25]}), [way], action_seconds)

    assert action_seconds == pytest.approx(0.25), "two forwards and two backwards"
    assert found == {way.name: pytest.approx(0.2)}


def test_the_choice_loses_what_the_best_measured_way_takes_less() -> None:
    ways = in_place(even_units(4), workers=2, chunks=2)[:2]
    measured = Measured({ways[0].name: [1.1] * 5, ways[1].name: [1.0] * 5})

    assert auto.loss(measured, ways) == pytest.approx(0.1)
    assert auto.loss(measured, ways[::-1]) == 0


@pytest.mark.parametrize("kind", auto.KINDS)
def test_each_way_of_a_candidate_takes_what_the_choice_predicted(kind: str) -> None:
    case = auto.Case(kind, 4)
    choice, *_ = case.candidates(0.001)

    assert choice.predicted is not None
    assert case.way(choice).simulated(0.001).seconds == pytest.approx(choice.predicted.seconds, rel=0.01)


def test_every_aim_of_the_page_has_its_own_key() -> None:
    keys = [figure.path for figure in FIGURES["schedules"]]

    assert len(keys) == len(set(keys)) == 20
