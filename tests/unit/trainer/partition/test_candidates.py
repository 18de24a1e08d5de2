"""The chosen way to run a layout is the fastest that fits, by a simulator that shares nothing with ours."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipetransformer.partition import (
    AUTO,
    Candidate,
    MemoryBoundError,
    ModelCosts,
    Option,
    PredictedLayout,
    StepModel,
    UnitCost,
    make_offers,
)
from pipetransformer.partition.best_cut import best_cut
from pipetransformer.partition.predict import SpanWork
from pipetransformer.schedules import (
    Action,
    GPipe,
    OneForwardOneBackward,
    RoundCosts,
    RoundShape,
    Schedule,
    ScheduleError,
    make_schedule,
    simulate,
)
from pipetransformer_contract.choose import Packing, Present, pays_to_recut
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer, StepTime
from pipetransformer_contract.spec import FrozenForward, ScheduleName
from tests.testkit.trainer.longest_paths import longest_paths
from tests.testkit.yardstick import yardsticks

GPIPE = Option(ScheduleName.GPIPE)
ONE_F_ONE_B = Option(ScheduleName.ONE_FORWARD_ONE_BACKWARD)
INTERLEAVED = Option(ScheduleName.INTERLEAVED, 2)


def make_model(
    units: Sequence[UnitCost],
    *,
    options: Sequence[Option] = AUTO,
    fixed: float = 0.05,
    link: float = 0.0,
    action: float = 0.0,
    worker_bytes: int | None = None,
    global_batch: int = 24,
    micro_batch_size: int | None = None,
    cache_bytes: int = 0,
) -> StepModel:
    """Each pass takes `fixed` seconds, and its own for each sample."""

    def at(size: int) -> list[UnitCost]:
        return [
            UnitCost(
                fixed * bool(unit.forward) + unit.forward * size,
                fixed * bool(unit.backward) + unit.backward * size,
                fixed * bool(unit.weights_backward) + unit.weights_backward * size,
                unit.saved_bytes * size,
            )
            for unit in units
        ]

    return StepModel(
        costs=ModelCosts(
            micro_batch_sizes=(1, 2),
            small=at(1),
            large=at(2),
            seconds_per_byte=link,
            seconds_per_action=action,
            worker_bytes=worker_bytes,
        ),
        global_batch=global_batch,
        num_shards=24,
        micro_batch_size=micro_batch_size,
        unit_bytes=[10] * len(units),
        trained_bytes=[40] * len(units),
        sample_bytes=1,
        num_samples=100,
        cache_bytes=cache_bytes,
        options=options,
    )


def even(layers: int, saved: float = 1.0) -> list[UnitCost]:
    return [UnitCost(0, 0, 0), *[UnitCost(1, 2, 1, saved)] * layers, UnitCost(0, 0, 0)]


def independent_seconds(model: StepModel, boundary: int, candidate: Candidate) -> float:
    """Seconds of a candidate's round: units added up by hand, and the longest path through its lists."""
    cut = candidate.cut
    assert cut is not None
    units, active = model.costs.at(cut.micro_batch_size), boundary + 1 if boundary else 0
    miss = max(0.0, 1 - model.cache_bytes / model.num_samples)
    forward, backward, weights = [], [], []
    for number, span in enumerate(cut.spans):
        forward.append(sum(units[u].forward * (miss if u < active and number == 0 else 1) for u in span))
        backward.append(
            sum(units[u].weights_backward if u == active else units[u].backward for u in span if u >= active)
        )
        weights.append(sum(units[u].weights_backward for u in span if u >= active))
    shape = RoundShape(
        cut.owners, candidate.micro_batches, sum(all(unit < active for unit in span) for span in cut.spans)
    )
    costs = RoundCosts.by_span(
        forward,
        backward,
        weights,
        message_seconds=model.costs.seconds_per_byte * cut.micro_batch_size,
        action_seconds=model.costs.seconds_per_action,
    )
    return max(
        longest_paths(
            make_schedule(cut.schedule, spans_per_worker=candidate.option.spans_per_worker).actions(shape), shape, costs
        ).values()
    )


UNIT = st.tuples(st.floats(0.2, 3), st.floats(0.2, 4), st.floats(0.1, 1), st.floats(0, 5)).map(
    lambda one: UnitCost(one[0], one[1], one[1] * one[2], one[3])
)


#: A search that stopped early may miss this. Of 4,660 random cases 217 stopped, and the worst lost 2.8 %.
AUTO_MAY_LOSE = 1.05
#: Here it loses 3.5 %: (forward, backward) of each unit.
MISSED = [(1, 1), (1, 1), (1, 4), (1, 3), (1, 1), (1, 1), (1, 2), (2, 1), (1, 1), (1, 2)]


@example([UnitCost(forward, back, back, 0) for forward, back in MISSED], 4, 1, 0.0, 0.0, 60)
@settings(deadline=None, max_examples=10)
@given(
    units=st.lists(UNIT, min_size=8, max_size=10),
    stages=st.integers(2, 4),
    boundary=st.integers(0, 4),
    link=st.sampled_from([0.0, 0.2]),
    action=st.sampled_from([0.0, 0.3]),
    cache_bytes=st.sampled_from([0, 60]),
)
def test_the_choice_is_the_fastest_of_all_candidates(
    units: list[UnitCost], stages: int, boundary: int, link: float, action: float, cache_bytes: int
) -> None:
    model = make_model(units, link=link, action=action, cache_bytes=cache_bytes, global_batch=12)
    found = model.candidates(boundary, stages, 1)
    possible = [one for one in found if one.cut is not None]
    seconds = [independent_seconds(model, boundary, one) for one in possible]
    simulated = [taken for one, taken in zip(possible, seconds, strict=True) if one.predicted is not None]
    assert seconds[0] <= min(simulated) * (1 + 1e-9)
    stopped = any("others had lower bounds" in one.why_not for one in found)  # after 12 simulations
    assert seconds[0] <= min(seconds) * (AUTO_MAY_LOSE if stopped else 1 + 1e-9)
    assert sum(one.predicted is not None for one in found) <= 12
    for one, taken in zip(possible, seconds, strict=True):
        assert one.least_seconds <= taken * (1 + 1e-9)
        assert bool(one.why_not) == (one is not found[0])
        if one.predicted is not None:
            assert one.predicted.seconds == pytest.approx(taken)
    assert {(one.option, one.micro_batches) for one in found} == {
        (option, -(-12 // size)) for option in model.options for size in {-(-12 // (stages * n)) for n in range(1, 7)}
    }
    assert model.step_seconds(boundary, model.cut(boundary, stages, 1), 1) == pytest.approx(seconds[0])


def test_equal_times_go_to_less_memory_and_then_to_the_simpler_schedule() -> None:
    choice, other = make_model(even(8), options=(GPIPE, ONE_F_ONE_B), fixed=0, micro_batch_size=2).candidates(0, 4, 1)
    assert (choice.option, other.option) == (ONE_F_ONE_B, GPIPE)
    assert choice.predicted is not None and other.predicted is not None
    assert choice.predicted.seconds == pytest.approx(other.predicted.seconds)
    assert other.why_not == "as fast, but needs more memory"
    for options in [(ONE_F_ONE_B, GPIPE), (GPIPE, ONE_F_ONE_B)]:
        free = make_model(even(8, saved=0), options=options, fixed=0, micro_batch_size=2)
        choice, other = free.candidates(0, 4, 1)
        assert (choice.option, other.why_not) == (options[0], "as fast, but not simpler")


def test_a_rounding_error_of_a_time_does_not_choose_more_memory() -> None:
    """Both take 93.6 seconds, but floats sum to less for GPipe."""
    units = [UnitCost(0, 0, 0), *[UnitCost(0.3, 0.6, 0.3, 1)] * 8, UnitCost(0, 0, 0)]
    choice, other = make_model(units, options=(GPIPE, ONE_F_ONE_B), fixed=0, micro_batch_size=2).candidates(0, 2, 1)
    assert (choice.option, other.why_not) == (ONE_F_ONE_B, "as fast, but needs more memory")


def test_a_slower_candidate_says_by_how_much() -> None:
    """The first of two workers has forwards of 8 and backwards of 3 for each of 24 chunks, the second has 4 and 8."""
    model = make_model(even(12), options=(GPIPE, ONE_F_ONE_B), fixed=0, micro_batch_size=1)

    choice, other = model.candidates(6, 2, 1)

    gpipe, one_f_one_b = (24 * 8 + 4) + (24 * 8 + 3), 8 + 24 * (4 + 8) + 3
    assert (choice.option, other.option) == (ONE_F_ONE_B, GPIPE)
    assert other.why_not == f"{gpipe / one_f_one_b - 1:.1%} slower"


def test_a_candidate_above_the_memory_is_not_chosen_and_says_what_it_needs() -> None:
    units, options = even(8, saved=20), (ONE_F_ONE_B, INTERLEAVED)
    free, tight = (make_model(units, options=options, micro_batch_size=3, worker_bytes=most) for most in (None, 700))
    assert free.cut(0, 4, 1).schedule is ScheduleName.INTERLEAVED
    found = tight.candidates(0, 4, 1)
    assert found[0].option == ONE_F_ONE_B
    assert found[0].cut is not None and tight.bytes_per_worker(0, found[0].cut, 1) <= 700
    refused = [one.why_not for one in found if one.option == INTERLEAVED and one.predicted is not None]
    assert refused and all("bytes" in why and "a worker has 700" in why for why in refused)
    with pytest.raises(MemoryBoundError, match="a worker has 100"):
        make_model(units, worker_bytes=100).cut(0, 4, 1)


def test_where_the_fastest_candidates_do_not_fit_more_are_tried() -> None:
    """Only micro-batches of two samples fit. Larger ones are faster."""
    options = [Option(ScheduleName.INTERLEAVED, spans) for spans in range(2, 7)]
    model = make_model(even(12, saved=10), options=options, fixed=5, worker_bytes=600)

    choice, *others = model.candidates(0, 2, 1)

    assert choice.cut is not None and choice.predicted is not None
    assert (choice.cut.schedule, choice.cut.micro_batch_size) == (ScheduleName.INTERLEAVED, 2)
    assert sum("do not fit the memory" in one.why_not for one in others) > 12, "the most that are simulated otherwise"


def test_what_a_worker_holds_is_its_units_and_its_chunks_in_flight() -> None:
    model = make_model(even(8, saved=3), micro_batch_size=2, options=(ONE_F_ONE_B,))
    cut = model.cut(0, 4, 1)
    assert model.predict(0, cut, 1).bytes_by_worker[1] == 2 * 40 + 3 * 2 * (3 * 2), "K - 1 chunks of two layers"
    frozen = model.cut(4, 4, 1)
    held = [
        sum(40 + 3 * 2 * (4 - stage) * (0 < unit < 9) if unit > 4 else 10 for unit in span)
        for stage, span in enumerate(frozen.spans)
    ]
    assert list(model.predict(4, frozen, 1).bytes_by_worker) == held
    gpipe = replace(cut, schedule=ScheduleName.GPIPE)
    assert model.predict(0, gpipe, 1).bytes_by_worker[1] == 2 * 40 + 12 * 2 * (3 * 2)


def test_an_embedding_keeps_bytes_for_its_backward_while_it_trains() -> None:
    """A lone stage with one chunk of two samples in flight."""
    units = [UnitCost(1, 2, 1, 7), UnitCost(1, 2, 1, 3), UnitCost(1, 2, 1, 3), UnitCost(1, 2, 1, 5)]
    model = make_model(units, micro_batch_size=2, options=(ONE_F_ONE_B,))
    cut = model.cut(0, 1, 1)
    assert model.predict(0, cut, 1).bytes_by_worker == (4 * 40 + 2 * (7 + 3 + 3 + 5),)
    assert model.predict(1, cut, 1).bytes_by_worker == (2 * 10 + 2 * 40 + 2 * (3 + 5),)


@pytest.mark.parametrize(("boundary", "stages", "stops"), [(7, 2, [8, 10]), (6, 3, [7, 8, 10]), (7, 1, [10])])
def test_cached_layers_fill_the_first_stage_where_too_few_others_train(
    boundary: int, stages: int, stops: list[int]
) -> None:
    """Eight layers. A cut that spreads the frozen ones would compute those beyond the first stage."""
    model = make_model(even(8), options=(ONE_F_ONE_B,), cache_bytes=10**9)
    cut = model.cut(boundary, stages, 1)
    best = best_cut(model, boundary, stages, 1)
    assert [span.stop for span in cut.spans] == stops
    assert best is not None and model.step_seconds(boundary, cut, 1) == pytest.approx(best.seconds)


def test_a_layout_that_cannot_run_the_schedule_runs_1f1b_and_says_why() -> None:
    model = make_model(even(5), options=(INTERLEAVED,))
    cut = model.cut(0, 4, 1)
    assert (cut.schedule, cut.owners) == (ScheduleName.ONE_FORWARD_ONE_BACKWARD, (0, 1, 2, 3))
    assert cut.why_schedule == "Interleaved needs a layer for each of 8 spans (4 stages of 2), not 5"
    assert model.cut(0, 2, 1).schedule is ScheduleName.INTERLEAVED
    assert model.cut(0, 2, 1).owners == (0, 1, 0, 1)
    tight = make_model(even(8, saved=20), options=(INTERLEAVED,), micro_batch_size=3, worker_bytes=700).cut(0, 4, 1)
    assert tight.schedule is ScheduleName.ONE_FORWARD_ONE_BACKWARD
    assert tight.why_schedule.startswith("Interleaved needs more memory than a worker has (4 stages do not fit")


def test_a_lone_stage_has_nothing_to_put_in_order() -> None:
    (choice, *others) = make_model(even(8)).candidates(0, 1, 4)
    assert choice.option == ONE_F_ONE_B
    assert {one.option for one in others} <= {ONE_F_ONE_B}


def test_a_schedule_that_refuses_is_not_chosen() -> None:
    class Refusing:
        def actions(self, shape: RoundShape) -> Sequence[Sequence[Action]]:
            raise ScheduleError("it does not like this round")

    script = Option(ScheduleName.SCRIPT)
    found = replace(make_model(even(8), options=(script, GPIPE)), script_schedule=Refusing()).candidates(0, 2, 1)
    assert found[0].option == GPIPE
    assert "it does not like this round" in {one.why_not for one in found if one.option == script}
    alone = replace(make_model(even(8), options=(script,), micro_batch_size=1), script_schedule=Refusing()).cut(0, 2, 1)
    assert (alone.schedule, alone.why_schedule) == (
        ScheduleName.ONE_FORWARD_ONE_BACKWARD,
        "it does not like this round",
    )


def test_a_micro_batch_is_no_larger_than_the_share_of_a_pipeline() -> None:
    """A job that begins with one worker has micro-batches of half a batch. Eight pipelines would compute padding."""
    model = make_model(even(8), options=(ONE_F_ONE_B,), fixed=0.0, micro_batch_size=12)
    cuts = {pipelines: model.cut(0, 1, pipelines) for pipelines in (1, 2, 8)}
    seconds = {pipelines: model.step_seconds(0, cut, pipelines) for pipelines, cut in cuts.items()}

    assert [cut.micro_batch_size for cut in cuts.values()] == [12, 12, 3]
    assert seconds[1] == pytest.approx(8 * seconds[8])


class OnlyUnfrozen(GPipe):
    """Runs no round with a frozen span."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        if shape.first_trained:
            raise ScheduleError("all spans have to train")
        return super().actions(shape)


def test_a_layout_whose_own_schedule_refuses_frozen_spans_is_predicted_as_the_plain_one_that_runs() -> None:
    """The leader predicts the present layout at each freeze, while the workers run 1F1B there."""
    model = make_model(even(8), options=(Option(ScheduleName.SCRIPT),), micro_batch_size=2)
    with_script = replace(model, script_schedule=OnlyUnfrozen())
    cut = with_script.cut(0, 2, 1)
    assert cut.schedule is ScheduleName.SCRIPT

    predicted = with_script.predict(6, cut, 1)

    assert predicted == model.predict(6, replace(cut, schedule=ScheduleName.ONE_FORWARD_ONE_BACKWARD), 1)
    assert predicted != with_script.predict(0, cut, 1)


class OfOneLength(GPipe):
    """Runs rounds of 40 chunks, and no others."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        if shape.chunks != 40:
            raise ScheduleError(f"not {shape.chunks} chunks")
        return super().actions(shape)


def test_a_schedule_that_runs_only_the_rounds_of_the_job_is_predicted_by_them() -> None:
    """Other long rounds are predicted from shorter ones."""
    model = make_model(even(8), options=(Option(ScheduleName.SCRIPT),), micro_batch_size=1, global_batch=40)
    script, gpipe = replace(model, script_schedule=OfOneLength()), replace(model, options=(GPIPE,))

    cut = script.cut(0, 8, 1)

    assert (cut.schedule, cut.why_schedule) == (ScheduleName.SCRIPT, "")
    assert script.step_seconds(0, cut, 1) == pytest.approx(gpipe.step_seconds(0, gpipe.cut(0, 8, 1), 1))


class OfFewChunks(GPipe):
    """Runs rounds of at most 30 chunks."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        if shape.chunks > 30:
            raise ScheduleError(f"{shape.chunks} chunks are too many")
        return super().actions(shape)


def test_a_schedule_that_runs_only_shorter_rounds_than_the_job_has_is_not_chosen() -> None:
    """Long rounds are predicted from shorter ones, which it would run."""
    model = make_model(even(8), options=(Option(ScheduleName.SCRIPT),), micro_batch_size=1, global_batch=40)

    cut = replace(model, script_schedule=OfFewChunks()).cut(0, 8, 1)

    assert (cut.schedule, cut.why_schedule) == (ScheduleName.ONE_FORWARD_ONE_BACKWARD, "40 chunks are too many")


def test_a_cut_for_an_asynchronous_schedule_has_room_for_the_chunks_of_several_steps() -> None:
    """With one micro-batch a step, the first of four workers keeps those of four steps."""
    options = (Option(ScheduleName.PIPE_OPTIM),)
    model = make_model(even(8, saved=20), options=options, micro_batch_size=24, worker_bytes=2200)
    model = replace(model, steps_per_round=16)

    cut = model.cut(0, 4, 1)

    assert cut.schedule is ScheduleName.PIPE_OPTIM
    held = model.predict(0, cut, 1).bytes_by_worker
    assert max(held) <= 2200
    assert held[0] == len(cut.spans[0]) * 40 + 4 * cut.stage_layers[0] * 20 * 24


def test_steps_of_an_asynchronous_round_share_its_bubble() -> None:
    model = make_model(even(8), options=(Option(ScheduleName.PIPE_OPTIM),), micro_batch_size=24, fixed=0)
    seconds = [replace(model, steps_per_round=steps).step_seconds(0, model.cut(0, 4, 1), 1) for steps in (1, 16)]
    assert seconds == pytest.approx([6 * 24 * (1 + 3), 6 * 24 * (16 + 3) / 16])


def test_the_micro_batches_of_an_asynchronous_round_are_those_of_its_fastest_steps() -> None:
    """A round of one step would have more of them, because it fills the pipeline for each step."""
    model = replace(make_model(even(8), options=(Option(ScheduleName.PIPE_OPTIM),)), steps_per_round=16)
    of_sizes = {size: replace(model, micro_batch_size=size) for size in (6, 3, 2, 1)}
    seconds = {size: only.step_seconds(0, only.cut(0, 4, 1), 1) for size, only in of_sizes.items()}

    found = {one.cut.micro_batch_size: one.least_seconds for one in model.candidates(0, 4, 1) if one.cut is not None}

    assert next(iter(found)) == min(seconds, key=lambda size: seconds[size]) == 2
    assert found == pytest.approx(seconds), "nothing waits, so the bound is reached"


def test_no_search_stops_at_the_bound_of_a_round_where_steps_share_one() -> None:
    """A step of an asynchronous round takes less than the way of a chunk through the pipeline."""
    units = [UnitCost(0, 0, 0), *[UnitCost(each, 2 * each, each) for each in (3, 1, 1, 1, 1, 3)], UnitCost(0, 0, 0)]
    model = replace(
        make_model(units, options=(Option(ScheduleName.PIPE_OPTIM),), micro_batch_size=24, fixed=0),
        steps_per_round=16,
    )
    cuts = [[range(a + 1), range(a + 1, b + 1), range(b + 1, 8)] for a in range(1, 5) for b in range(a + 1, 6)]
    seconds = [model.step_seconds(0, replace(model.cut(0, 3, 1), spans=each), 1) for each in cuts]

    best = best_cut(model, 0, 3, 1)

    assert best is not None and best.exact
    assert best.seconds == pytest.approx(min(seconds))


@pytest.mark.parametrize(
    "changes",
    [
        {"frozen_forward": FrozenForward.AHEAD, "sample_bytes": 2},
        {"cache_bytes": 25},
        {"cache_bytes": 25, "offloads": True, "cached_layers": 5, "cold_share": 1.0, "unit_bytes": [30] * 10},
    ],
    ids=["bytes made ahead", "share of the cache", "layers off the device"],
)
def test_a_layout_is_cut_alike_whichever_layouts_were_asked_for_before(changes: dict[str, Any]) -> None:
    """In more pipelines each first worker makes less ahead, and its cache holds a larger share."""
    model = make_model(even(8), options=(ONE_F_ONE_B,), micro_batch_size=1, worker_bytes=210)
    model = replace(model, last_sharing=range(10), **changes)

    def ask(*pipelines: int) -> list[list[range]]:
        fresh = replace(model)
        return [fresh.cut(5 if "cache_bytes" in changes else 3, 2, each).spans for each in pipelines]

    assert ask(1, 4) == ask(4, 1)[::-1] == [*ask(1), *ask(4)]
    assert ask(1) != ask(4)


def test_halves_that_repeat_a_forward_are_computed_at_once_and_fill_no_wait() -> None:
    """With activation checkpointing the first half of a backward does all of it."""
    zero_bubble = Option(ScheduleName.ZERO_BUBBLE)
    model = make_model(even(8), options=(ONE_F_ONE_B, zero_bubble), micro_batch_size=3, fixed=0)

    choices = {each: replace(model, recompute=each).candidates(0, 4, 1)[0] for each in (False, True)}

    assert choices[False].option == zero_bubble
    assert choices[True].option == ONE_F_ONE_B


@pytest.mark.parametrize("stages", [4, 16])
def test_zero_bubble_needs_rounds_of_equal_length_with_one_span_a_worker_too(stages: int) -> None:
    option = Option(ScheduleName.ZERO_BUBBLE)
    model = replace(make_model(even(16), options=(option,), global_batch=50, micro_batch_size=1), num_shards=50)
    assert model.cut(0, stages, 1).schedule is ScheduleName.ONE_FORWARD_ONE_BACKWARD
    assert "equal rounds" in model.cut(0, stages, 1).why_schedule
    even_rounds = replace(model, global_batch=48, num_shards=48).cut(0, stages, 1)
    assert (even_rounds.schedule, even_rounds.owners) == (ScheduleName.ZERO_BUBBLE, tuple(range(stages)))


def test_seconds_an_action_choose_fewer_micro_batches() -> None:
    few, many = (make_model(even(8), options=(ONE_F_ONE_B,), fixed=0, action=seconds) for seconds in (2.0, 0.0))
    assert few.candidates(0, 4, 1)[0].micro_batches < many.candidates(0, 4, 1)[0].micro_batches


@pytest.mark.parametrize("true_action", [0.0, 0.3, 2.0])
def test_an_action_takes_no_longer_than_the_measured_step_allows(true_action: float) -> None:
    """Workers that share cores measure an action as longer than it is in a step."""
    true = make_model(even(8), options=(ONE_F_ONE_B,), action=true_action)
    cut = true.cut(0, 4, 2)
    measured = true.costs.model_copy(update={"seconds_per_action": 2.0, "step_seconds": true.step_seconds(0, cut, 2)})

    found = replace(true, costs=measured).costs_within_step(0, cut, 2)

    assert found.seconds_per_action <= true_action * (1 + 1e-9)
    assert replace(true, costs=found).step_seconds(0, cut, 2) <= true.step_seconds(0, cut, 2) * (1 + 1e-9)
    if true_action in (0.0, 2.0):
        assert found.seconds_per_action == pytest.approx(true_action)
    else:
        assert found.seconds_per_action > 0.5 * true_action


def test_an_action_takes_its_processor_time_however_short_the_step() -> None:
    """Units may be measured as slower than they are, too."""
    model = make_model(even(8), options=(ONE_F_ONE_B,), action=2.0)
    short = model.costs.model_copy(update={"step_seconds": 1.0, "processor_per_action": 0.5})

    assert replace(model, costs=short).costs_within_step(0, model.cut(0, 4, 2), 2).seconds_per_action == 0.5


def test_the_boundary_of_the_measured_step_bounds_an_action() -> None:
    """A measurement follows a change of the boundary, and the last step was before that."""
    model = make_model(even(8), options=(ONE_F_ONE_B,), action=2.0)
    cut = model.cut(0, 4, 2)
    timed = model.costs.model_copy(update={"step_seconds": model.step_seconds(0, cut, 2), "boundary": 4})

    assert replace(model, costs=timed).costs_within_step(0, cut, 2) == timed


def test_a_step_that_was_not_timed_bounds_no_action() -> None:
    model = make_model(even(8), action=2.0)
    assert model.costs_within_step(0, model.cut(0, 4, 2), 2) == model.costs


def test_a_change_of_the_schedule_alone_pays_for_a_regroup() -> None:
    layout, model = Layout(4, 1), make_model(even(16), options=AUTO)
    now = make_model(even(16), options=(ONE_F_ONE_B,)).cut(0, 4, 1)
    best = model.cut(0, 4, 1)
    assert best.schedule is not now.schedule
    present, promised = (model.step_seconds(0, cut, 1) for cut in (now, best))
    times = [StepTime(pipelines=1, seconds=promised)]
    offers = [Offer(stages=4, bytes_per_worker=1, step_seconds=times, pause_seconds=1000)]
    gain = present - promised
    for steps, pays in [(1100 / gain, True), (900 / gain, False)]:
        assert pays_to_recut(offers, Present(layout, present, round(steps)), Packing.MEASURED) is pays
    recut = Present(layout, promised, 10**6)
    assert not pays_to_recut(offers, recut, Packing.MEASURED), "the best schedule promises no further gain"


def test_no_round_is_shorter_than_the_way_of_one_chunk_there_and_back() -> None:
    """Three workers, one span each. Only the first one's weight gradients, of two seconds each, are on the way."""
    work = SpanWork((0, 1, 2), 0, (1, 2, 3), (4, 5, 6), (2, 2, 2), (0, 0, 0), message=0.5, action=0.25)
    way = (1 + 2 + 3) + (4 + 5 + 6) + 6 * 0.25 + 4 * 0.5
    assert work.bound(halves=False).at(1) == pytest.approx(way)
    assert work.bound(halves=True).at(1) == pytest.approx(way - 2 * 2)


def test_workers_that_run_frozen_layers_ahead_do_not_share_the_work_of_others() -> None:
    """The second of two workers has most of the work, and only the first one runs the frozen layer."""
    work = SpanWork((0, 1), 0, (1, 10), (1, 10), (0, 0), (0, 0), prefix=(1,), holders=1)
    assert work.bound(halves=False).at(100) == pytest.approx(1 + 100 * (10 + 10) + 1)


def test_no_message_passes_between_two_spans_of_one_worker() -> None:
    work = SpanWork((0, 0), 0, (1, 2), (3, 4), (0, 0), (0, 0), message=0.5)
    assert work.bound(halves=False).at(1) == pytest.approx(1 + 2 + 3 + 4)


@pytest.mark.parametrize("schedule", [GPipe(), OneForwardOneBackward()], ids=str)
@pytest.mark.parametrize("chunks", [12, 13, 24, 31, 36, 50, 73])
def test_a_long_round_goes_on_at_the_pace_of_a_shorter_one(schedule: Schedule, chunks: int) -> None:
    from pipetransformer.partition.predict import _play

    seconds = tuple(1 + 0.1 * (span % 3) for span in range(12))
    work = SpanWork(tuple(range(12)), 0, seconds, seconds, seconds, seconds, 0.01, 0.02)
    shape = RoundShape(work.owners, chunks)
    costs = RoundCosts.by_span(
        work.forward, work.backward, work.weights, message_seconds=0.01, action_seconds=0.02, saved_bytes=work.saved
    )
    found, whole = _play(schedule, chunks, work), simulate(schedule.actions(shape), shape, costs)
    assert found.ends == pytest.approx([times[-1][1] for times in whole.times], rel=0.01)
    assert found.busy == pytest.approx(whole.busy)
    assert found.bytes == pytest.approx(whole.peak_bytes)


def test_offers_of_16_lengths_and_64_widths_take_no_more_than_a_moment() -> None:
    model = make_model(even(48), options=(ONE_F_ONE_B,), global_batch=4096)
    model = replace(model, num_shards=1024)
    layouts = 0

    def predict(stages: int, pipelines: int) -> PredictedLayout:
        nonlocal layouts
        layouts += 1
        cut = model.cut(5, stages, pipelines)
        found = model.predict(5, cut, pipelines)
        return PredictedLayout(found.bytes_per_worker, found.seconds)

    def offer() -> None:
        make_offers(predict, initial_stages=16, max_workers=1024, max_pipelines=1024, pause_seconds=1.0)

    assert yardsticks(offer) < 1000
    assert layouts == 16 * 64


@pytest.mark.parametrize("schedule", [ScheduleName.INTERLEAVED, ScheduleName.ZERO_BUBBLE, ScheduleName.ZERO_BUBBLE_V])
def test_a_worker_with_two_spans_has_no_more_to_do_than_others(schedule: ScheduleName) -> None:
    """Twelve layers in eight spans. Spans as equal as possible would give a worker four layers, and another two."""
    model = make_model(even(12), options=(Option(schedule, 2),), micro_batch_size=2)

    cut = model.cut(0, 4, 1)

    assert cut.stage_layers == [3, 3, 3, 3]
    best = best_cut(model, 0, 4, 1)
    assert best is not None and model.step_seconds(0, cut, 1) < 1.1 * best.seconds
