"""Partition, memory rule and offers."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipetransformer.partition import (
    Cut,
    MemoryBound,
    MemoryBoundError,
    ModelCosts,
    Option,
    PredictedLayout,
    StepModel,
    UnitCost,
    assumed_costs,
    cut_units,
    make_offers,
    offered_stages,
    paper_bytes,
    partition,
    spans,
    training_seconds,
)
from pipetransformer.partition.spans import cuts_by_worker
from pipetransformer_contract.choose import Bounds, OnPack, Packing, choose
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer
from pipetransformer_contract.spec import ScheduleName
from tests.testkit.trainer.partition_cases import CASES, Shape, greedy, largest

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


@example([0.5, 0.5, 0.8, 0.3, 0.8, 0.9, 0.9, 0.3, 0.8], 3)
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


def test_equal_items_are_dealt_unevenly_if_the_last_ones_need_more_memory() -> None:
    """Each half has two items, but the last two need 11 bytes."""
    assert partition([1] * 4, 2, MemoryBound([[1, 1, 5, 6]] * 2, limit=10)) == [range(3), range(3, 4)]


def test_equal_items_are_dealt_evenly() -> None:
    assert [len(run) for run in partition([1] * 10, 4)] == [2, 3, 2, 3]


def test_runs_that_do_not_matter_for_the_largest_are_balanced_too() -> None:
    assert partition([1] * 5 + [6], 3) == [range(2), range(2, 5), range(5, 6)]


def test_more_stages_than_items_are_refused() -> None:
    with pytest.raises(ValueError, match="2 items into 3 stages"):
        partition([1, 2], 3)


def test_what_does_not_fit_says_which_stage_needs_how_much() -> None:
    with pytest.raises(MemoryBoundError, match=r"stage 1 .* 30 bytes .* item 3, but a worker has 20"):
        partition([1] * 4, 2, MemoryBound([[10, 10, 10, 20]] * 2, 20))
    with pytest.raises(MemoryBoundError, match=r"stage 0 would need 35 bytes with item 0, but a worker has 20"):
        partition([1] * 4, 2, MemoryBound([[10] * 4] * 2, 20, held=25))
    assert partition([1] * 4, 2, MemoryBound([[10] * 4] * 2, 25, held=5)) == [range(2), range(2, 4)]
    with pytest.raises(MemoryBoundError, match=r"stage 0 would need 20 bytes with item 0, but a worker has 10"):
        partition([1] * 2, 2, MemoryBound([[20, 20], [5, 5]], limit=10))


def test_frozen_units_cost_forward_only_and_the_first_active_one_no_input_gradient() -> None:
    units = [UnitCost(1, 20, 10), UnitCost(2, 40, 30), UnitCost(3, 60, 50), UnitCost(4, 80, 70)]
    assert training_seconds(units, 0) == ([1, 2, 3, 4], [10, 40, 60, 80])
    assert training_seconds(units, 1) == ([1, 2, 3, 4], [0, 0, 50, 80])


@pytest.mark.parametrize(
    ("small", "large", "at_1", "at_8"),
    [(5.0, 8.0, 3.5, 14.0), (2.0, 8.0, 2.0, 16.0), (3.0, 2.0, 3.0, 3.0)],
    ids=["fixed and by sample", "by sample alone", "no growth"],
)
def test_costs_lie_on_the_line_through_two_sizes(small: float, large: float, at_1: float, at_8: float) -> None:
    units = [[UnitCost(value, 0, 0)] for value in (small, large)]
    costs = ModelCosts(micro_batch_sizes=(2, 4), small=units[0], large=units[1])
    assert [costs.at(1)[0].forward, costs.at(8)[0].forward] == [at_1, at_8]
    assert ModelCosts.model_validate_json(costs.model_dump_json()) == costs


@given(st.integers(1, 24), st.data())
def test_spans_cover_all_units_with_a_block_in_every_stage(num_layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, num_layers))
    boundary = data.draw(st.integers(0, num_layers))
    found = spans(num_layers, boundary, stages)
    assert [unit for span in found for unit in span] == list(range(num_layers + 2))
    assert all(any(1 <= unit <= num_layers for unit in span) for span in found)


def test_an_unfrozen_model_is_cut_evenly() -> None:
    assert [len(span) for span in spans(12, 0, 4)] == [4, 3, 3, 4]


def loads_of(spans: Sequence[range], owners: Sequence[int], costs: Sequence[float]) -> list[float]:
    """What each worker has to do, the busiest first."""
    loads = [0.0] * (max(owners) + 1)
    for owner, span in zip(owners, spans, strict=True):
        loads[owner] += sum(costs[unit] for unit in span)
    return sorted(loads, reverse=True)


@given(st.lists(st.integers(0, 30), min_size=8, max_size=16), st.integers(2, 4), st.booleans(), st.data())
def test_no_shift_of_a_border_makes_a_busy_worker_less_busy(
    costs: list[int], workers: int, there_and_back: bool, data: st.DataObject
) -> None:
    workers = min(workers, (len(costs) - 2) // 2)
    once = tuple(range(workers))
    owners = once + (once[::-1] if there_and_back else once)
    prefix = data.draw(st.integers(1, len(costs) - 1 - len(owners)))

    even, *others = cuts_by_worker(costs, owners, prefix)

    assert even == cut_units(costs, len(owners), prefix=prefix)
    for cut in (even, *others):
        assert [unit for span in cut for unit in span] == list(range(len(costs)))
        assert cut[0].stop > prefix and cut[-1].start < len(costs) - 1
        assert all(cut)
    for cut in others:
        loads = loads_of(cut, owners, costs)
        for at, by in itertools.product(range(len(cut) - 1), (-1, 1)):
            border = cut[at].stop + by
            left, right = range(cut[at].start, border), range(border, cut[at + 1].stop)
            if len(left) > (prefix if at == 0 else 0) and len(right) > (at == len(cut) - 2):
                assert loads_of([*cut[:at], left, right, *cut[at + 2 :]], owners, costs) >= loads


def test_workers_of_several_spans_have_equal_loads_where_their_spans_cannot_be_equal() -> None:
    """Twelve layers in eight spans: with spans as equal as possible, a worker has four layers and another has two."""
    costs, owners = [0.0, *[1.0] * 12, 0.0], (0, 1, 2, 3, 3, 2, 1, 0)
    costs[0] = costs[-1] = 0.125

    even, *others = cuts_by_worker(costs, owners)

    assert loads_of(even, owners, costs) == [4, 3, 3, 2.25]
    assert [3.25, 3, 3, 3] in [loads_of(each, owners, costs) for each in others]


@pytest.mark.parametrize(("stages", "fits_from"), [(2, 8), (1, 11)])
def test_packing_fits_where_the_papers_rule_says(stages: int, fits_from: int) -> None:
    budget = paper_bytes(UNIT_BYTES, 0, 4)
    fitting = [boundary for boundary in range(13) if paper_bytes(UNIT_BYTES, boundary, stages) <= budget]
    assert fitting == list(range(fits_from, 13))


def test_frozen_layers_count_a_sixth_on_the_first_stage() -> None:
    assert paper_bytes([0, 60, 60, 60, 60, 0], 2, 1) == 20 + 120
    assert paper_bytes([0, 60, 60, 60, 60, 0], 2, 2) == 80


def test_an_embedding_freezes_with_the_first_layer() -> None:
    assert [paper_bytes([60, 60, 60, 0], boundary, 1) for boundary in (0, 1)] == [180, 10 + 10 + 60]


def test_stages_beyond_the_active_units_stay_empty() -> None:
    assert paper_bytes([6, 60, 60, 30], 2, 4) == 30 + 21


@pytest.mark.parametrize(
    ("initial", "expected"),
    [
        (4, [4, 3, 2, 1]),
        (1, [1]),
        (24, [24, 23, 22, 20, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1]),
        (64, [64, 63, 62, 60, 56, 48, 32, 23, 16, 11, 8, 6, 4, 3, 2, 1]),
        (1024, [1024, 1023, 1022, 1020, 1016, 1008, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1]),
    ],
)
def test_offers_hold_the_halvings_then_what_few_losses_leave_then_what_lies_between(
    initial: int, expected: list[int]
) -> None:
    assert offered_stages(initial) == expected


@given(initial=st.integers(1, 511), lost=st.integers(1, 60))
def test_a_long_pipeline_that_loses_workers_keeps_most_of_the_others(initial: int, lost: int) -> None:
    offered = offered_stages(initial)
    assert offered == sorted(set(offered), reverse=True) and offered[0] == initial
    assert len(offered) == min(initial, 16)
    if lost * 8 <= initial:
        left = initial - lost
        assert max(stages for stages in offered if stages <= left) >= left - lost


def paper_offers(boundary: int) -> list[Offer]:
    return make_offers(
        lambda stages, pipelines: PredictedLayout(paper_bytes(UNIT_BYTES, boundary, stages), None),
        initial_stages=4,
        max_workers=8,
        max_pipelines=8,
        pause_seconds=0.5,
    )


@pytest.mark.parametrize(("boundary", "expected"), [(0, (4, 2)), (7, (4, 2)), (9, (2, 4)), (10, (2, 4)), (11, (1, 8))])
def test_the_papers_schedule_packs_four_stages_to_two_to_one(boundary: int, expected: tuple[int, int]) -> None:
    bounds = Bounds(Layout(4, 2), 1, 8, 1, 8, bytes_budget=paper_bytes(UNIT_BYTES, 0, 4))
    chosen = choose(paper_offers(boundary), 8, bounds, on_pack=OnPack.WIDEN, packing=Packing.PAPER)
    assert chosen == Layout(*expected)


def test_an_offer_predicts_every_width_that_fits_and_what_never_fits_is_not_offered() -> None:
    def predict(stages: int, pipelines: int) -> PredictedLayout:
        if stages * pipelines < 4:
            raise MemoryBoundError(stages, 0, 0, needed=1, limit=0)
        return PredictedLayout(100 // stages + pipelines, 1 / pipelines)

    found = make_offers(predict, initial_stages=4, max_workers=6, max_pipelines=5, pause_seconds=0.5)
    assert [(offer.stages, [time.pipelines for time in offer.step_seconds]) for offer in found] == [
        (4, [1]),
        (3, [2]),
        (2, [2, 3]),
        (1, [4, 5]),
    ]
    assert [offer.bytes_per_worker for offer in found] == [26, 35, 53, 105], "of the width that needs the most"
    assert found[-1].pause_seconds == 0.5


@pytest.mark.parametrize(("case", "percent"), list(zip(CASES, (12.7, 6.5, 9.1), strict=True)))
def test_the_papers_greedy_makes_a_larger_largest_stage(case: tuple[Shape, int, int], percent: float) -> None:
    shape, frozen, stages = case
    sizes = shape.sizes(frozen)
    worse = largest(sizes, greedy(sizes, stages)) / largest(sizes, partition(sizes, stages)) - 1
    assert 100 * worse == pytest.approx(percent, abs=0.1)


#: Twelve blocks of 1 s forward, 2 s backward and 10 bytes kept for a sample, between ends that cost nothing.
EVEN = [UnitCost(0, 0, 0), *[UnitCost(1, 2, 1, 10)] * 12, UnitCost(0, 0, 0)]


def step_model(
    *,
    fixed: float = 0.0,
    link: float = 0.0,
    worker_bytes: int | None = None,
    micro_batch_size: int | None = 8,
    cache_bytes: int = 0,
    schedule: ScheduleName = ScheduleName.ONE_FORWARD_ONE_BACKWARD,
    num_shards: int = 64,
) -> StepModel:
    """A batch of 64; each pass takes `fixed` and what a sample takes times the micro-batch size."""

    def at(size: int) -> list[UnitCost]:
        def seconds(value: float) -> float:
            return fixed * bool(value) + value * size / 8

        return [
            UnitCost(
                seconds(unit.forward), seconds(unit.backward), seconds(unit.weights_backward), unit.saved_bytes * size
            )
            for unit in EVEN
        ]

    costs = ModelCosts(
        micro_batch_sizes=(4, 8), small=at(4), large=at(8), seconds_per_byte=link, worker_bytes=worker_bytes
    )
    return StepModel(
        costs=costs,
        global_batch=64,
        num_shards=num_shards,
        micro_batch_size=micro_batch_size,
        unit_bytes=[100] * 14,
        trained_bytes=[400] * 14,
        sample_bytes=50,
        num_samples=100,
        cache_bytes=cache_bytes,
        options=[Option(schedule)],
    )


def predicted(model: StepModel, boundary: int, stages: int, pipelines: int) -> float:
    return model.step_seconds(boundary, model.cut(boundary, stages, pipelines), pipelines)


def test_predicted_steps_take_m_and_k_less_one_turns_of_the_slowest_stage() -> None:
    model = step_model()
    assert predicted(model, 0, 4, 1) == pytest.approx(9 * (8 + 3))
    assert predicted(model, 0, 1, 4) == pytest.approx(36 * 2)
    assert predicted(model, 12, 1, 1) == pytest.approx(12 * 8)
    assert predicted(model, 6, 2, 1) == pytest.approx(8 + 12 * 8 + 3), "the first stage's forward and backward take 11"


def test_a_step_takes_as_long_as_the_pipeline_that_serves_most_shards() -> None:
    model = step_model(num_shards=4)
    assert predicted(model, 0, 1, 3) == predicted(model, 0, 1, 2) == pytest.approx(36 * 4)
    assert predicted(model, 0, 1, 4) == pytest.approx(36 * 2)


def test_gpipe_waits_for_the_slowest_forward_and_the_slowest_backward() -> None:
    boundary, cut = 6, Cut([range(8), range(8, 14)], 8)
    assert step_model().step_seconds(boundary, cut, 1) == pytest.approx(7 + 15 * 8 + 1)
    gpipe = replace(cut, schedule=ScheduleName.GPIPE)
    assert step_model().step_seconds(boundary, gpipe, 1) == pytest.approx((7 + 5) + 7 * 7 + (1 + 10) + 10 * 7)
    few = replace(cut, micro_batch_size=64)
    assert step_model().step_seconds(boundary, few, 1) == pytest.approx((7 + 5 + 10 + 1) * 8)


def test_the_idle_share_of_equal_stages_is_the_bubble_of_the_schedule() -> None:
    model = step_model()
    assert model.idle_share(0, model.cut(0, 4, 1), 1) == pytest.approx(3 / (8 + 3))
    assert model.idle_share(0, model.cut(0, 1, 4), 4) == pytest.approx(0)
    uneven = Cut([range(3), range(3, 7), range(7, 10), range(10, 14)], 8)
    assert model.idle_share(0, uneven, 1) > 3 / (8 + 3)


def test_communication_counts_where_computing_does_not_hide_it() -> None:
    assert predicted(step_model(link=1e-3), 0, 4, 1) == pytest.approx(9 * 11 + 16 * 0.4), "16 on the longest way"
    alone = step_model(
        link=0.1, micro_batch_size=64
    )  # a micro-batch's way there and back: two messages of 0.1 * 50 * 64
    assert predicted(alone, 0, 2, 1) == pytest.approx(2 * (6 + 12) * 8 + 2 * 320)
    reduction = 0.1 * 1.5 * 1400
    assert predicted(step_model(link=0.1), 0, 1, 4) == pytest.approx(36 * 2 + reduction - 24)
    assert predicted(step_model(link=0.1), 11, 1, 4) == pytest.approx(13 * 2 + 0.1 * 1.5 * 200 - 1)


def test_a_frozen_prefix_goes_to_the_first_stage_where_its_cache_pays() -> None:
    """Six of twelve blocks are frozen: 6 s of forwards, and 2 s of the first active block, 3 s of each other."""
    uncached, half, whole = step_model(), step_model(cache_bytes=2500), step_model(cache_bytes=5000)
    assert [model.cut(6, 2, 1).spans[0].stop for model in (uncached, half, whole)] == [9, 10, 10]
    assert [predicted(model, 6, 2, 1) for model in (uncached, half, whole)] == pytest.approx(
        [8 + 96 + 3, 95, 3 + 72 + 5]
    )
    assert predicted(half, 6, 2, 2) == pytest.approx(3 + 9 * 4 + 5), (
        "each of two first workers caches half of the samples"
    )
    assert predicted(half, 12, 1, 1) == pytest.approx(12 / 2 * 8)
    assert whole.cut(6, 4, 1).spans[0].start == 0 and whole.cut(6, 4, 1).spans[0].stop > 7
    assert whole.cut(10, 4, 1) == uncached.cut(10, 4, 1), "two active blocks do not fill four stages"


def test_the_number_of_micro_batches_weighs_the_bubble_against_what_each_costs_anyway() -> None:
    counts = []
    for fixed in (0.0, 0.5, 5.0):
        model = step_model(fixed=fixed, micro_batch_size=None)
        cut = model.cut(0, 4, 1)
        counts.append(64 // cut.micro_batch_size)
        others = [Cut(cut.spans, size) for size in range(3, 17)]
        assert model.step_seconds(0, cut, 1) <= min(model.step_seconds(0, other, 1) for other in others) * 1.01
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (21, 4)


def test_a_cut_keeps_what_a_worker_can_hold() -> None:
    free, tight = step_model(), step_model(worker_bytes=1700)
    cut = tight.cut(0, 6, 1)
    assert free.bytes_per_worker(0, free.cut(0, 6, 1), 1) > 1700 >= tight.bytes_per_worker(0, cut, 1)
    assert len(cut.spans[0]) < len(cut.spans[-1])
    with pytest.raises(MemoryBoundError, match="a worker has 1700"):
        tight.cut(0, 2, 1)
    smaller = step_model(worker_bytes=3200, micro_batch_size=None).cut(0, 4, 1)
    assert smaller.micro_batch_size < 16


@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 8))
def test_assumed_costs_cut_as_the_papers_packing_does(stages: int, boundary: int, pipelines: int) -> None:
    model = replace(step_model(), costs=assumed_costs(12))
    assert model.cut(boundary, stages, pipelines) == Cut(spans(12, boundary, stages), 8)


def test_an_embedding_counts_by_its_time() -> None:
    assert [len(span) for span in cut_units([1.0, *[1.0] * 4, 1.0], 2)] == [3, 3]
    assert [len(span) for span in cut_units([3.0, *[1.0] * 4, 0.0], 2)] == [2, 4]
