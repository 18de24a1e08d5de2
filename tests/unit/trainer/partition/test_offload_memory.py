"""The memory of a first stage whose frozen layers are in host memory."""

from dataclasses import replace
from typing import Any

import pytest

from pipetransformer.partition import MemoryBoundError, ModelCosts, StepModel, UnitCost
from pipetransformer.partition.contiguous import MemoryBound, partition
from pipetransformer_contract.spec import FrozenForward

FROZEN, TRAINED = 100, 400
LAYERS = 12
SAMPLES = 64


def make_model(worker_bytes: int | None = None, **changes: Any) -> StepModel:
    """Twelve equal layers without ends, and a cache that holds all samples of a lone pipeline."""
    units = [UnitCost(0, 0, 0), *[UnitCost(1.0, 2.0, 1.0)] * LAYERS, UnitCost(0, 0, 0)]
    model = StepModel(
        costs=ModelCosts(micro_batch_sizes=(1, 2), small=units, large=units, worker_bytes=worker_bytes),
        global_batch=8,
        num_shards=8,
        micro_batch_size=1,
        unit_bytes=[0, *[FROZEN] * LAYERS, 0],
        trained_bytes=[0, *[TRAINED] * LAYERS, 0],
        sample_bytes=1,
        num_samples=SAMPLES,
        cache_bytes=SAMPLES,
        offloads=True,
    )
    return replace(model, **changes)


def alone(model: StepModel, boundary: int) -> int:
    """Bytes of a lone stage."""
    return model.bytes_per_worker(boundary, model.cut(boundary, 1, 1), 1)


def test_there_is_room_for_the_largest_layer_that_comes_back() -> None:
    assert alone(make_model(), 9) == 9 * FROZEN + 3 * TRAINED
    assert alone(make_model(cached_layers=9), 9) == FROZEN + 3 * TRAINED
    uneven = make_model(cached_layers=9, unit_bytes=[0, *[FROZEN] * 4, 7 * FROZEN, *[FROZEN] * 7, 0])
    assert alone(uneven, 9) == 7 * FROZEN + 3 * TRAINED


def test_layers_that_froze_since_are_on_the_device() -> None:
    assert alone(make_model(cached_layers=4), 9) == FROZEN + 5 * FROZEN + 3 * TRAINED
    assert alone(make_model(cached_layers=9), 4) == FROZEN + 8 * TRAINED, "five layers train again"


#: The third layer shares a parameter with the tenth.
TIED = [0, 1, 2, 10, *range(4, LAYERS + 2)]


@pytest.mark.parametrize(
    "changes", [{"offloads": False}, {"cache_bytes": SAMPLES - 1}, {"cached_layers": 0}, {"last_sharing": TIED}]
)
def test_layers_stay_without_the_feature_or_a_cache_that_holds_all(changes: dict[str, Any]) -> None:
    assert alone(make_model(**{"cached_layers": 9, **changes}), 9) == 9 * FROZEN + 3 * TRAINED


def test_a_layer_that_shares_a_parameter_leaves_with_the_last_one_that_holds_it() -> None:
    tied, apart = make_model(cached_layers=10, last_sharing=TIED), make_model(cached_layers=10)
    assert alone(tied, 10) == alone(apart, 10) == FROZEN + 2 * TRAINED
    assert [tied.off_layers(boundary, 1) for boundary in (2, 3, 9, 10)] == [2, 0, 0, 10]
    cut = apart.cut(9, 1, 1)
    assert tied.step_seconds(9, cut, 1) > apart.step_seconds(9, cut, 1), "no sample is cached"


def test_more_pipelines_need_less_of_a_cache() -> None:
    model = make_model(cached_layers=9, cache_bytes=SAMPLES // 2)
    cut = model.cut(9, 1, 2)
    assert model.bytes_per_worker(9, cut, 1) == 9 * FROZEN + 3 * TRAINED
    assert model.bytes_per_worker(9, cut, 2) == FROZEN + 3 * TRAINED


def test_frozen_layers_of_later_stages_stay() -> None:
    model = make_model(cached_layers=9)
    cut = replace(model.cut(0, 2, 1), spans=[range(5), range(5, 14)])
    assert model.predict(9, cut, 1).bytes_by_worker == (FROZEN, 5 * FROZEN + 3 * TRAINED)


def test_a_cut_within_the_memory_counts_what_has_left() -> None:
    room = FROZEN + 3 * TRAINED
    with pytest.raises(MemoryBoundError):
        make_model(room).cut(9, 1, 1)
    assert make_model(room, cached_layers=9).cut(9, 1, 1).spans == [range(14)]
    two = make_model(2 * TRAINED, cached_layers=9)
    assert two.bytes_per_worker(9, two.cut(9, 2, 1), 1) <= 2 * TRAINED


@pytest.mark.parametrize("frozen_forward", [FrozenForward.IN_PLACE, FrozenForward.AHEAD])
def test_a_cut_leaves_room_for_the_layer_that_comes_back(frozen_forward: FrozenForward) -> None:
    """By time the first stage would train four layers."""
    cheap = [UnitCost(0, 0, 0), *[UnitCost(0.5, 1.0, 0.5)] * 10, *[UnitCost(1.0, 2.0, 1.0)] * 2, UnitCost(0, 0, 0)]
    room = FROZEN + 4 * TRAINED - 1
    costs = ModelCosts(micro_batch_sizes=(1, 2), small=cheap, large=cheap, worker_bytes=room)
    model = make_model(costs=costs, cached_layers=6, frozen_forward=frozen_forward)
    assert replace(model, costs=costs.model_copy(update={"worker_bytes": None})).cut(6, 2, 1).spans[0].stop == 11

    cut = model.cut(6, 2, 1)

    assert [len(span) for span in cut.spans] == [10, 4]
    assert cut.holders == ((0, 1) if frozen_forward is FrozenForward.AHEAD else ())
    assert model.bytes_per_worker(6, cut, 1) <= room
    assert not any("do not fit" in one.why_not for one in model.candidates(6, 2, 1))


def test_copies_that_compute_ahead_leave_too() -> None:
    ahead = make_model(cached_layers=6, frozen_forward=FrozenForward.AHEAD)
    cut = ahead.cut(6, 3, 1)
    assert cut.holders and cut.ahead_units == 7
    kept = replace(ahead, offloads=False)
    before, after = (model.predict(6, cut, 1).bytes_by_worker for model in (kept, ahead))
    less = [b - a for a, b in zip(after, before, strict=True)]
    assert less == [5 * FROZEN if stage in cut.holders else 0 for stage in range(3)]


def test_a_later_stage_too_small_for_a_layer_that_left_the_first_is_noticed() -> None:
    """The last two items go to two stages, and the first of them is away only in the first stage."""
    needs = [[0.0, 0.0, 1.0], [5.0, 5.0, 1.0], [5.0, 5.0, 1.0]]
    with pytest.raises(MemoryBoundError):
        partition([1.0, 1.0, 1.0], 3, MemoryBound(needs, limit=4.0))
