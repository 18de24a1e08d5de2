"""The leader's plan of a regroup: which state counts, who takes which role, which unit comes from whom."""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipetransformer.elastic.regroup.agreement import _compare_weights
from pipetransformer.elastic.regroup.assemble import units_of
from pipetransformer.elastic.regroup.transaction import _catch_up
from pipetransformer.elastic.regroup.transfer_plan import (
    DurablePoint,
    Inventory,
    Origin,
    OtherState,
    TransferPlan,
    assign_roles,
    differing_members,
    make_plan,
    plan_moves,
)
from pipetransformer.errors import SpecError
from pipetransformer.partition import Cut
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState

NUM_UNITS = 8
UNIT_BYTES = [1, 4, 4, 4, 4, 4, 4, 2]


def unit_bytes(boundary: int) -> list[int]:
    """What is frozen has no moments: a third is left."""
    return [1 if boundary and unit <= boundary else 3 for unit in range(NUM_UNITS)]


def cut(stages: int) -> list[range]:
    """Units in equal parts."""
    edges = [stage * NUM_UNITS // stages for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


@dataclass
class Sources:
    """Cuts as it is told; the storage has one checkpoint or none."""

    spans: list[range]
    checkpoint: DurablePoint | None = None
    owners: tuple[int, ...] = ()

    def cut(self, control: Control) -> Cut:
        return Cut(self.spans, 1, self.owners)

    def unit_bytes(self, control: Control) -> list[int]:
        return unit_bytes(control.boundary)

    def durable(self) -> DurablePoint | None:
        return self.checkpoint

    def map_of(self, control: Control) -> None:
        """Units stay what they are."""


def bring(
    units: range | list[int], step: int, *, pending: int | None = None, generation: int = 1, boundary: int = 0
) -> Inventory:
    control = {"step": step, "last_generation": generation, "boundary": boundary}
    return Inventory(units=list(units), step=step, pending=pending, control=control)


def plan_for(
    inventories: list[Inventory], stages: int, pipelines: int, durable: DurablePoint | None = None
) -> TransferPlan:
    return make_plan(
        inventories, Sources(cut(stages), durable), num_members=stages * pipelines, pipelines=pipelines
    )  # fmt: skip


def test_a_job_that_nobody_has_trained_starts_fresh() -> None:
    plan = plan_for([bring([], -1)] * 4, 4, 1)

    assert plan.origin is Origin.FRESH
    assert plan.roles == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert not plan.moves


def test_a_job_that_nobody_has_in_memory_starts_from_its_checkpoint() -> None:
    plan = plan_for([bring([], -1)] * 2, 2, 1, DurablePoint(step=40, boundary=3, name="step-40-g2"))

    assert (plan.origin, plan.step, plan.checkpoint) == (Origin.CHECKPOINT, 40, "step-40-g2")


def test_a_step_that_one_has_committed_is_committed_by_all() -> None:
    quick, slow = bring(range(4), 8), bring(range(4, 8), 7, pending=1)

    plan = plan_for([slow, quick], 2, 1)

    assert (plan.origin, plan.step, plan.control["step"]) == (Origin.PEERS, 8, 8)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "further",
    [{"decided_step": 8}, {"evaluated_step": 8}, {"visit_done": True}],
    ids=["decided", "evaluated", "ended-a-visit"],
)
def test_a_decision_is_not_lost_with_a_worker_that_broke_before_it(further: dict[str, int], place: int) -> None:
    inventories = [bring(span, 8) for span in cut(3)]
    for number, inventory in enumerate(inventories):
        inventory.control |= {"decided_step": 7, "evaluated_step": 4, "boundary": number}
    inventories[place].control |= further

    plan = plan_for(inventories, 3, 1)

    assert plan.control == inventories[place].control


def test_what_is_no_number_travels_in_the_control_state() -> None:
    control = Control(best={"accuracy": 0.9, "f1": float("nan")}, policy={"best": float("inf")}).to_dict()
    inventory = Inventory(units=[], step=0, control=control, mirrors=[OtherState(step=0, units=[], control=control)])
    inventory = Inventory.model_validate_json(inventory.model_dump_json())

    for arrived in (inventory.control, inventory.mirrors[0].control):
        assert math.isnan(arrived["best"]["f1"]) and arrived["policy"] == {"best": float("inf")}
    plan = plan_for([bring(range(NUM_UNITS), 0)], 1, 1).model_copy(update={"control": control})
    assert math.isnan(TransferPlan.model_validate_json(plan.model_dump_json()).control["best"]["f1"])


def test_the_storage_is_asked_for_a_checkpoint_only_when_a_unit_is_lost() -> None:
    class Unasked(Sources):
        def durable(self) -> DurablePoint:
            raise AssertionError

    whole = [bring(range(4), 8), bring(range(4, 8), 8)]
    make_plan(whole, Unasked(cut(2)), num_members=2, pipelines=1)

    with pytest.raises(AssertionError):
        make_plan(whole[:1], Unasked(cut(1)), num_members=1, pipelines=1)


def test_a_step_that_nobody_has_committed_is_redone() -> None:
    plan = plan_for([bring(range(4), 7, pending=1), bring(range(4, 8), 7)], 2, 1)

    assert (plan.origin, plan.step) == (Origin.PEERS, 7)


def test_what_is_behind_and_has_no_pending_step_does_not_count() -> None:
    plan = plan_for([bring(range(4), 8), bring(range(4, 8), 7)], 2, 1, DurablePoint(5, 0))

    assert (plan.origin, plan.step) == (Origin.CHECKPOINT, 5)


@pytest.mark.parametrize("origin", [Origin.PEERS, Origin.CHECKPOINT])
def test_a_worker_with_gradients_of_another_generation_is_sent_the_step(origin: Origin) -> None:
    """Worker 0 has redone step 5 alone in generation 2; what worker 1 holds of step 5 was summed in generation 1."""
    alone = bring(range(NUM_UNITS if origin is Origin.PEERS else 4), 6, generation=2)
    left = bring(range(NUM_UNITS) if origin is Origin.PEERS else range(4, 8), 5, pending=1)

    plan = plan_for([alone, left], 1, 2, DurablePoint(step=6, boundary=0))

    assert (plan.origin, plan.step) == (origin, 6)
    moved = [(move.unit, move.source, move.target) for move in plan.moves]
    assert moved == ([(unit, 0, 1) for unit in range(NUM_UNITS)] if origin is Origin.PEERS else [])


def test_what_two_generations_made_of_a_step_is_not_mixed() -> None:
    both = [bring(range(4), 6, generation=1), bring(range(4, 8), 6, generation=2)]
    assert plan_for(both, 2, 1, DurablePoint(step=3, boundary=0)).origin is Origin.CHECKPOINT

    plan = plan_for([*both, bring(range(4), 5, generation=1, pending=2)], 1, 3)

    assert (plan.origin, plan.control["last_generation"]) == (Origin.PEERS, 2)
    assert {move.source for move in plan.moves if move.unit < 4} == {2}


@pytest.mark.parametrize(
    ("durable", "origin", "step"),
    [(None, Origin.PEERS, 5), (5, Origin.PEERS, 5), (6, Origin.CHECKPOINT, 6)],
)
def test_a_step_is_redone_where_only_its_start_is_whole_in_memory(
    durable: int | None, origin: Origin, step: int
) -> None:
    """One that was away has committed step 5 in generation 1; the others have redone it in generation 2, in part."""
    away = bring(range(4, 8), 6, generation=1)
    others = [bring(units, 5, generation=1, pending=2) for units in (range(4), range(4, 8), range(4))]

    plan = plan_for([*others, away], 2, 2, None if durable is None else DurablePoint(durable, 0))

    assert (plan.origin, plan.step) == (origin, step)
    assert all(move.source < 3 for move in plan.moves)


@pytest.mark.parametrize(
    ("step", "generation", "pending", "steps", "late"),
    [
        (7, 1, 2, 1, True),
        (4, 1, 2, 4, True),
        (7, 1, None, 1, False),
        (7, 1, 1, 1, False),
        (6, 1, 2, 1, False),
        (7, 1, 2, 4, False),
        (8, 2, None, 1, False),
        (8, 1, None, 1, False),
    ],
    ids=[
        "has-voted",
        "has-voted-for-four-steps",
        "never-voted",
        "voted-in-another",
        "two-behind",
        "voted-for-a-longer-round",
        "not-behind",
        "did-it-in-another",
    ],
)
def test_only_a_worker_that_holds_its_gradients_commits_a_step_late(
    step: int, generation: int, pending: int | None, steps: int, late: bool
) -> None:
    control = Control(step=step, last_generation=generation)
    own = WorkerState(1, control=control, units={0: nn.Identity()})
    joined = own.joined(WorkerState(1, control=replace(control), units={1: nn.Identity()}))
    others = Control(step=8, last_generation=2, decided_step=8, boundary=1)
    unsettled = mock.Mock(pending=pending, pending_steps=steps)

    held = _catch_up(own, joined, others, unsettled)

    assert unsettled.commit_late.mock_calls == ([mock.call(own, others)] if late else [])
    assert held is (own if late else joined), "units in doubt lack the steps that are committed late"
    level = (step, generation) == (8, 2)
    assert held.control.boundary == (1 if level else 0), "a worker that is level takes over what was decided"


def test_units_in_doubt_are_not_sent_as_those_of_a_step_that_is_committed_late() -> None:
    """They are of the step before, because this worker has no gradients of them."""
    quick = bring(range(4), 8)
    slow = bring(range(2, 8), 7, pending=1).model_copy(update={"only_in_doubt": [2, 3]})

    plan = plan_for([slow, quick], 1, 2)

    assert plan.step == 8
    assert {move.unit for move in plan.moves if move.target == 0} == set(range(4))


def test_units_in_doubt_count_if_nobody_committed_the_pending_step() -> None:
    slow = bring(range(2, 8), 7, pending=1).model_copy(update={"only_in_doubt": [2, 3]})

    plan = plan_for([slow, bring(range(2), 7, pending=1)], 1, 2)

    assert plan.step == 7
    assert {move.unit for move in plan.moves if move.target == 1} == set(range(2, 8))


def mirror(inventory: Inventory, units: range, step: int, boundary: int = 0, generation: int = 1) -> Inventory:
    control = {"step": step, "last_generation": generation, "boundary": boundary}
    mirrored = OtherState(step=step, units=list(units), control=control)
    return inventory.model_copy(update={"mirrors": [*inventory.mirrors, mirrored]})


def test_a_lost_stage_returns_to_the_newest_step_that_mirrors_hold_whole() -> None:
    survivors = [
        mirror(mirror(bring(range(2), 9), range(4), 6, boundary=1), range(2), 8),
        mirror(bring(range(4, 8), 9), range(4, 8), 6, boundary=1),
    ]

    plan = plan_for(survivors, 1, 2, DurablePoint(5, 0))

    assert (plan.origin, plan.step, plan.control["boundary"]) == (Origin.MIRROR, 6, 1)
    assert {(move.unit, move.source, move.target) for move in plan.moves} == {
        (unit, int(unit >= 4), int(unit < 4)) for unit in range(NUM_UNITS)
    }


def test_mirrors_that_two_generations_took_of_a_step_are_not_mixed() -> None:
    old = mirror(mirror(bring([], 8), range(4), 5), range(4), 6, generation=1)
    new = mirror(mirror(bring([], 8), range(4, 8), 5), range(4, 8), 6, generation=2)

    assert (plan_for([old, new], 2, 1).origin, plan_for([old, new], 2, 1).step) == (Origin.MIRROR, 5)


def away(inventory: Inventory, layers: int, **costs: Any) -> Inventory:
    """The same, with so many layers off the device, and costs."""
    control = inventory.control | {"cached_layers": layers, "costs": costs or None}
    return inventory.model_copy(update={"control": control})


def test_layers_that_are_off_the_device_stay_off_in_a_return_to_a_checkpoint() -> None:
    """The layout was chosen without these layers, so it may not fit with them."""
    survivor = away(bring(range(2, 4), 9, boundary=5), 4, boundary=5)
    joiner = bring([], -1)

    plan = plan_for([joiner, survivor], 2, 1, DurablePoint(step=6, boundary=3))

    assert (plan.origin, plan.cached_layers, plan.costs) == (Origin.CHECKPOINT, 3, {"boundary": 5})
    plan = plan_for([joiner, survivor], 2, 1, DurablePoint(step=6, boundary=5))
    assert plan.cached_layers == 4
    assert plan_for([joiner, joiner], 2, 1, DurablePoint(step=6, boundary=5)).cached_layers == 0


def test_costs_of_another_level_are_not_those_of_the_checkpoint() -> None:
    survivor = away(bring(range(2, 4), 9), 0, boundary=0)
    plan = plan_for([survivor], 1, 1, DurablePoint(step=6, boundary=0, visit=1))
    assert plan.costs is None


def test_layers_that_are_off_the_device_stay_off_in_a_return_to_a_mirror() -> None:
    survivor = away(bring(range(4), 9, boundary=5), 5, boundary=5)
    plan = plan_for([mirror(survivor, range(8), 6, boundary=5)], 1, 1)

    control = Control.from_dict(plan.control)
    assert (plan.origin, control.step, control.cached_layers) == (Origin.MIRROR, 6, 5)
    assert control.costs == {"boundary": 5}


def test_a_pause_begins_at_the_end_of_the_last_round_wherever_the_workers_return_to() -> None:
    """Training that is redone is no part of it."""
    survivors = [mirror(bring(range(4), 9), range(8), 6), bring(range(4), 9), bring([], -1)]
    for inventory, ended in zip(survivors, (90.0, 91.0, 0.0), strict=True):
        inventory.control["round_ended_at"] = ended
    survivors[0].mirrors[0].control["round_ended_at"] = 60.0

    assert plan_for(survivors, 1, 3).control["round_ended_at"] == 91.0
    plan = plan_for(survivors, 1, 3, DurablePoint(8, 0))
    assert (plan.origin, plan.round_ended_at) == (Origin.CHECKPOINT, 91.0)
    assert plan_for([bring(range(4), 9)], 1, 1).round_ended_at == 0.0, "as its control state says"


def test_a_checkpoint_that_is_newer_than_the_mirrors_counts() -> None:
    survivors = [mirror(bring(range(4), 9), range(8), 6)]

    plan = plan_for(survivors, 1, 1, DurablePoint(8, 0))

    assert (plan.origin, plan.step) == (Origin.CHECKPOINT, 8)


INTERLEAVED = Sources(cut(4), owners=(0, 1, 0, 1))


def test_a_worker_gets_all_spans_of_its_stage_and_keeps_what_it_holds_of_them() -> None:
    """One worker becomes two with two spans each: the second gets units 2, 3, 6 and 7."""
    inventories = [bring(range(NUM_UNITS), 8), bring([], -1)]

    plan = make_plan(inventories, INTERLEAVED, num_members=2, pipelines=1)

    assert plan.roles == [(0, 0), (0, 1)]
    assert [(move.unit, move.source, move.target) for move in plan.moves] == [(unit, 0, 1) for unit in (2, 3, 6, 7)]
    assert [units_of(plan, rank) for rank in range(3)] == [[0, 1, 4, 5], [2, 3, 6, 7], []]
    assert TransferPlan.model_validate_json(plan.model_dump_json()) == plan


def test_spans_of_several_workers_become_one_stage_again() -> None:
    inventories = [bring([2, 3, 6, 7], 8), bring([0, 1, 4, 5], 8)]

    plan = plan_for(inventories, 1, 1)
    assert [(move.unit, move.source) for move in plan.moves] == [(unit, 1) for unit in (0, 1, 4, 5)]

    plan = make_plan(inventories, INTERLEAVED, num_members=2, pipelines=1)
    assert plan.roles == [(0, 1), (0, 0)] and not plan.moves, "who holds the units of a stage takes its role"


def test_a_leaver_gives_what_only_it_holds() -> None:
    plan = plan_for([bring(range(4, 8), 8), bring(range(4), 8)], 1, 1)

    assert {(move.unit, move.source, move.target) for move in plan.moves} == {(unit, 1, 0) for unit in range(4)}


def joiner_that_read(units: range, fell_step: int = 0) -> Inventory:
    """It read a checkpoint with this `Control.fell_step`."""
    return bring([], -1).model_copy(update={"read_ahead": dict.fromkeys(units, fell_step)})


def test_frozen_units_that_a_joiner_has_read_need_not_move() -> None:
    plan = plan_for([bring(range(NUM_UNITS), 8, boundary=3), joiner_that_read(range(4))], 1, 2)

    assert [move.unit for move in plan.moves] == [4, 5, 6, 7]


def test_what_is_no_longer_frozen_or_was_not_all_the_time_moves() -> None:
    thawed = bring(range(NUM_UNITS), 8, boundary=3)
    thawed.control["fell_step"] = 6

    plan = plan_for([thawed, joiner_that_read(range(4))], 1, 2)
    assert len(plan.moves) == NUM_UNITS

    plan = plan_for([thawed, joiner_that_read(range(4), 6)], 1, 2)
    assert [move.unit for move in plan.moves] == [4, 5, 6, 7], "they were read after the fall"

    plan = plan_for([bring(range(NUM_UNITS), 8, boundary=1), joiner_that_read(range(4))], 1, 2)
    assert [move.unit for move in plan.moves] == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("boundary", "moved"), [(3, range(4, 8)), (2, range(8))])
def test_copies_of_frozen_units_count_once_their_holder_knows_the_boundary(boundary: int, moved: range) -> None:
    """A worker that broke before the decision takes it over first, and may drop copies then."""
    first, second = bring(range(4), 8, boundary=3), bring(range(4, 8), 8, boundary=boundary)
    first.control["decided_step"] = 8
    second = second.model_copy(update={"copies": [0, 1, 2, 3]})

    plan = plan_for([first, second], 1, 2)

    assert sorted(move.unit for move in plan.moves) == [*moved]


def test_a_joiner_gets_the_stage_whose_frozen_units_it_has_read() -> None:
    plan = plan_for([bring(range(4, NUM_UNITS), 8, boundary=3), joiner_that_read(range(4)), bring(range(4), 8)], 2, 1)

    assert plan.roles == [(0, 1), (0, 0)]
    assert not plan.moves

    leaver = bring(range(NUM_UNITS), 8, boundary=3)
    plan = plan_for([bring([], -1), joiner_that_read(range(4)), leaver], 2, 1)

    assert plan.roles == [(0, 1), (0, 0)]
    assert [(move.unit, move.target) for move in plan.moves] == [(unit, 0) for unit in range(4, 8)]


@pytest.mark.parametrize(
    ("holders", "joiners", "leaver", "differing"),
    [
        ("aa", "a", "a", []),
        ("aa", "ab", "a", [3]),
        ("aa", "a", "b", []),
        ("ab", "a", "", [0, 1, 2]),
        ("", "aab", "", [2]),
    ],
    ids=["alike", "a-joiner", "who-leaves-again", "holders", "before-the-start"],
)
def test_who_sees_other_data_than_those_who_hold_state_is_named(
    holders: str, joiners: str, leaver: str, differing: list[int]
) -> None:
    inventories = [
        *(bring([0], 8).model_copy(update={"data": data}) for data in holders),
        *(bring([], -1).model_copy(update={"data": data}) for data in joiners + leaver),
    ]

    assert differing_members(inventories, len(holders + joiners)) == differing


def test_sending_is_spread_over_the_holders() -> None:
    moves = plan_moves([{0, 1}, {0, 1}, set(), set()], [set(), set(), {0, 1}, {0, 1}], [4, 4])

    assert sorted(move.source for move in moves) == [0, 0, 1, 1]

    moves = plan_moves([{0, 1, 2}, {0, 1, 2}, set()], [set(), set(), {0, 1, 2}], [8, 4, 4])

    assert [move.source for move in moves] == [0, 1, 1], "by bytes"


def test_a_unit_that_nobody_holds_is_refused() -> None:
    with pytest.raises(LookupError, match="unit 1"):
        plan_moves([{0}], [{0, 1}], [4, 4])


def test_frozen_units_weigh_what_is_left_of_them() -> None:
    """Two stages become three as five blocks freeze: two that train outweigh three that do not."""
    spans = [range(3), range(3, 6), range(6, 8)]
    held = [bring(range(4), 8, boundary=5), bring(range(4, 8), 8, boundary=5), bring([], -1)]

    plan = make_plan(held, Sources(spans), num_members=3, pipelines=1)

    assert plan.roles == [(0, 0), (0, 2), (0, 1)]
    assert sum(unit_bytes(5)[move.unit] for move in plan.moves) == 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, NUM_UNITS - 1)), min_size=4, max_size=4),
    st.sampled_from([(4, 1), (2, 2), (1, 4)]),
    st.integers(1, 2),
)
def test_no_other_roles_would_move_fewer_bytes(
    held: list[set[int]], layout: tuple[int, int], spans_per_worker: int
) -> None:
    stages, pipelines = layout
    needed = Cut(cut(stages * spans_per_worker), 1, (*range(stages),) * spans_per_worker).units_by_stage

    def missing(roles: list[tuple[int, int]]) -> int:
        wanted = [set(needed[stage]) for _, stage in roles]
        lacked = [unit for units, needs in zip(held, wanted, strict=True) for unit in needs - units]
        return sum(UNIT_BYTES[unit] for unit in lacked)

    roles = assign_roles(held, needed, pipelines, UNIT_BYTES)

    everything = [(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages)]
    assert sorted(roles) == everything
    assert missing(roles) == min(missing(list(other)) for other in permutations(everything))


@pytest.mark.parametrize(("sums", "differ"), [([1.0, 2.0, 3.0 + 1e-7], False), ([1.0, 2.1, 3.0], True)])
def test_programs_that_build_other_weights_on_each_worker_are_refused(sums: list[float], differ: bool) -> None:
    """Other processors may round otherwise."""
    workers = [Inventory(units=[], step=-1, first_sums=each) for each in ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], sums)]
    with pytest.raises(SpecError, match=r"spec\.model: .*with other weights") if differ else nullcontext():
        _compare_weights(workers)
