"""A worker's state in its new role, as a regroup's plan says: of what peers hold, or have mirrored.

What is made is new, but for units that stay; nothing that the worker holds is changed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.read_ahead import ReadUnit
from pipetransformer.state.worker_state import WorkerState

from .mirrors import Mirrors
from .state_map import StateMap, sources_of
from .transfer import Parts, move_units
from .transfer_plan import Origin, TransferPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSources:
    """Where units come from.

    Attributes:
        codec: of the present units.
        shells: every unit, for shapes only.
        mirrors: what this worker mirrored.
        read_ahead: frozen units that it has read from storage.
        build_units: the units of these indices as training starts from them, on the CPU.
        blank_unit: a unit by index, whose tensors are to be replaced.
        load_control: the control state of a checkpoint, by its name.
        load_unit: a unit's tensors from that checkpoint.
    """

    codec: UnitCodec
    shells: Sequence[nn.Module]
    mirrors: Mirrors
    read_ahead: Mapping[int, ReadUnit]
    build_units: Callable[[Collection[int]], dict[int, nn.Module]]
    blank_unit: Callable[[int], nn.Module]
    load_control: Callable[[str], Control]
    load_unit: Callable[[int], dict[str, Tensor]]


def units_of(plan: TransferPlan, rank: int) -> range:
    """What a rank of the transfer group holds in its new role; nothing for a leaver."""
    return range(*plan.spans[plan.roles[rank][1]]) if rank < len(plan.roles) else range(0)


def put_unit(
    sources: StateSources, state: WorkerState, index: int, tensors: dict[str, Tensor], device: torch.device
) -> None:
    """Hold a unit of these tensors, which are on `device` already."""
    unit = sources.blank_unit(index)
    state.put_unit(index, unit, tensors)
    unit.to(device)  # what is not part of the state


@dataclass(frozen=True, slots=True)
class Assembly:
    """One worker's part where state comes from peers. `alone` has the other origins.

    Attributes:
        state: what it holds.
        plan: see there.
        rank: in `transfer`.
        transfer: members and leavers.
        device: of training.
        state_map: of this regroup; None when units stay what they are.
        started: called once, when all sends and receives are under way.
        moved: called when what was to come has come.
    """

    sources: StateSources
    state: WorkerState
    plan: TransferPlan
    rank: int
    transfer: dist.ProcessGroup
    device: torch.device
    state_map: StateMap | None = None
    started: Callable[[], None] = field(default=lambda: None)
    moved: Callable[[], None] = field(default=lambda: None)

    def assemble(self) -> WorkerState:
        """The state of the new role, empty for a leaver, who only gives. All of `transfer` call this.

        Raises:
            RuntimeError: a connection broke.
        """
        plan, state_map = self.plan, self.state_map
        wanted = units_of(plan, self.rank)
        num_layers, ties = self.state.num_layers, self.state.ties
        if state_map is not None:
            num_layers, ties = state_map.num_layers, state_map.ties
        new = WorkerState(num_layers, ties)
        control = Control.from_dict(plan.control)
        new.control = control if state_map is None else state_map.control(control)
        if plan.origin is Origin.MIRROR:
            self._from_mirrors(new, wanted)
        elif state_map is None:
            self._from_peers(new, wanted)
        else:
            self._mapped(new, wanted, state_map)
        new.apply_boundary()
        return new

    def _from_mirrors(self, new: WorkerState, wanted: range) -> None:
        mirror = self.sources.mirrors.at(self._point)
        mirrored = {} if mirror is None else mirror.units
        received = self._receive(new.control.boundary, mirrored.__getitem__, torch.device("cpu"))
        for index in wanted:
            parts = received.get(index) or mirrored[index]
            self._take(new, index, [part.to(self.device, copy=index not in received) for part in parts])

    def _from_peers(self, new: WorkerState, wanted: range) -> None:
        received = self._receive(new.control.boundary, self._give, self.device)
        for index in wanted:
            if index in received:
                self._take(new, index, received[index])
                continue
            if index not in self._held:
                put_unit(self.sources, new, index, self._read_ahead(index), self.device)
                continue
            new.units[index] = self._held[index]
            for name, _ in new.named_parameters(index):
                new.moments[name] = self.state.moments.get(name, {})

    def _mapped(self, new: WorkerState, wanted: range, state_map: StateMap) -> None:
        """The new units, each made of old ones that this worker holds or receives."""
        boundary = int(self.plan.control["boundary"])
        received = self._receive(boundary, self._give, self.device)
        old: dict[int, Mapping[str, Tensor]] = {}
        for index in sources_of(wanted, state_map):
            if index in received:
                old[index] = self.sources.codec.take(received[index], index, self.sources.shells[index], boundary)
            elif index in self._held:
                old[index] = self.state.unit_tensors(index, with_moments=True)
            else:
                old[index] = self._read_ahead(index)
        for index in wanted:
            tensors = {name: tensor for source in state_map.sources(index) for name, tensor in old[source].items()}
            unit = state_map.blank(index)
            new.put_unit(index, unit, state_map.make(index, tensors))
            unit.to(self.device)

    @property
    def _point(self) -> tuple[int, int]:
        return Control.from_dict(self.plan.control).point

    @property
    def _held(self) -> Mapping[int, nn.Module]:
        """What the plan counts as held here: units of another step, which this worker had assembled when its first
        generation broke in the vote, are not what was frozen and read since."""
        return self.state.units if self.state.control.point == self._point else {}

    def _receive(self, boundary: int, give: Callable[[int], Parts], device: torch.device) -> dict[int, Parts]:
        codec, shells = self.sources.codec, self.sources.shells
        received = move_units(
            self.plan.moves,
            self.rank,
            self.transfer,
            give,
            lambda index: codec.blank(index, shells[index], boundary, device),
            self.started,
        )
        self.moved()
        return received

    def _read_ahead(self, index: int) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in self.sources.read_ahead[index].tensors.items()}

    def _give(self, index: int) -> Parts:
        return self.sources.codec.give(self.state, index, self.device)

    def _take(self, new: WorkerState, index: int, parts: Parts) -> None:
        codec, shell = self.sources.codec, self.sources.shells[index]
        tensors = codec.take(parts, index, shell, new.control.boundary)
        put_unit(self.sources, new, index, tensors, self.device)
