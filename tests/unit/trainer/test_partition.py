"""Partition, memory rule and offers."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.partition import (
    MemoryBound,
    MemoryBoundError,
    StepModel,
    UnitTimes,
    layer_costs,
    make_offers,
    offered_stages,
    paper_bytes,
    partition,
    spans,
)
from pipetransformer_contract.choose import Bounds, Layout, OnPack, Packing, choose
from pipetransformer_contract.messages import Offer

BLOCK = 120_000
UNIT_BYTES = [5_000, *[BLOCK] * 12, 3_000]


def dearest(costs: Sequence[float], runs: list[range]) -> float:
    return max(sum(costs[i] for i in run) for run in runs)


def every_partition(num_items: int, stages: int) -> Iterator[list[range]]:
    for cuts in combinations(range(1, num_items), stages - 1):
        yield [range(start, end) for start, end in pairwise([0, *cuts, num_items])]


def fits(memory: MemoryBound, runs: list[range]) -> bool:
    return all(sum(memory.needs[stage][i] for i in run) <= memory.limit for stage, run in enumerate(runs))


ITEM_COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=9)


@given(ITEM_COSTS, st.integers(1, 9))
def test_no_other_contiguous_partition_is_better(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    runs = partition(costs, stages)
    assert [i for run in runs for i in run] == list(range(len(costs)))
    assert len(runs) == stages
    assert all(runs)
    assert dearest(costs, runs) == min(dearest(costs, other) for other in every_partition(len(costs), stages))


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=9), st.integers(1, 9))
def test_the_best_partition_of_rounded_numbers_is_found_too(costs: list[float], stages: int) -> None:
    stages = min(stages, len(costs))
    best = min(dearest(costs, other) for other in every_partition(len(costs), stages))
    assert dearest(costs, partition(costs, stages)) == pytest.approx(best, rel=1e-12)


@given(ITEM_COSTS, st.integers(1, 9), st.data())
def test_no_other_partition_within_the_memory_is_better(costs: list[int], stages: int, data: st.DataObject) -> None:
    stages = min(stages, len(costs))
    sizes = st.lists(st.integers(0, 20), min_size=len(costs), max_size=len(costs))
    held, in_flight = data.draw(sizes), data.draw(sizes)
    needs = [[h + a * (stages - stage) for h, a in zip(held, in_flight, strict=True)] for stage in range(stages)]
    memory = MemoryBound(needs, data.draw(st.integers(0, 150)))
    possible = [other for other in every_partition(len(costs), stages) if fits(memory, other)]
    if not possible:
        with pytest.raises(MemoryBoundError):
            partition(costs, stages, memory)
        return
    runs = partition(costs, stages, memory)
    assert all(runs) and fits(memory, runs)
    assert dearest(costs, runs) == min(dearest(costs, other) for other in possible)


def test_equal_items_are_dealt_evenly() -> None:
    assert [len(run) for run in partition([1] * 10, 4)] == [2, 3, 2, 3]


def test_more_stages_than_items_are_refused() -> None:
    with pytest.raises(ValueError, match="2 items into 3 stages"):
        partition([1, 2], 3)


def test_what_does_not_fit_says_which_stage_needs_how_much() -> None:
    with pytest.raises(MemoryBoundError, match=r"stage 1 .* item 3 .* 30 bytes, a worker has 20"):
        partition([1] * 4, 2, MemoryBound([[10, 10, 10, 20]] * 2, 20))


def test_frozen_units_cost_forward_only_and_the_first_active_one_no_input_gradient() -> None:
    assert layer_costs(4, 2)[1:5] == [1, 1, 2, 3]
    assert layer_costs(4, 0)[1:5] == [3, 3, 3, 3]
    assert layer_costs(2, 2, [UnitTimes(1, 2), UnitTimes(3, 4), UnitTimes(5, 6), UnitTimes(7, 8)]) == [1, 3, 5, 11]


@given(st.integers(1, 24), st.data())
def test_spans_cover_all_units_with_a_block_in_every_stage(num_layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, num_layers))
    boundary = data.draw(st.integers(0, num_layers))
    found = spans(num_layers, boundary, stages)
    assert [unit for span in found for unit in span] == list(range(num_layers + 2))
    assert all(any(1 <= unit <= num_layers for unit in span) for span in found)


def test_an_unfrozen_model_is_cut_evenly() -> None:
    assert [len(span) for span in spans(12, 0, 4)] == [4, 3, 3, 4]


@pytest.mark.parametrize(("stages", "fits_from"), [(2, 8), (1, 11)])
def test_packing_fits_where_the_papers_rule_says(stages: int, fits_from: int) -> None:
    budget = paper_bytes(UNIT_BYTES, 0, 4)
    fitting = [boundary for boundary in range(13) if paper_bytes(UNIT_BYTES, boundary, stages) <= budget]
    assert fitting == list(range(fits_from, 13))


def test_frozen_layers_count_a_sixth_on_the_first_stage() -> None:
    assert paper_bytes([0, 60, 60, 60, 60, 0], 2, 1) == 20 + 120
    assert paper_bytes([0, 60, 60, 60, 60, 0], 2, 2) == 80


def test_stages_beyond_the_active_units_stay_empty() -> None:
    assert paper_bytes([6, 60, 60, 30], 2, 4) == 30 + 21


@pytest.mark.parametrize(
    ("initial", "expected"),
    [
        (4, [4, 3, 2, 1]),
        (1, [1]),
        (64, [64, 32, 16, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
        (96, [96, 48, 24, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_offers_hold_the_halvings_and_then_the_shortest_pipelines(initial: int, expected: list[int]) -> None:
    offered = offered_stages(initial)
    assert len(offered) == min(initial, 16)
    assert set(expected) <= set(offered)


def offers(boundary: int, step_model: StepModel | None = None) -> list[Offer]:
    return make_offers(
        UNIT_BYTES,
        boundary,
        initial_stages=4,
        max_workers=8,
        max_pipelines=8,
        step_model=step_model,
        pause_seconds=0.5,
    )


@pytest.mark.parametrize(("boundary", "expected"), [(0, (4, 2)), (7, (4, 2)), (9, (2, 4)), (10, (2, 4)), (11, (1, 8))])
def test_the_papers_schedule_packs_four_stages_to_two_to_one(boundary: int, expected: tuple[int, int]) -> None:
    bounds = Bounds(Layout(4, 2), 1, 8, 1, 8, bytes_budget=paper_bytes(UNIT_BYTES, 0, 4))
    chosen = choose(offers(boundary), 8, bounds, on_pack=OnPack.WIDEN, packing=Packing.PAPER)
    assert chosen == Layout(*expected)


def test_predicted_steps_follow_the_pipeline_formula() -> None:
    model = StepModel([UnitTimes(0, 0), *[UnitTimes(1, 2)] * 12, UnitTimes(0, 0)], 64, 8, seconds_outside_pipeline=5)
    assert model.step_seconds(0, 4, 1) == 9 * (8 + 3) + 5
    assert model.step_seconds(0, 1, 4) == 36 * 2 + 5
    assert model.step_seconds(12, 1, 1) == 12 * 8 + 5
    offer = offers(0, model)[0]
    assert (offer.stages, [time.pipelines for time in offer.step_seconds], offer.pause_seconds) == (4, [1, 2], 0.5)
