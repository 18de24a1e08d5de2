"""When frozen layers compute in a layout: in place, from a cache, or one round ahead, whichever is faster and fits."""

from dataclasses import replace

import pytest

from pipetransformer.partition import AUTO, ModelCosts, Option, StepModel, UnitCost
from pipetransformer_contract.spec import FrozenForward, ScheduleName

LAYERS, FROZEN, STAGES, CHUNKS = 24, 12, 4, 8
ONE_F_ONE_B = Option(ScheduleName.ONE_FORWARD_ONE_BACKWARD)
FROZEN_BYTES, TRAINED_BYTES = 5, 40


def make_model(frozen_forward: FrozenForward, worker_bytes: int | None = None) -> StepModel:
    """24 equal layers: a forward of 1 and a backward of 2; the ends cost nothing."""
    units = [UnitCost(0, 0, 0), *[UnitCost(1, 2, 1)] * LAYERS, UnitCost(0, 0, 0)]
    return StepModel(
        costs=ModelCosts(micro_batch_sizes=(1, 2), small=units, large=units, worker_bytes=worker_bytes),
        global_batch=CHUNKS,
        num_shards=1,
        micro_batch_size=1,
        unit_bytes=[FROZEN_BYTES] * len(units),
        trained_bytes=[TRAINED_BYTES] * len(units),
        sample_bytes=1,
        num_samples=100,
        options=[ONE_F_ONE_B],
        frozen_forward=frozen_forward,
        last_sharing=range(len(units)),
        first_stages=STAGES,
    )


def test_frozen_layers_ahead_reach_the_bound_nearly_and_win() -> None:
    model = make_model(FrozenForward.AUTO)

    choice, *others = model.candidates(FROZEN, STAGES, 1)

    assert choice.predicted is not None and choice.cut is not None
    assert (choice.holders, choice.cut.ahead_units, choice.cut.holders) == (STAGES, FROZEN + 1, (0, 1, 2, 3))
    assert [len(span) for span in choice.cut.spans] == [FROZEN + 1 + 3, 3, 3, 4], "the layers that train are shared"
    assert choice.cut.copies_of(0) == [] and choice.cut.copies_of(3) == [*range(FROZEN + 1)]
    # Work of a chunk: 12 forwards that are frozen, 12 that train, and backwards of 2, but 1 for the first.
    assert choice.predicted.seconds >= choice.least_seconds >= CHUNKS * (12 + 12 + 23) / STAGES
    assert choice.predicted.seconds <= 1.06 * choice.least_seconds
    assert {one.holders for one in others} == {0, 1}
    assert all(one.why_not.endswith("slower") for one in others)
    in_place = make_model(FrozenForward.IN_PLACE)
    today = in_place.step_seconds(FROZEN, in_place.cut(FROZEN, STAGES, 1), 1)
    assert today / choice.predicted.seconds >= 1.25


def test_where_frozen_layers_are_most_of_the_work_all_workers_share_it() -> None:
    """Each worker trains one layer. Without the frozen forwards a round would take (8 + 3) * 3 seconds."""
    choice = make_model(FrozenForward.AHEAD).candidates(20, STAGES, 1)[0]

    work = 20 + 4 + (1 + 2 + 2 + 2)  # of a chunk: frozen forwards, other forwards, backwards
    assert choice.predicted is not None and choice.holders == STAGES
    assert choice.least_seconds == pytest.approx(CHUNKS * work / STAGES)
    assert choice.least_seconds <= choice.predicted.seconds <= 1.06 * choice.least_seconds
    assert choice.predicted.idle_share == pytest.approx(1 - choice.least_seconds / choice.predicted.seconds)


def test_a_worker_without_memory_for_a_copy_leaves_it_to_the_first() -> None:
    frozen, trained = (FROZEN + 1) * FROZEN_BYTES, 4 * TRAINED_BYTES
    made = 2 * CHUNKS

    everywhere = make_model(FrozenForward.AHEAD, frozen + trained + made).cut(FROZEN, STAGES, 1)
    first_only = make_model(FrozenForward.AHEAD, frozen + 3 * TRAINED_BYTES + made).cut(FROZEN, STAGES, 1)
    large = replace(make_model(FrozenForward.AHEAD, 5 * TRAINED_BYTES), sample_bytes=100)
    nowhere = large.cut(FROZEN, STAGES, 1)

    assert (everywhere.holders, first_only.holders, nowhere.holders) == ((0, 1, 2, 3), (0,), ())
    assert first_only.copies_of(1) == []
    assert nowhere.frozen_forward is FrozenForward.IN_PLACE and "do not fit" in nowhere.why_in_place


def test_copies_count_as_bytes_of_their_holders() -> None:
    model = replace(make_model(FrozenForward.AHEAD), sample_bytes=3)
    cut = model.cut(FROZEN, STAGES, 1)

    frozen = (FROZEN + 1) * FROZEN_BYTES
    assert model.predict(FROZEN, cut, 1).bytes_by_worker == (
        frozen + 3 * TRAINED_BYTES + 2 * CHUNKS * 3, *[frozen + 3 * TRAINED_BYTES] * 2, frozen + 4 * TRAINED_BYTES,
    )  # fmt: skip


def test_before_costs_are_measured_copies_need_no_more_than_a_stage_of_the_first_layout() -> None:
    model = replace(make_model(FrozenForward.AHEAD), trained_bytes=[2 * FROZEN_BYTES] * (LAYERS + 2))

    assert model.cut(FROZEN, STAGES, 1).holders == (0,), "a frozen layer needs as much as one that trains"


def test_a_full_cache_leaves_nothing_to_run_ahead() -> None:
    model = replace(make_model(FrozenForward.AUTO), cache_bytes=100)

    choice = model.candidates(FROZEN, STAGES, 1)[0]

    assert (choice.together, choice.holders) == (True, 0)


@pytest.mark.parametrize(
    ("stages", "boundary", "why"),
    [(1, 12, "a lone stage is never idle"), (4, 21, "fewer layers train than there are stages (4)"), (4, 0, "")],
)
def test_a_layout_that_cannot_run_ahead_says_why(stages: int, boundary: int, why: str) -> None:
    cut = make_model(FrozenForward.AHEAD).cut(boundary, stages, 1)

    assert (cut.frozen_forward, cut.why_in_place) == (FrozenForward.IN_PLACE, why)
    assert not make_model(FrozenForward.AUTO).cut(boundary, stages, 1).why_in_place


def test_one_layer_that_trains_in_each_stage_is_enough_to_run_ahead() -> None:
    cut = make_model(FrozenForward.AHEAD).cut(LAYERS - STAGES, STAGES, 1)

    assert (cut.frozen_forward, cut.why_in_place) == (FrozenForward.AHEAD, "")


def test_where_a_schedule_has_more_spans_than_layers_that_train_1f1b_runs_frozen_ones_ahead() -> None:
    model = replace(make_model(FrozenForward.AHEAD), options=[Option(ScheduleName.INTERLEAVED, 2)])

    cut = model.cut(18, STAGES, 1)

    assert (cut.schedule, cut.frozen_forward) == (ScheduleName.ONE_FORWARD_ONE_BACKWARD, FrozenForward.AHEAD)
    assert cut.why_schedule == "frozen forwards run ahead only if each of 8 spans has a layer that trains"


def test_an_embedding_that_trains_with_the_head_is_no_part_of_what_runs_ahead() -> None:
    model = make_model(FrozenForward.AHEAD)
    tied = replace(model, last_sharing=[LAYERS + 1, *range(1, LAYERS + 2)])

    assert tied.cut(FROZEN, STAGES, 1).why_in_place == "a frozen layer shares a parameter with one that trains"


def test_a_cut_runs_ahead_for_fewer_frozen_layers_and_in_place_for_more_or_none() -> None:
    model = replace(make_model(FrozenForward.AHEAD), cache_bytes=50)
    cut = model.cut(FROZEN, STAGES, 1)

    fewer, more = model.ahead(FROZEN - 2, cut), model.ahead(FROZEN + 1, cut)

    assert fewer is not None and fewer.seconds.prefix == (0.0, *[1.0] * (FROZEN - 2)), "whatever the cache holds"
    assert more is None
    assert model.ahead(0, cut) is None, "all layers train again"


def test_each_computation_of_a_cut_that_runs_ahead_takes_the_seconds_of_an_action_too() -> None:
    model = make_model(FrozenForward.AHEAD)
    model = replace(model, costs=model.costs.model_copy(update={"seconds_per_action": 0.5}))
    cut = model.cut(FROZEN, STAGES, 1)

    ahead = model.ahead(FROZEN, cut)

    layers = len(cut.spans[1])
    assert ahead is not None
    assert (ahead.seconds.forward[1], ahead.seconds.backward[1]) == (layers + 0.5, 2 * layers + 0.5)


def test_auto_compares_each_schedule_in_place_and_ahead() -> None:
    model = replace(make_model(FrozenForward.AUTO), options=AUTO)

    found = model.candidates(FROZEN, STAGES, 1)

    assert {(one.option, one.holders > 0) for one in found} == {(option, ahead) for option in AUTO for ahead in (0, 1)}
    assert found[0].holders


def test_a_layout_without_memory_for_copies_says_what_a_worker_has_and_would_need() -> None:
    found = make_model(FrozenForward.AUTO, 160).candidates(FROZEN, STAGES, 1)

    (why,) = (one.why_not for one in found if one.holders == STAGES)

    assert why.endswith("but a worker has 160")
    needed = int(why.split("would need ")[1].split()[0])
    assert 160 < needed <= (FROZEN + 1) * FROZEN_BYTES + 4 * TRAINED_BYTES
