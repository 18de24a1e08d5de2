"""Plans a regroup: which worker takes which role, and which unit moves between which workers.

The leader makes the one plan from what every participant holds, and the others follow it. Pure: no store, no tensors.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict
from scipy.optimize import linear_sum_assignment

from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.partition import Cut
from pipetransformer.state.control import Control

from .state_map import StateMap, sources_of


class Origin(StrEnum):
    """Where the state of a new generation comes from."""

    FRESH = "Fresh"  #: initialised from the seed
    PEERS = "Peers"  #: what the participants hold in memory
    MIRROR = "Mirror"  #: what the participants mirrored of an earlier step
    CHECKPOINT = "Checkpoint"  #: the newest durable checkpoint


class _Message(BaseModel):
    """Control states may hold NaN or infinity, such as a metric over no samples."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class Mirrored(_Message):
    """A participant's mirror of a step: units that it held, units of its neighbour, and the control state."""

    step: int
    units: list[int]
    control: dict[str, Any]


class Inventory(_Message):
    """What one participant holds.

    Attributes:
        units: indices of the complete units that it holds, at `step`.
        copies: further units that it holds, frozen at its boundary.
        step: committed steps; -1 if it has never trained.
        pending: the lasting generation that gave it complete gradients of step `step`, which it has not committed; None
            if there is no such step.
        pending_steps: number of such steps, from `step` on.
        control: its `Control`, by field name.
        data: digest of the data that it sees.
        mirrors: its mirrors.
        in_doubt: the smaller or larger model that it made in a level change whose vote broke; other workers may have
            committed it.
        frozen: units that it has read from a checkpoint in which they were frozen, with the checkpoint's step.
    """

    units: list[int]
    copies: list[int] = []
    step: int
    pending: int | None = None
    pending_steps: int = 1
    control: dict[str, Any] = {}
    data: str = ""
    mirrors: list[Mirrored] = []
    in_doubt: Mirrored | None = None
    frozen: dict[int, int] = {}


class Move(BaseModel):
    """Unit `unit` moves from rank `source` of the transfer group to rank `target`."""

    unit: int
    source: int
    target: int


class TransferPlan(_Message):
    """The leader's decision for one generation.

    Attributes:
        origin: where the state comes from.
        step: committed steps of that state.
        visit: which visit of the job's levels that state belongs to, before any map.
        control: the control state to resume from, before any map; empty for `Fresh` and `Checkpoint`.
        roles: (pipeline, stage) of each member.
        cut: the spans of the model, who owns them, and how they run.
        moves: units that move.
        checkpoint: name of the checkpoint to load for `Checkpoint`. All load the same one, even if a newer one becomes
            durable meanwhile.
        kept_step: step of the best model that the storage keeps now, 0 for none. Set only if the storage was asked;
            otherwise the workers know it.
        earlier_generations: the highest layout generation of earlier jobs, for `Fresh` and `Checkpoint`.
        cached_layers: `Control.cached_layers` of the state, which no checkpoint contains.
        costs: `Control.costs`, for `Fresh` and `Checkpoint`.
    """

    origin: Origin
    step: int
    visit: int = 0
    control: dict[str, Any]
    roles: list[tuple[int, int]]
    cut: Cut
    moves: list[Move]
    checkpoint: str = ""
    kept_step: int = 0
    earlier_generations: int = 0
    cached_layers: int = 0
    costs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class DurablePoint:
    """Step and boundary of the newest durable checkpoint, its name in the storage, and its visit of a level."""

    step: int
    boundary: int
    name: str = ""
    visit: int = 0


class PlanSources(Protocol):
    """What the leader looks up while it plans."""

    def cut(self, control: Control) -> Cut:
        """Cut the units into stages for a boundary and a visit, by measured costs where there are some."""
        ...

    def unit_bytes(self, control: Control) -> Sequence[int]:
        """Bytes of each unit on the wire at a boundary, in a visit: frozen units have no moments."""
        ...

    def durable(self) -> DurablePoint | None:
        """Return the newest checkpoint in the storage, or None. Asked only when a unit is lost."""
        ...

    def map_of(self, control: Control) -> StateMap | None:
        """Return the map to another list of units, which `cut` then cuts, or None if the units stay the same."""
        ...


@dataclass
class _Load:
    """Bytes that each rank is to send so far."""

    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def lightest(self, ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda rank: (self.sent[rank], rank))


def assign_roles(
    held: Sequence[set[int]], needed: Sequence[Collection[int]], pipelines: int, unit_bytes: Sequence[int]
) -> list[tuple[int, int]]:
    """Give each member a (pipeline, stage) so that the fewest bytes move (an assignment problem).

    Args:
        held: units that each member holds, by rank.
        needed: units that each stage is made of.
        pipelines: number of pipelines.
        unit_bytes: bytes of each unit on the wire.
    """
    roles = [(pipeline, stage) for pipeline in range(pipelines) for stage in range(len(needed))]
    missing = [
        [sum(unit_bytes[unit] for unit in needed[stage] if unit not in units) for _, stage in roles] for units in held
    ]
    # A tiny preference for rank order puts the workers of a fresh start in order.
    cost = np.array(missing, dtype=float)
    order = np.abs(np.subtract.outer(np.arange(len(held)), np.arange(len(roles))))
    ranks, columns = linear_sum_assignment(cost * 4 * len(held) ** 2 + order)
    chosen = dict(zip(ranks.tolist(), columns.tolist(), strict=True))
    return [roles[chosen[rank]] for rank in range(len(held))]


def plan_moves(held: Sequence[set[int]], wanted: Sequence[set[int]], unit_bytes: Sequence[int]) -> list[Move]:
    """Plan a move for each unit that a rank wants and lacks, and spread the sending over the holders.

    Args:
        held: units by rank of the transfer group.
        wanted: units that each member needs, by rank.
        unit_bytes: bytes of each unit on the wire.

    Raises:
        LookupError: no rank holds a wanted unit.
    """
    load = _Load()
    moves = []
    for unit in range(len(unit_bytes)):
        holders = [rank for rank, units in enumerate(held) if unit in units]
        for rank, units in enumerate(wanted):
            if unit not in units or unit in held[rank]:
                continue
            if not holders:
                raise LookupError(f"no worker holds unit {unit}")
            source = load.lightest(holders)
            load.sent[source] += unit_bytes[unit]
            moves.append(Move(unit=unit, source=source, target=rank))
    return moves


def who_differs(inventories: Sequence[Inventory], num_members: int) -> list[int]:
    """Return the ranks of members whose data differ from the data of the workers that hold state. If none holds state,
    compare with the first worker. Leavers are not compared.

    Args:
        inventories: of members, then leavers.
        num_members: number of members among them.
    """
    held = {inventory.data for inventory in inventories if inventory.units} or {inventories[0].data}
    return [rank for rank, inventory in enumerate(inventories) if rank < num_members and {inventory.data} != held]


def make_plan(
    inventories: Sequence[Inventory],
    sources: PlanSources,
    *,
    num_members: int,
    pipelines: int,
) -> TransferPlan:
    """Plan for participants with these `inventories`, in the order of the transfer group.

    If one worker has committed a step, all have voted for it and hold its complete gradients. The others then commit it
    late (`TransferPlan.step`). Only gradients of the generation that committed the step count, because another
    generation sums them in another order. If no worker has committed the step, all redo it. If a unit is lost, all
    return to the newest state that is whole in memory, in mirrors or in a checkpoint, or to the start.

    Args:
        inventories: of members, then leavers.
        sources: looked up for cuts, sizes and checkpoints.
        num_members: number of members among the participants.
        pipelines: data-parallel width.
    """
    recut = partial(_from_memory, sources=sources, num_members=num_members, pipelines=pipelines)
    found = next((each for each in _in_memory(inventories) if _whole(each, sources)), None)
    state_map = (
        sources.map_of(Control.from_dict(found.control)) if found is not None and found.origin is Origin.PEERS else None
    )
    if found is not None and found.origin is Origin.PEERS and found.step == max(bring.step for bring in inventories):
        return recut(found, [_still_frozen(bring, found.control) for bring in inventories], state_map=state_map)
    checkpoint = sources.durable()
    workers = [Control.from_dict(bring.control) for bring in inventories]
    if found is not None and (checkpoint is None or checkpoint.step <= found.step):
        control = Control.from_dict(found.control)
        control.return_with(workers)
        found = replace(found, control=control.to_dict())
        return recut(found, [set[int]() for _ in inventories], state_map=state_map)
    durable = checkpoint or DurablePoint(0, 0)
    start = Control(step=durable.step, boundary=durable.boundary, visit=durable.visit)
    start.return_with(workers)
    cut = sources.cut(start)
    needed = [cut.held_by(stage) for stage in range(cut.stages)]
    return TransferPlan(
        origin=Origin.FRESH if checkpoint is None else Origin.CHECKPOINT,
        step=start.step,
        visit=start.visit,
        control={},
        roles=assign_roles([set()] * num_members, needed, pipelines, sources.unit_bytes(start)),
        cut=cut,
        moves=[],
        checkpoint=durable.name,
        cached_layers=start.cached_layers,
        costs=start.costs,
    )


def _still_frozen(inventory: Inventory, control: dict[str, Any]) -> set[int]:
    """Return the units that a participant has read and that have stayed frozen since."""
    frozen = range(first_trainable(int(control["boundary"])))
    return {unit for unit, step in inventory.frozen.items() if unit in frozen and step >= control.get("fell_step", 0)}


def _whole(found: "_InMemory", sources: PlanSources) -> bool:
    """Whether the participants together hold all units."""
    num_units = len(sources.unit_bytes(Control.from_dict(found.control)))
    return set().union(*found.held) >= set(range(num_units))


@dataclass(frozen=True, slots=True)
class _InMemory:
    """A committed state; the participants hold some or all of its units (`held`, by rank)."""

    origin: Origin
    step: int
    control: dict[str, Any]
    held: Sequence[set[int]]


def _in_memory(inventories: Sequence[Inventory]) -> Iterator[_InMemory]:
    """Yield the committed states, newest first; the units that train come before mirrors of the same state."""
    committed: dict[_Point, list[dict[str, Any]]] = defaultdict(list)
    mirrored: dict[_Point, dict[str, Any]] = {}
    for inventory in inventories:
        if inventory.step >= 0:
            committed[_point(inventory)].append(inventory.control)
        if inventory.in_doubt is not None:
            committed[_point(inventory.in_doubt)].append(inventory.in_doubt.control)
        mirrored |= {_point(mirror): mirror.control for mirror in inventory.mirrors}
    for point in sorted({*committed, *mirrored}, reverse=True):
        if controls := committed.get(point):
            # One participant may have broken before it finished what follows the step, and another after.
            control = max(controls, key=_how_far)
            held = [_held(bring, control, point) for bring in inventories]
            yield _InMemory(Origin.PEERS, point[0], control, held)
        if point in mirrored:
            held = [
                set().union(*(each.units for each in bring.mirrors if _point(each) == point)) for bring in inventories
            ]
            yield _InMemory(Origin.MIRROR, point[0], mirrored[point], held)


def _how_far(control: dict[str, Any]) -> tuple[int, int, bool]:
    """Order control states of one point by what their participants have done after the step."""
    return control.get("decided_step", -1), control.get("evaluated_step", 0), control.get("visit_done", False)


def _held(inventory: Inventory, control: dict[str, Any], point: "_Point") -> set[int]:
    """Return the units of a state that a participant can give. It drops copies as soon as it hears of another
    boundary."""
    if not _has_done(inventory, point):
        doubted = inventory.in_doubt
        return set(doubted.units) if doubted is not None and _point(doubted) == point else set()
    same = inventory.control.get("boundary") == control.get("boundary")
    return {*inventory.units, *(inventory.copies if same else ())}


#: `Control.point`.
_Point = tuple[int, int, int]


def _point(brought: Inventory | Mirrored) -> _Point:
    control = brought.control
    return brought.step, int(control.get("last_generation", 0)), int(control.get("visit", 0))


def _has_done(inventory: Inventory, point: _Point) -> bool:
    """Whether a participant has committed this state, or can commit it late."""
    step, _, visit = _point(inventory)
    return point in (_point(inventory), (step + inventory.pending_steps, inventory.pending, visit))


def _from_memory(
    found: _InMemory,
    read: Sequence[set[int]],
    *,
    sources: PlanSources,
    num_members: int,
    pipelines: int,
    state_map: StateMap | None,
) -> TransferPlan:
    control, held = found.control, found.held
    before = Control.from_dict(control)
    after = before if state_map is None else state_map.control(before)
    cut = sources.cut(after)
    wanted_units = [cut.held_by(stage) for stage in range(cut.stages)]
    needed = [set(units) if state_map is None else sources_of(units, state_map) for units in wanted_units]
    there = [units | more for units, more in zip(held, read, strict=True)]
    sizes = sources.unit_bytes(before)
    roles = assign_roles(there[:num_members], needed, pipelines, sizes)
    wanted = [needed[stage] - read[rank] for rank, (_, stage) in enumerate(roles)]
    return TransferPlan(
        origin=found.origin,
        step=found.step,
        visit=before.visit,
        control=control,
        roles=roles,
        cut=cut,
        moves=plan_moves(held, wanted, sizes),
        cached_layers=after.cached_layers,
    )
