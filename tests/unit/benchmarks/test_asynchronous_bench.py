"""The bench of asynchronous schedules: what its ways should take, and how distances are compared."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.asynchronous import accuracy, throughput
from benchmarks.asynchronous.accuracy import NEWEST, PREDICTED, SYNCHRONOUS, Compared, Runs, Trained
from benchmarks.schedules.in_place import ONE_F_ONE_B
from tests.testkit.trainer.ranks import run_ranks
from tools.docs.benchmarks import FIGURES


def compared(predicted: list[float], newest: list[float]) -> Compared:
    """Runs whose losses are so far above a synchronous loss of 1."""
    losses = {SYNCHRONOUS: [0.0] * len(newest), NEWEST: newest, PREDICTED: predicted}
    return Compared({way: [Trained(1 + above, 0.5) for above in distances] for way, distances in losses.items()})


def test_sixteen_steps_without_a_flush_take_their_turns_and_one_fill() -> None:
    declared = {way.name: way.declared_seconds for way in throughput.ways()}
    flushed = declared[ONE_F_ONE_B]
    asynchronous = declared[throughput.PREDICTED] / 16

    assert flushed / asynchronous == pytest.approx((8 + 3) / (8 + 3 / 16), rel=0.02)


def test_each_way_is_timed_on_each_worker() -> None:
    ways = throughput.ways(workers=2, chunks=2, steps=2, unit_seconds=1e-4)

    by_rank = run_ranks(2, throughput.blocks, ways, 1)

    assert [len(seconds) for rank in by_rank for seconds in rank] == [len(ways)] * 2
    assert all(second > 0 for rank in by_rank for seconds in rank for second in seconds)


def test_a_run_that_was_kept_is_not_trained_again(tmp_path: Path) -> None:
    keep, setting = tmp_path / "runs", accuracy.Setting("sgd", 0.03, 1, epochs=1)
    with ThreadPoolExecutor(1) as pool:
        found = Runs(pool, keep).compare(setting, [SYNCHRONOUS], [0])
        pool.shutdown()

        assert Runs(pool, keep).compare(setting, [SYNCHRONOUS], [0]) == found


def test_a_ratio_of_distances_is_that_of_their_means_and_its_bound_is_above_it() -> None:
    found = compared([0.09, 0.11, 0.10], [0.2, 0.2, 0.2])

    assert found.ratio(PREDICTED) == pytest.approx(0.5)
    error = 0.01 / math.sqrt(3) / 0.2
    assert found.upper_bound(PREDICTED) == pytest.approx(0.5 + 2.920 * error, abs=2e-3)
    assert found.accuracy_loss(PREDICTED) == 0


def test_a_distance_that_says_nothing_has_no_bound() -> None:
    assert compared([1.0, -1.0], [0.1, -0.1]).upper_bound(PREDICTED) == math.inf


def test_rounds_end_with_an_epoch() -> None:
    assert list(accuracy._rounds(20, 10, 4)) == [(0, 4), (4, 4), (8, 2), (10, 4), (14, 4), (18, 2)]


def test_every_bar_has_a_figure() -> None:
    with_bars = [figure for figure in FIGURES["async"] if figure.at_least is not None or figure.at_most is not None]
    barred = {figure.path.split(".")[0] for figure in with_bars}
    assert {"throughput_over_flushed", "distance_adamw_1", "accuracy_loss_k", "upper_bounds"} <= barred
