"""Decides what a regroup does: who takes which role, and which unit goes from whom to whom.

The leader reads what every participant holds and writes one plan; the others follow it, so nothing has to be computed
alike in several places. Pure: no store, no tensors.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from scipy.optimize import linear_sum_assignment

from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.partition import Cut, ModelCosts
from pipetransformer.state.control import Control

from .state_map import MapOf, StateMap, no_map, sources_of


class Origin(StrEnum):
    """Where the state of a new generation comes from."""

    FRESH = "Fresh"  #: initialised from the seed
    PEERS = "Peers"  #: what the participants hold in memory
    MIRROR = "Mirror"  #: what the participants mirrored of an earlier step
    CHECKPOINT = "Checkpoint"  #: the newest durable checkpoint


class _Message(BaseModel):
    """Control states may hold what is no number, such as a metric of nobody."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class Mirrored(_Message):
    """What one participant mirrored of a step: units that it held and units of its neighbour; `control` of then."""

    step: int
    units: list[int]
    control: dict[str, Any]


class Inventory(_Message):
    """What one participant brings.

    Attributes:
        units: indices of the units that it holds, complete, at `step`.
        step: steps that it has committed; -1 when it has never trained.
        pending: the lasting generation in which it got complete gradients of step `step`, which it has not committed;
            None for none.
        control: its `Control`, by field name.
        data: digest of the data that it sees.
        mirrors: what it has mirrored.
        frozen: units that it has read from a checkpoint of which they were a frozen part, and that checkpoint's step.
    """

    units: list[int]
    step: int
    pending: int | None = None
    control: dict[str, Any] = {}
    data: str = ""
    mirrors: list[Mirrored] = []
    frozen: dict[int, int] = {}


class Move(BaseModel):
    """Unit `unit` goes from rank `source` of the transfer group to rank `target`."""

    unit: int
    source: int
    target: int


class TransferPlan(_Message):
    """The leader's decision for one generation.

    Attributes:
        control: the state to go on from, as it is before a map; empty for `Fresh` and `Checkpoint`.
        checkpoint: what to load for `Checkpoint`: all load the same, whatever becomes durable meanwhile.
        kept_step: steps that the best model has been trained that the storage keeps, 0 for none; whatever was kept
            when the state to go on from was. Only where the storage was asked: others know.
        earlier_generations: the highest layout generation of earlier jobs, for `Fresh` and `Checkpoint`.
    """

    origin: Origin
    step: int
    control: dict[str, Any]
    roles: list[tuple[int, int]]
    spans: list[tuple[int, int]]
    micro_batch_size: int
    moves: list[Move]
    checkpoint: str = ""
    kept_step: int = 0
    earlier_generations: int = 0


@dataclass(frozen=True, slots=True)
class DurablePoint:
    """Where the newest durable checkpoint stands, and its name in the storage."""

    step: int
    boundary: int
    name: str = ""


@dataclass
class _Load:
    """Bytes that each rank sends already."""

    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def lightest(self, ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda rank: (self.sent[rank], rank))


def assign_roles(
    held: Sequence[set[int]], needed: Sequence[Collection[int]], pipelines: int, unit_bytes: Sequence[int]
) -> list[tuple[int, int]]:
    """(pipeline, stage) of each member, so that the fewest bytes have to move (an assignment problem).

    Args:
        held: units that each member holds, by rank.
        needed: units that each stage is made of.
        pipelines: number of pipelines.
        unit_bytes: weight of each unit on the wire.
    """
    roles = [(pipeline, stage) for pipeline in range(pipelines) for stage in range(len(needed))]
    missing = [
        [sum(unit_bytes[unit] for unit in needed[stage] if unit not in units) for _, stage in roles] for units in held
    ]
    # A tiny preference for rank order, so that a fresh start is in order.
    cost = np.array(missing, dtype=float)
    order = np.abs(np.subtract.outer(np.arange(len(held)), np.arange(len(roles))))
    ranks, columns = linear_sum_assignment(cost * 4 * len(held) ** 2 + order)
    chosen = dict(zip(ranks.tolist(), columns.tolist(), strict=True))
    return [roles[chosen[rank]] for rank in range(len(held))]


def plan_moves(held: Sequence[set[int]], wanted: Sequence[set[int]], unit_bytes: Sequence[int]) -> list[Move]:
    """A move for each unit that a rank wants and lacks, the sending spread over the holders.

    Args:
        held: units by rank of the transfer group.
        wanted: units that each member needs, by rank.
        unit_bytes: weight of each unit on the wire.

    Raises:
        LookupError: nobody holds a wanted unit.
    """
    load = _Load()
    moves = []
    for unit in range(len(unit_bytes)):
        holders = [rank for rank, units in enumerate(held) if unit in units]
        for rank, units in enumerate(wanted):
            if unit not in units or unit in held[rank]:
                continue
            if not holders:
                raise LookupError(f"nobody holds unit {unit}")
            source = load.lightest(holders)
            load.sent[source] += unit_bytes[unit]
            moves.append(Move(unit=unit, source=source, target=rank))
    return moves


def who_differs(inventories: Sequence[Inventory], num_members: int) -> list[int]:
    """Ranks of members that see other data than all who hold state, or than the first where nobody does. Who leaves and
    holds nothing needs none.

    Args:
        inventories: of members, then leavers.
        num_members: how many of them are members.
    """
    held = {inventory.data for inventory in inventories if inventory.units} or {inventories[0].data}
    return [rank for rank, inventory in enumerate(inventories) if rank < num_members and {inventory.data} != held]


def make_plan(
    inventories: Sequence[Inventory],
    num_members: int,
    cut_at: Callable[[int, ModelCosts | None], Cut],
    pipelines: int,
    num_units: int,
    unit_bytes: Callable[[int], Sequence[int]],
    *,
    durable: Callable[[], DurablePoint | None],
    map_of: MapOf = no_map,
) -> TransferPlan:
    """The plan for participants that bring `inventories`, in the transfer group's order.

    If anyone has committed a step then everyone has voted for it, and holds its complete gradients: those that have not
    committed it do so late (`TransferPlan.step`), so the step is done everywhere. Only gradients of the generation that
    committed it count: another one that did the same step has summed them in another order. If nobody has committed
    it, it is redone everywhere. When a unit is lost, everybody goes back to the newest state that is whole in memory,
    in mirrors or in a checkpoint, or to the start when there is none.

    Args:
        inventories: of members, then leavers.
        num_members: how many of them are members.
        cut_at: cuts the units into stages for a boundary, by measured costs if there are any.
        pipelines: data-parallel width.
        num_units: of the list that the participants hold.
        unit_bytes: weight of each unit on the wire at a boundary: frozen ones have no moments.
        durable: looks the newest checkpoint up, None for none; only asked when a unit is lost.
        map_of: whether another list of units is made of what the participants hold; `cut_at` then cuts that list.
    """
    recut = partial(_from_memory, num_members=num_members, cut_at=cut_at, pipelines=pipelines, unit_bytes=unit_bytes)
    found = next((each for each in _in_memory(inventories) if _whole(each.held, num_units)), None)
    state_map = map_of(Control.from_dict(found.control)) if found is not None and found.origin is Origin.PEERS else None
    if found is not None and found.origin is Origin.PEERS and found.step == max(bring.step for bring in inventories):
        return recut(found, [_still_frozen(bring, found.control) for bring in inventories], state_map=state_map)
    checkpoint = durable()
    if found is not None and (checkpoint is None or checkpoint.step <= found.step):
        return recut(found, [set[int]() for _ in inventories], state_map=state_map)
    boundary = 0 if checkpoint is None else checkpoint.boundary
    cut = cut_at(boundary, None)
    return TransferPlan(
        origin=Origin.FRESH if checkpoint is None else Origin.CHECKPOINT,
        step=0 if checkpoint is None else checkpoint.step,
        control={},
        roles=assign_roles([set()] * num_members, cut.spans, pipelines, unit_bytes(boundary)),
        spans=[(span.start, span.stop) for span in cut.spans],
        micro_batch_size=cut.micro_batch_size,
        moves=[],
        checkpoint="" if checkpoint is None else checkpoint.name,
    )


def _still_frozen(inventory: Inventory, control: dict[str, Any]) -> set[int]:
    """Units that a participant has read and that nobody has trained since."""
    frozen = range(first_trainable(int(control["boundary"])))
    return {unit for unit, step in inventory.frozen.items() if unit in frozen and step >= control.get("fell_step", 0)}


def _whole(held: Sequence[set[int]], num_units: int) -> bool:
    return set().union(*held) >= set(range(num_units))


@dataclass(frozen=True, slots=True)
class _InMemory:
    """A committed state of which participants hold units, by rank; maybe not all units."""

    origin: Origin
    step: int
    control: dict[str, Any]
    held: Sequence[set[int]]


def _in_memory(inventories: Sequence[Inventory]) -> Iterator[_InMemory]:
    """Newest first; what is held as it trains comes before mirrors of the same."""
    committed: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    mirrored: dict[tuple[int, int], dict[str, Any]] = {}
    for inventory in inventories:
        if inventory.step >= 0:
            committed[_point(inventory)].append(inventory.control)
        mirrored |= {_point(mirror): mirror.control for mirror in inventory.mirrors}
    for point in sorted({*committed, *mirrored}, reverse=True):
        if controls := committed.get(point):
            # One may have broken before it did what follows the step, and another not.
            control = max(controls, key=lambda one: (one.get("decided_step", -1), one.get("evaluated_step", 0)))
            held = [set(bring.units) if _has_done(bring, point) else set[int]() for bring in inventories]
            yield _InMemory(Origin.PEERS, point[0], control, held)
        if point in mirrored:
            held = [
                set().union(*(each.units for each in bring.mirrors if _point(each) == point)) for bring in inventories
            ]
            yield _InMemory(Origin.MIRROR, point[0], mirrored[point], held)


def _point(brought: Inventory | Mirrored) -> tuple[int, int]:
    """As `Control.point`."""
    return brought.step, int(brought.control.get("last_generation", 0))


def _has_done(inventory: Inventory, point: tuple[int, int]) -> bool:
    """Whether a participant has committed this, or can, late."""
    return point in (_point(inventory), (inventory.step + 1, inventory.pending))


def _from_memory(
    found: _InMemory,
    read: Sequence[set[int]],
    *,
    num_members: int,
    cut_at: Callable[[int, ModelCosts | None], Cut],
    pipelines: int,
    unit_bytes: Callable[[int], Sequence[int]],
    state_map: StateMap | None = None,
) -> TransferPlan:
    control, held = found.control, found.held
    before = Control.from_dict(control)
    after = before if state_map is None else state_map.control(before)
    costs = ModelCosts.model_validate(after.costs) if after.costs else None
    cut = cut_at(after.boundary, costs)
    needed = [set(span) if state_map is None else sources_of(span, state_map) for span in cut.spans]
    there = [units | more for units, more in zip(held, read, strict=True)]
    sizes = unit_bytes(before.boundary)
    roles = assign_roles(there[:num_members], needed, pipelines, sizes)
    wanted = [needed[stage] - read[rank] for rank, (_, stage) in enumerate(roles)]
    return TransferPlan(
        origin=found.origin,
        step=found.step,
        control=control,
        roles=roles,
        spans=[(span.start, span.stop) for span in cut.spans],
        micro_batch_size=cut.micro_batch_size,
        moves=plan_moves(held, wanted, sizes),
    )
