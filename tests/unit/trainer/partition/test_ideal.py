"""The ideal of a job: brute force finds nothing better, and nothing is below the bound."""

from dataclasses import replace

import pytest

from pipetransformer.partition import ModelCosts, StepModel, UnitCost
from pipetransformer.partition.best_cut import best_cut
from pipetransformer.partition.ideal import Ideal, Segment, segments
from pipetransformer_contract.choose import Bounds, Packing
from pipetransformer_contract.layout import Layout
from tests.testkit.trainer.ideal_cases import draw

#: Twelve equal layers freeze by thirds; an epoch has 100 steps.
MOVES = [(100, 4), (200, 7), (300, 9), (400, 10), (500, 11)]
#: Bytes of a layer's parameters. With gradient and two moments it takes four times that.
LAYER = 1000


def equal_layers(workers: int, trained_that_fit: int, *, offloaded: bool = False) -> Ideal:
    """Twelve layers without ends on `workers` GPUs, which have memory for so many layers that train. The cache holds
    all samples. Frozen layers take a quarter of their memory, or none once they are `offloaded`."""
    layers = [UnitCost(1.0, 2.0, 1.0)] * 12
    units = [UnitCost(0, 0, 0), *layers, UnitCost(0, 0, 0)]
    twice = [UnitCost(*(2 * value for value in unit)) for unit in units]
    model = StepModel(
        costs=ModelCosts(micro_batch_sizes=(1, 2), small=units, large=twice, worker_bytes=4 * LAYER * trained_that_fit),
        global_batch=16 * workers,
        num_shards=16 * workers,
        micro_batch_size=None,
        unit_bytes=[0, *[LAYER] * 12, 0],
        trained_bytes=[0, *[4 * LAYER] * 12, 0],
        sample_bytes=1,
        num_samples=1600 * workers,
        cache_bytes=1600 * workers,
        offloads=offloaded,
    )
    return Ideal(model, Bounds(Layout(4, 1), 1, workers, 1, 16 * workers, 0), Packing.MEASURED)


@pytest.mark.parametrize("seed", range(60))
def test_brute_force_over_all_cuts_finds_nothing_better(seed: int) -> None:
    case = draw(seed, most_layers=6)
    situation = case.with_missing()
    ideal = case.ideal()

    found = ideal.layouts(situation.frozen, case.cached, case.off)

    assert {(layout.stages, layout.pipelines): best.seconds for layout, best in found.items()} == pytest.approx(
        situation.by_layout(), rel=1e-9
    )
    assert ideal.exact()
    if found:
        segment = Segment(0, 1, situation.frozen, case.cached, case.off)
        least = found[ideal.best(segment)].seconds
        assert least == pytest.approx(situation.least_seconds(), rel=1e-9)
        assert ideal.work_seconds([segment]) <= least * (1 + 1e-9)


def test_a_sample_is_cached_as_the_layers_were_frozen_an_epoch_before() -> None:
    assert segments([(100, 4), (150, 7), (400, 2)], 600, 100) == [
        Segment(0, 100, 0, 0, 0),
        Segment(100, 50, 4, 0, 0),
        Segment(150, 50, 7, 0, 0),
        Segment(200, 50, 7, 4, 4),
        Segment(250, 150, 7, 7, 7),
        Segment(400, 100, 2, 0, 2),  # what seven layers made of a sample is of no use to two, which stay away
        Segment(500, 100, 2, 2, 2),
    ]
    assert segments([], 10, 4) == [Segment(0, 10, 0, 0, 0)]
    assert segments([(0, 3)], 10, 4) == [Segment(0, 4, 3, 0, 0), Segment(4, 6, 3, 3, 3)]
    assert segments([(50, 3)], 50, 10) == [Segment(0, 50, 0, 0, 0)], "a run that ends before its first freeze"


def test_layers_that_freeze_again_within_an_epoch_are_not_cached_as_before() -> None:
    """A thaw drops what more layers made of a sample. So it counts as read when the layers had frozen again."""
    found = segments([(0, 4), (20, 1), (22, 4)], 40, 8)
    assert [(one.first_step, one.cached, one.off) for one in found] == [
        (0, 0, 0), (8, 4, 4), (20, 0, 1), (22, 0, 1), (28, 1, 1), (30, 4, 4),
    ]  # fmt: skip
    found = segments([(0, 4), (4, 1)], 20, 8)
    assert [(one.first_step, one.off) for one in found] == [(0, 0), (4, 0), (8, 0), (12, 1)], "none had left"


def test_runs_are_ordered_from_the_bound_to_the_static_layout() -> None:
    ideal, run = equal_layers(4, 3), segments(MOVES, 1000, 100)

    unfrozen, kept = ideal.unfrozen(1000), ideal.kept(ideal.static(), run)
    elastic, released = ideal.elastic(run), ideal.released(run)

    assert unfrozen.layouts == kept.layouts == [Layout(4, 1)]
    assert (unfrozen.gpu_seconds, kept.gpu_seconds) == pytest.approx((4 * unfrozen.seconds, 4 * kept.seconds))
    assert ideal.work_seconds(run) < elastic.seconds < kept.seconds < unfrozen.seconds
    assert elastic.layouts[0] == Layout(4, 1) and elastic.layouts[-1].stages < 4
    assert released.gpu_seconds < elastic.gpu_seconds
    assert max(part.step_seconds for part in released.parts) <= 1.05 * unfrozen.parts[0].step_seconds


def test_frozen_layers_that_leave_the_gpu_allow_shorter_pipelines() -> None:
    run = segments(MOVES, 1000, 100)
    speedups = [
        ideal.unfrozen(1000).seconds / ideal.elastic(run).seconds
        for ideal in (equal_layers(4, 3), equal_layers(4, 3, offloaded=True))
    ]
    assert speedups[1] > 1.1 * speedups[0]


def test_frozen_layers_take_memory_until_the_cache_has_what_they_make() -> None:
    """With nine frozen layers three train. A GPU of three has no room for one that comes back for a moment."""
    ideal = equal_layers(4, 3, offloaded=True)
    assert min(layout.stages for layout in ideal.layouts(9, 0, 0)) == 2
    assert min(layout.stages for layout in ideal.layouts(9, 4, 4)) == 2, "five layers stay"
    with_room = equal_layers(4, 4, offloaded=True)
    assert min(layout.stages for layout in with_room.layouts(9, 9, 9)) == 1
    small = replace(with_room.model, cache_bytes=1600)
    tight = Ideal(small, with_room.bounds, Packing.MEASURED)
    fits = {layout for layout in tight.layouts(9, 9, 9) if layout.stages == 1}
    assert fits == {Layout(1, 4)}, "a pipeline's cache holds a quarter of the samples"


def test_without_bubble_and_links_the_work_is_all_that_is_left() -> None:
    """One worker, nothing frozen: a forward and a backward of twelve layers take 36 seconds a sample."""
    alone = equal_layers(1, 12)
    assert alone.work_seconds([Segment(0, 5, 0, 0, 0)]) == pytest.approx(5 * 16 * 36)
    assert alone.unfrozen(5).seconds == pytest.approx(5 * 16 * 36)


def test_by_the_papers_rule_a_stage_needs_no_more_than_at_the_start() -> None:
    measured = equal_layers(4, 12)
    paper = Ideal(measured.model, replace(measured.bounds, bytes_budget=3 * LAYER), Packing.PAPER)
    assert {layout.stages for layout in paper.layouts(0, 0, 0)} == {4}
    assert {layout.stages for layout in paper.layouts(9, 0, 0)} == {2, 3, 4}, "9 frozen layers count as 1.5"
    assert Layout(1, 4) in measured.layouts(0, 0, 0)


def test_nothing_fits_where_a_layer_is_larger_than_a_worker() -> None:
    tiny = equal_layers(4, 3)
    tiny = replace(tiny, model=replace(tiny.model, costs=tiny.model.costs.model_copy(update={"worker_bytes": LAYER})))
    assert best_cut(tiny.model, 0, 4, 1) is None
    with pytest.raises(ValueError, match="no layout of at most 4 workers fits the memory"):
        tiny.static()
