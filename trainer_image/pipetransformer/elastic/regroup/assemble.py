"""Assembles a worker's state for its new role from what peers hold or have mirrored, as the leader's plan says.

The new state shares the units that stay with the worker's old state, and changes nothing in it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.models.off_device import move_off
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.read_ahead import ReadUnit
from pipetransformer.state.worker_state import WorkerState

from .mirrors import Mirrors
from .state_map import StateMap, sources_of
from .transfer import HOST, UNHEARD, Cargo, CopiesCargo, Parts, Progress, StateCargo, move_units, units_in_host
from .transfer_plan import Origin, TransferPlan


class UnitMaker(Protocol):
    """Makes units of the job's model (`job.Job`)."""

    @property
    def codec(self) -> UnitCodec:
        """Packs its units to move them."""
        ...

    @property
    def shells(self) -> Sequence[nn.Module]:
        """All its units, used for their shapes only."""
        ...

    def build_units(self, indices: Collection[int]) -> dict[int, nn.Module]:
        """Return the units of these indices as training starts from them, on the CPU."""
        ...

    def blank_unit(self, index: int) -> nn.Module:
        """Return a unit on the meta device, whose tensors are to be replaced."""
        ...


class CheckpointReader(Protocol):
    """Reads a checkpoint from the storage (`checkpoint.Checkpointer`). `load_control` comes before `load_unit`."""

    def load_control(self, name: str) -> Control:
        """Return the control state of the checkpoint of that name."""
        ...

    def load_unit(self, index: int) -> dict[str, Tensor]:
        """Return a unit's tensors from the checkpoint whose control state was loaded."""
        ...


class ReadAhead(Protocol):
    """Units that were read from a checkpoint so far, by index (`checkpoint.Prefetcher`)."""

    units: dict[int, ReadUnit]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSources:
    """Where units come from.

    Attributes:
        job: makes units of its model, and says how they are packed.
        checkpoints: reads units from the storage.
        mirrors: the copies that this worker keeps of earlier steps.
        read_ahead: frozen units that this worker reads from storage while it waits.
    """

    job: UnitMaker
    checkpoints: CheckpointReader
    mirrors: Mirrors
    read_ahead: ReadAhead

    @property
    def codec(self) -> UnitCodec:
        """Packs units to move them."""
        return self.job.codec

    @property
    def shells(self) -> Sequence[nn.Module]:
        """All units, used for their shapes only."""
        return self.job.shells

    def codec_for(self, state_map: StateMap | None) -> UnitCodec:
        """Packs what moves for a map: no moments if the map does not take them."""
        without = state_map is not None and not state_map.takes_moments
        return replace(self.codec, optimizer=None) if without else self.codec


def units_of(plan: TransferPlan, rank: int) -> list[int]:
    """The units of a transfer rank's new role, with copies; none for a leaver."""
    return plan.cut.held_by(plan.roles[rank][1]) if rank < len(plan.roles) else []


def copies_of(plan: TransferPlan, rank: int) -> list[int]:
    """Those of `units_of` that are copies of another stage's."""
    return plan.cut.copies_of(plan.roles[rank][1]) if rank < len(plan.roles) else []


def off_device(plan: TransferPlan, rank: int) -> list[int]:
    """Those of `units_of` that stay off the device."""
    return plan.cut.off_device(plan.roles[rank][1], plan.cached_layers) if rank < len(plan.roles) else []


def put_unit(
    sources: StateSources,
    state: WorkerState,
    index: int,
    tensors: dict[str, Tensor],
    device: torch.device,
    *,
    off: bool = False,
) -> None:
    """Put a unit made of these tensors into `state`. They are on `device` already, or in host memory if the unit is to
    stay `off` the device."""
    unit = sources.job.blank_unit(index)
    state.put_unit(index, unit, tensors)
    unit.to(HOST if off else device)  # moves tensors that are not part of the state
    if off:
        move_off(unit, device)


@dataclass(frozen=True, slots=True)
class Assembly:
    """One worker's part of a regroup whose state comes from peers. `from_storage` has the other origins.

    Attributes:
        sources: where units come from.
        state: what this worker holds.
        plan: the leader's.
        rank: this worker's rank in `transfer`.
        transfer: the group of members and leavers.
        device: where training runs.
        state_map: makes another list of units; None if the units stay the same.
        progress: told of the transfer.
    """

    sources: StateSources
    state: WorkerState
    plan: TransferPlan
    rank: int
    transfer: dist.ProcessGroup
    device: torch.device
    state_map: StateMap | None = None
    progress: Progress = UNHEARD

    def assemble(self) -> WorkerState:
        """Return the state of the new role; it is empty for a leaver, which only sends. All of `transfer` call this.

        Raises:
            RuntimeError: a connection broke.
        """
        plan, state_map = self.plan, self.state_map
        wanted = units_of(plan, self.rank)
        model = self.sources.codec if state_map is None else state_map
        new = WorkerState(model.num_layers, model.ties)
        control = Control.from_dict(plan.control)
        new.control = control if state_map is None else state_map.control(control)
        if plan.origin is Origin.MIRROR:
            self._from_mirrors(new, wanted)
        elif state_map is None:
            self._from_peers(new, wanted)
        else:
            self._mapped(new, wanted, state_map)
        new.set_apart(copies_of(plan, self.rank))
        new.apply_boundary()
        return new

    def _from_mirrors(self, new: WorkerState, wanted: Sequence[int]) -> None:
        mirror = self.sources.mirrors.at(self._point)
        mirrored = {} if mirror is None else mirror.units
        sources = self.sources
        received = self._move(CopiesCargo(mirrored, sources.codec, sources.shells, new.control.boundary))
        for index in wanted:
            parts = received.get(index) or mirrored[index]
            self._take(new, index, [part.to(self._device_of(index), copy=index not in received) for part in parts])

    def _from_peers(self, new: WorkerState, wanted: Sequence[int]) -> None:
        received = self._move(self._held_cargo(new.control.boundary))
        for index in wanted:
            if index in received:
                self._take(new, index, [part.to(self._device_of(index)) for part in received[index]])
                continue
            if index not in self._held:
                put_unit(self.sources, new, index, self._read_ahead(index), self.device, off=index in self._off)
                continue
            new.units[index] = self._held[index]
            for name, _ in new.named_parameters(index):
                new.moments[name] = self.state.moments.get(name, {})

    def _mapped(self, new: WorkerState, wanted: Sequence[int], state_map: StateMap) -> None:
        """Make each new unit of old ones that this worker holds or receives."""
        boundary = int(self.plan.control["boundary"])
        received = self._move(self._held_cargo(boundary))
        old: dict[int, Mapping[str, Tensor]] = {}
        for index in sources_of(wanted, state_map):
            if index in received:
                codec = self.sources.codec_for(state_map)
                old[index] = codec.take(received[index], index, self.sources.shells[index], boundary)
            elif index in self._held:
                old[index] = self.state.unit_tensors(index, with_moments=state_map.takes_moments)
            else:
                old[index] = self._read_ahead(index)
            old[index] = {name: tensor.to(self.device) for name, tensor in old[index].items()}
        for index in wanted:
            tensors = {name: tensor for source in state_map.sources(index) for name, tensor in old[source].items()}
            unit = state_map.blank(index)
            new.put_unit(index, unit, state_map.make(index, tensors))
            unit.to(self.device)

    @property
    def _point(self) -> tuple[int, int, int]:
        return Control.from_dict(self.plan.control).point

    @property
    def _held(self) -> Mapping[int, nn.Module]:
        """The units that the plan counts as held here. Units of another step do not count: a joiner has some if its
        first generation broke in the vote."""
        return self.state.held if self.state.control.point == self._point else {}

    def _held_cargo(self, boundary: int) -> StateCargo:
        in_host = units_in_host(Control.from_dict(self.plan.control))
        codec = self.sources.codec_for(self.state_map)
        return StateCargo(codec, self.sources.shells, self.state, boundary, self.device, in_host)

    def _move(self, cargo: Cargo) -> dict[int, Parts]:
        return move_units(self.plan.moves, self.rank, self.transfer, cargo, self.progress)

    def _read_ahead(self, index: int) -> dict[str, Tensor]:
        read = self.sources.read_ahead.units[index].tensors
        return {name: tensor.to(self._device_of(index)) for name, tensor in read.items()}

    @property
    def _off(self) -> list[int]:
        return off_device(self.plan, self.rank)

    def _device_of(self, index: int) -> torch.device:
        """Where a unit of the new role goes."""
        return HOST if index in self._off else self.device

    def _take(self, new: WorkerState, index: int, parts: Parts) -> None:
        codec, shell = self.sources.codec, self.sources.shells[index]
        tensors = codec.take(parts, index, shell, new.control.boundary)
        put_unit(self.sources, new, index, tensors, self.device, off=index in self._off)
