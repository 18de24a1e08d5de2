"""Assembles a worker's state for its new role from units that workers hold or have mirrored.

The leader's plan says which units move. A unit that stays on the worker is shared by its old and its new state. The old
state is not changed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from .transfer import (
    HOST,
    Cargo,
    CopiesCargo,
    Parts,
    StateCargo,
    Transfer,
    TransferListener,
    start_moves,
    units_in_host,
)
from .transfer_plan import Origin, TransferPlan


class UnitMaker(Protocol):
    """Makes units of the job's model. `job.Job` implements it."""

    @property
    def codec(self) -> UnitCodec:
        """Packs units of the model to send them."""
        ...

    @property
    def shells(self) -> Sequence[nn.Module]:
        """All units of the model, used for their shapes only."""
        ...

    def build_units(self, indices: Collection[int]) -> dict[int, nn.Module]:
        """Return the units with these indices as they are when training starts, on the CPU."""
        ...

    def blank_unit(self, index: int) -> nn.Module:
        """Return a unit on the meta device. The caller replaces its tensors."""
        ...


class CheckpointReader(Protocol):
    """Reads a checkpoint from the storage. `checkpoint.Checkpointer` implements it."""

    def load_control(self, name: str) -> Control:
        """Return the control state of the checkpoint with this name."""
        ...

    def load_unit(self, index: int) -> dict[str, Tensor]:
        """Return a unit's tensors by name. Call `load_control` first: it selects the checkpoint."""
        ...


class ReadAhead(Protocol):
    """Has the units that were read from a checkpoint so far. `checkpoint.Prefetcher` implements it.

    Attributes:
        units: the units by index.
    """

    units: dict[int, ReadUnit]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSources:
    """Where units come from.

    Attributes:
        job: makes units of its model, and says how they are packed.
        checkpoints: reads units from the storage.
        mirrors: copies of units of earlier steps, which this worker keeps.
        read_ahead: frozen units that this worker has read from the storage while it waited.
    """

    job: UnitMaker
    checkpoints: CheckpointReader
    mirrors: Mirrors
    read_ahead: ReadAhead

    @property
    def codec(self) -> UnitCodec:
        """Packs units to send them."""
        return self.job.codec

    @property
    def shells(self) -> Sequence[nn.Module]:
        """All units, used for their shapes only."""
        return self.job.shells

    def codec_for(self, state_map: StateMap | None) -> UnitCodec:
        """Return the codec for a regroup with this map. It sends no moments if the map does not take them."""
        without = state_map is not None and not state_map.takes_moments
        return replace(self.codec, optimizer=None) if without else self.codec


def units_of(plan: TransferPlan, rank: int) -> list[int]:
    """The units of a rank's new role, with copies; none for a leaver. `rank` is among the participants."""
    return plan.cut.held_by(plan.roles[rank][1]) if rank < len(plan.roles) else []


def copies_of(plan: TransferPlan, rank: int) -> list[int]:
    """Units of `units_of` that are copies of another stage's units."""
    return plan.cut.copies_of(plan.roles[rank][1]) if rank < len(plan.roles) else []


def off_device(plan: TransferPlan, rank: int) -> list[int]:
    """Units of `units_of` that stay off the device."""
    return plan.cut.off_device(plan.roles[rank][1], plan.cached_layers) if rank < len(plan.roles) else []


def put_unit(
    sources: StateSources,
    state: WorkerState,
    index: int,
    tensors: dict[str, Tensor],
    device: torch.device,
    *,
    off: bool = False,
    blank: nn.Module | None = None,
) -> None:
    """Make a unit of these tensors, and put it into `state`.

    Args:
        sources: makes the unit.
        state: gets the unit.
        index: the unit's index.
        tensors: by the names of `WorkerState.unit_tensors`; on `device` already, or in host memory if `off`.
        device: where training runs.
        off: whether the unit stays off the device.
        blank: the unit without its tensors; None to make it here.

    Raises:
        ValueError, SpecError: the tensors do not fit the unit; see `WorkerState.put_unit`.
    """
    unit = sources.job.blank_unit(index) if blank is None else blank
    state.put_unit(index, unit, tensors)
    unit.to(HOST if off else device)  # moves tensors that are not part of the state
    if off:
        move_off(unit, device)


@dataclass(frozen=True)
class Assembly:
    """Makes the state of one worker's new role, if it comes from workers. Otherwise `AssemblyWithoutPeers` does.

    Attributes:
        sources: where units come from.
        state: what this worker holds.
        plan: the leader's plan.
        rank: this worker's rank among the participants.
        transfer: the group in which state moves; None for a leaver that sends nothing.
        device: where training runs.
        state_map: makes the units of another model; None if the units stay the same.
        listener: listens to the transfer.
    """

    sources: StateSources
    state: WorkerState
    plan: TransferPlan
    rank: int
    transfer: dist.ProcessGroup | None
    device: torch.device
    state_map: StateMap | None = None
    listener: TransferListener = field(default_factory=TransferListener)

    def assemble(self) -> WorkerState:
        """Send and receive units, and return the state of the new role. It is empty for a leaver, which only sends. All
        participants call this.

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
        """Take each unit from this worker's mirror, or from the mirror of another worker."""
        mirror = self.sources.mirrors.at(self._point)
        mirrored = {} if mirror is None else mirror.units
        sources = self.sources
        cargo = CopiesCargo(mirrored, sources.codec, sources.shells, new.control.boundary)
        received = self._start_moves(cargo).finish()
        for index in wanted:
            parts = received.get(index) or mirrored[index]
            self._take(new, index, [part.to(self._device_of(index), copy=index not in received) for part in parts])

    def _from_peers(self, new: WorkerState, wanted: Sequence[int]) -> None:
        """Take each unit that a peer sends. Keep units that this worker holds, and add those that it has read ahead."""
        moving = self._start_moves(self._held_cargo(new.control.boundary))
        # Make the modules while their tensors are on the way, because all workers wait for the slowest in the vote.
        blanks = {index: self.sources.job.blank_unit(index) for index in moving.received}
        received = moving.finish()
        for index in wanted:
            if index in received:
                parts = [part.to(self._device_of(index)) for part in received[index]]
                self._take(new, index, parts, blanks[index])
                continue
            if index not in self._held:
                put_unit(self.sources, new, index, self._read_ahead(index), self.device, off=index in self._off)
                continue
            new.units[index] = self._held[index]
            for name, _ in new.named_parameters(index):
                new.moments[name] = self.state.moments.get(name, {})

    def _mapped(self, new: WorkerState, wanted: Sequence[int], state_map: StateMap) -> None:
        """Make each new unit from old ones, which this worker receives, holds or has read ahead."""
        boundary = int(self.plan.control["boundary"])
        received = self._start_moves(self._held_cargo(boundary)).finish()
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
        """The committed state that the plan starts from."""
        return Control.from_dict(self.plan.control).point

    @cached_property
    def _held(self) -> Mapping[int, nn.Module]:
        """The units that the plan counts as held by this worker. Units of another committed state do not count: for
        example, a joiner holds some if its first generation broke in the vote."""
        return self.state.held if self.state.control.point == self._point else {}

    def _held_cargo(self, boundary: int) -> StateCargo:
        in_host = units_in_host(Control.from_dict(self.plan.control))
        codec = self.sources.codec_for(self.state_map)
        return StateCargo(codec, self.sources.shells, self.state, boundary, self.device, in_host)

    def _start_moves(self, cargo: Cargo) -> Transfer:
        return start_moves(self.plan.moves, self.rank, self.transfer, cargo, self.listener)

    def _read_ahead(self, index: int) -> dict[str, Tensor]:
        read = self.sources.read_ahead.units[index].tensors
        return {name: tensor.to(self._device_of(index)) for name, tensor in read.items()}

    @cached_property
    def _off(self) -> list[int]:
        return off_device(self.plan, self.rank)

    def _device_of(self, index: int) -> torch.device:
        """Where a unit of the new role is kept: on the device or in host memory."""
        return HOST if index in self._off else self.device

    def _take(self, new: WorkerState, index: int, parts: Parts, blank: nn.Module | None = None) -> None:
        codec, shell = self.sources.codec, self.sources.shells[index]
        tensors = codec.take(parts, index, shell, new.control.boundary)
        put_unit(self.sources, new, index, tensors, self.device, off=index in self._off, blank=blank)
