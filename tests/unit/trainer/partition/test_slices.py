"""The planner of slices against all slicings, its seconds against a simulation, and the fit of costs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipetransformer.partition import slices
from pipetransformer.partition.slice_costs import (
    PROBED_QUARTERS,
    SliceCost,
    SliceCosts,
    SliceProbe,
    choose_slices,
    fit,
    stage_times,
)
from pipetransformer.partition.slices import (
    MicroBatchSlices,
    equal_slices,
    grain_of,
    in_tokens,
    plan_round,
    round_seconds,
    scaled,
)
from tests.testkit.trainer.slice_cases import every_slicing, plan_paper, planner_worst, random_times, simulated_seconds


def test_no_other_slicing_is_better() -> None:
    paper, exact = planner_worst(cases=36)
    assert abs(paper) <= 1e-9
    assert exact <= 0.01


@pytest.mark.parametrize("seed", range(8))
def test_the_seconds_of_a_plan_are_those_of_its_lists(seed: int) -> None:
    generator = np.random.default_rng(seed)
    stages, samples = int(generator.integers(1, 6)), int(generator.integers(1, 4))
    times = random_times(generator, int(generator.integers(1, 13)), stages, int(generator.integers(0, stages + 1)))
    plan = plan_round(times, samples)
    (cut,) = set(plan.micro_batches)
    assert plan.seconds == pytest.approx(simulated_seconds(times[1], cut.lengths, samples), rel=1e-12)


def test_the_seconds_of_unequal_stages_are_those_of_their_lists() -> None:
    generator = np.random.default_rng(0)
    stages = [random_times(generator, 6, 1, 0)[1][0] for _ in range(4)]
    cut = (MicroBatchSlices(1, (1, 3, 2)),) * 2
    assert round_seconds({1: stages}, cut) == pytest.approx(simulated_seconds(stages, (1, 3, 2), 2), rel=1e-12)


def test_seconds_of_equal_stages_are_those_of_the_formula() -> None:
    times = random_times(np.random.default_rng(1), 9, 5, 2)
    lengths, micro_batches = (4, 2, 3), 3
    forward, backward = (
        [table[length, context] for length, context in ((4, 0), (2, 4), (3, 6))]
        for table in (times[1][4].forward, times[1][4].backward)
    )
    expected = micro_batches * (sum(forward) + sum(backward)) + 4 * max(forward) + 2 * max(backward)
    cut = (MicroBatchSlices(1, lengths),) * micro_batches
    assert round_seconds(times, cut) == pytest.approx(expected, rel=1e-12)


def test_slices_get_shorter_where_attention_is_dear() -> None:
    cost = SliceCost(fixed=1.0, token=0.1, pair=0.01, square=0.005)
    times = {1: [stage_times(cost, cost, samples=1, grain=8, total=512)] * 8}
    plan = plan_round(times, 1)
    lengths = plan.micro_batches[0].lengths
    assert list(lengths) == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 1
    uniform = min(round_seconds(times, (MicroBatchSlices(1, equal_slices(64, count)),)) for count in range(1, 65))
    assert plan.seconds < 0.99 * uniform


def test_a_pipeline_of_one_stage_runs_whole_samples_in_few_micro_batches() -> None:
    cost = SliceCost(fixed=1.0, token=0.1)
    times = {size: [stage_times(cost, cost, samples=size, grain=2, total=12)] for size in (1, 2, 3)}
    cut = plan_round(times, 7).micro_batches
    assert len(cut) == 3
    assert {each.lengths for each in cut} == {(6,)}


def test_the_slices_of_equal_micro_batches_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A regroup waits for a plan, and took 12 s with 64 micro-batches."""
    lengths_of, found = slices._lengths, list[tuple[int, ...]]()

    def note(last: NDArray[np.int64]) -> tuple[int, ...]:
        found.append(lengths_of(last))
        return found[-1]

    monkeypatch.setattr(slices, "_lengths", note)
    cost = SliceCost(fixed=1.0, token=0.1)
    times = {1: [stage_times(cost, cost, samples=1, grain=2, total=2)]}
    assert plan_paper(times, 50).micro_batches == (MicroBatchSlices(1, (1,)),) * 50
    assert len(found) == 1


def test_samples_that_no_micro_batches_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of \[2\] samples cannot add up to 3 samples"):
        plan_round(random_times(np.random.default_rng(0), 2, 2, 0, (2,)), 3)


def test_a_fit_finds_the_cost_and_is_near_it_with_noise() -> None:
    cost = SliceCost(fixed=0.002, token=1e-5, context=2e-6, pair=3e-8, square=2e-8)
    probes = [
        SliceProbe(samples, 256 * length, 256 * context, cost.seconds(samples, 256 * length, 256 * context))
        for samples in (1, 3)
        for length, context in PROBED_QUARTERS
    ]
    assert dict(fit(probes)) == pytest.approx(dict(cost), rel=1e-6)
    noisy = [each._replace(seconds=each.seconds * (1.1 if number % 2 else 0.9)) for number, each in enumerate(probes)]
    found = fit(noisy)
    errors = [found.seconds(samples, length, context) / seconds - 1 for samples, length, context, seconds in noisy]
    assert np.sqrt(np.mean(np.square(errors))) < 0.15
    assert min(dict(found).values()) >= 0


def test_the_last_grain_of_a_sample_may_be_smaller() -> None:
    cost = SliceCost(token=1.0)
    table = cost.table(2, 8, 20)
    assert table.shape == (4, 4)
    assert (table[1, 1], table[1, 2], table[3, 0]) == (16.0, 8.0, 40.0)
    assert in_tokens((1, 2), 8, 20) == (8, 12)
    assert sum(in_tokens((1, 1, 1), 8, 20)) == 20


@pytest.mark.parametrize(("total", "grain"), [(4, 4), (100, 8), (512, 8), (1000, 16), (4096, 64)])
def test_a_sample_has_at_most_64_grains_of_at_least_8_tokens(total: int, grain: int) -> None:
    assert grain_of(total, None) == grain


@pytest.mark.parametrize(
    ("total", "multiple", "grain"), [(16, 1, 1), (1024, 8, 8), (1025, 8, 16), (8192, 1, 64), (100, 500, 500)]
)
def test_a_grain_is_a_multiple_that_leaves_a_sample_at_most_128_grains(total: int, multiple: int, grain: int) -> None:
    """With a thousand grains, each worker would plan for half a minute at each freeze and in each regroup."""
    assert grain_of(total, multiple) == grain


def test_equal_slices_differ_by_one_token_at_most() -> None:
    assert equal_slices(10, 4) == (2, 3, 2, 3)
    with pytest.raises(ValueError, match="10 tokens cannot be cut into 11 slices"):
        equal_slices(10, 11)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 100))
def test_shorter_samples_get_as_many_slices_of_about_the_same_shares(lengths: list[int], more: int) -> None:
    total = len(lengths) + more
    short = scaled(lengths, total)
    assert (len(short), sum(short)) == (len(lengths), total)
    assert min(short) >= 1
    assert scaled(lengths, sum(lengths)) == tuple(lengths)
    with pytest.raises(ValueError, match="cannot be cut into"):
        scaled(lengths, len(lengths) - 1)


def test_slices_are_equal_until_costs_are_measured() -> None:
    spans = [range(2), range(2, 4), range(4, 6)]
    lengths = choose_slices(None, spans, 0, samples=2, micro_batches=2, total=100, grain=10)
    assert lengths == (10, 20, 20, 10, 20, 20)
    several = [choose_slices(None, spans, 0, samples=2, micro_batches=each, total=100, grain=10) for each in (5, 20)]
    assert several == [(30, 30, 40), (100,)], "at least four chunks for each stage"
    assert choose_slices(None, spans[:1], 0, samples=2, micro_batches=2, total=100, grain=10) == (100,)
    unit = SliceCost(fixed=1e-4, token=1e-5, pair=1e-6, square=5e-7)
    costs = SliceCosts(forward=[unit] * 6, backward=[unit + unit] * 6)
    measured = choose_slices(costs, spans, 0, samples=2, micro_batches=2, total=100, grain=10)
    assert sum(measured) == 100
    assert list(measured) == sorted(measured, reverse=True)
    assert measured != lengths


def test_frozen_units_take_no_backward() -> None:
    unit = SliceCost(token=1.0)
    costs = SliceCosts(forward=[unit] * 4, backward=[unit] * 4)
    first, second = costs.stages([range(2), range(2, 4)], 3, samples=1, grain=1, total=2)
    assert (first.forward[2, 0], first.backward[2, 0]) == (4.0, 0.0)
    assert (second.forward[2, 0], second.backward[2, 0]) == (4.0, 2.0)


def test_brute_force_tries_all_slicings() -> None:
    assert len(list(every_slicing(6))) == 2**5
