"""A cut tells which stage holds which units, and travels as JSON."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipetransformer.partition import Cut, ModelCosts, Option, StepModel, UnitCost
from pipetransformer_contract.spec import ScheduleName

#: Eight layers between an embedding and a head, in four spans that go there and back.
V_SHAPED = Cut(
    [range(3), range(3, 5), range(5, 7), range(7, 10)], 4, owners=(0, 1, 1, 0), schedule=ScheduleName.ZERO_BUBBLE_V
)


def test_by_default_each_stage_owns_one_span_in_order() -> None:
    cut = Cut([range(4), range(4, 6)], 8)

    assert (cut.owners, cut.stages, cut.units_by_stage) == ((0, 1), 2, [[0, 1, 2, 3], [4, 5]])


@pytest.mark.parametrize(
    ("owners", "pairs"),
    [((0,), set()), ((0, 1, 2), {(0, 1), (1, 2)}), ((0, 1, 2, 0, 1, 2), {(0, 1), (1, 2), (0, 2)}),
     ((0, 1, 2, 2, 1, 0), {(0, 1), (1, 2)})],
)  # fmt: skip
def test_stages_send_to_the_owners_of_neighbouring_spans(owners: tuple[int, ...], pairs: set[tuple[int, int]]) -> None:
    assert Cut([range(number, number + 1) for number in range(len(owners))], 4, owners).pairs == pairs


def test_holders_of_frozen_layers_send_to_the_owner_of_the_first_span() -> None:
    cut = Cut([range(3), range(3, 4), range(4, 5), range(5, 7)], 4, ahead_units=2, holders=(0, 1, 2, 3))

    assert cut.pairs == {(0, 1), (1, 2), (2, 3), (0, 2), (0, 3)}


def test_a_stage_holds_all_its_spans() -> None:
    assert V_SHAPED.stages == 2
    assert V_SHAPED.units_by_stage == [[0, 1, 2, 7, 8, 9], [3, 4, 5, 6]]
    assert V_SHAPED.layers_of(0) == [range(2), range(6, 8)]
    assert V_SHAPED.stage_layers == [4, 4]


def test_frozen_layers_are_counted_where_they_are() -> None:
    assert [V_SHAPED.frozen_layers(boundary) for boundary in (0, 1, 3, 7, 8)] == [
        [0, 0],
        [1, 0],
        [2, 1],
        [3, 4],
        [4, 4],
    ]


def test_embedding_and_head_are_no_layers() -> None:
    assert Cut([range(1), range(1, 3)], 1).stage_layers == [0, 1]
    assert Cut([range(3)], 1).layers_of(0) == [range(1)]


def test_a_cache_keeps_the_outputs_of_the_last_frozen_layer_of_the_first_span() -> None:
    cut = Cut([range(4), range(4, 8)], 4)
    assert [cut.prefix_layers(boundary) for boundary in (0, 2, 3, 5)] == [0, 2, 3, 3]


def test_cached_layers_leave_the_first_stage_and_no_other() -> None:
    """Frozen layers 4 and 5 stay on the second stage, because it needs them in each round."""
    cut = Cut([range(4), range(4, 8)], 4)
    assert [cut.off_device(0, cached) for cached in (0, 1, 2, 5)] == [[], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert [cut.off_device(1, cached) for cached in (0, 1, 5)] == [[], [], []]


def test_copies_of_cached_layers_leave_the_workers_that_hold_them() -> None:
    cut = Cut([range(4), range(4, 6), range(6, 8)], 4, ahead_units=3, holders=(0, 1))
    assert [cut.held_by(stage) for stage in range(3)] == [[0, 1, 2, 3], [0, 1, 2, 4, 5], [6, 7]]
    assert [cut.off_device(stage, 1) for stage in range(3)] == [[0, 1], [0, 1], []]


def test_a_cut_comes_back_from_json_as_it_was() -> None:
    adapter = TypeAdapter(Cut)
    cut = replace(V_SHAPED, why_schedule="because")

    assert adapter.validate_json(adapter.dump_json(cut)) == cut


def model(
    schedule: ScheduleName, *, spans: int = 2, micro_batch_size: int | None = 8, worker_bytes: int | None = None
) -> StepModel:
    """Twelve layers of 1 s forward and 2 s backward, a batch of 64."""
    units = [UnitCost(0, 0, 0), *[UnitCost(1, 2, 1, 10)] * 12, UnitCost(0, 0, 0)]
    costs = ModelCosts(micro_batch_sizes=(8, 16), small=units, large=units, worker_bytes=worker_bytes)
    return StepModel(
        costs=costs,
        global_batch=64,
        num_shards=64,
        micro_batch_size=micro_batch_size,
        unit_bytes=[100] * 14,
        trained_bytes=[400] * 14,
        sample_bytes=0,
        options=[Option(schedule, spans)],
    )


def test_several_spans_a_worker_are_cut_to_equal_cost() -> None:
    cut = model(ScheduleName.ZERO_BUBBLE_V).cut(0, 3, 1)

    assert (cut.schedule, cut.owners, cut.why_schedule) == (ScheduleName.ZERO_BUBBLE_V, (0, 1, 2, 2, 1, 0), "")
    assert [len(span) for span in cut.spans] == [3, 2, 2, 2, 2, 3]
    assert cut.stage_layers == [4, 4, 4]


def test_a_pipeline_with_several_spans_fills_in_turns_of_one_span() -> None:
    interleaved = model(ScheduleName.INTERLEAVED, spans=3)
    one, three = model(ScheduleName.ONE_FORWARD_ONE_BACKWARD, spans=1).cut(0, 4, 1), interleaved.cut(0, 4, 1)

    assert (len(one.spans), len(three.spans)) == (4, 12)
    assert interleaved.step_seconds(0, one, 1) == pytest.approx(9 * (8 + 3))
    assert interleaved.step_seconds(0, three, 1) == pytest.approx(9 * (8 + 3 / 3))
    assert interleaved.idle_share(0, three, 1) == pytest.approx(1 / 9)


def test_where_a_workers_spans_exceed_its_memory_each_worker_gets_one() -> None:
    roomy, tight = (model(ScheduleName.INTERLEAVED, worker_bytes=size) for size in (2400, 1700))

    assert roomy.cut(0, 4, 1).schedule is ScheduleName.INTERLEAVED
    cut = tight.cut(0, 4, 1)
    assert (cut.schedule, cut.owners) == (ScheduleName.ONE_FORWARD_ONE_BACKWARD, (0, 1, 2, 3))
    assert cut.why_schedule.startswith("Interleaved needs more memory than a worker has")
    assert tight.bytes_per_worker(0, cut, 1) <= 1700


def test_the_size_of_a_micro_batch_is_one_that_the_schedule_can_run() -> None:
    cut = model(ScheduleName.INTERLEAVED, micro_batch_size=None).cut(0, 4, 1)

    assert cut.schedule is ScheduleName.INTERLEAVED and not cut.why_schedule


@given(
    st.sampled_from([ScheduleName.INTERLEAVED, ScheduleName.ZERO_BUBBLE, ScheduleName.ZERO_BUBBLE_V]),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(0, 12),
    st.integers(1, 64),
)
def test_any_layout_gets_a_cut_of_the_whole_model(
    schedule: ScheduleName, stages: int, pipelines: int, boundary: int, size: int
) -> None:
    cut = model(schedule, micro_batch_size=size).cut(boundary, stages, pipelines)

    assert cut.stages == stages
    assert sorted(unit for units in cut.units_by_stage for unit in units) == list(range(14))
    assert cut.spans[0].start == 0 and all(before.stop == after.start for before, after in pairwise(cut.spans))
    assert all(layers for layers in cut.stage_layers)
    assert (cut.schedule is schedule) == (len(cut.spans) == 2 * stages) == (not cut.why_schedule)
