"""Moves units from worker to worker, into new tensors. What a worker holds does not change before the commit."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.elastic.transport.groups import wait_for
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState

from .transfer_plan import Move

#: One unit as `UnitCodec.give` packs it.
Parts = list[Tensor]
HOST = torch.device("cpu")
#: A unit has at most this many parts, so all parts of all units have different tags.
_MAX_PARTS = 1 << 12


class Cargo(Protocol):
    """Packs the units that one worker sends, and makes the tensors that receive units."""

    def give(self, unit: int) -> Parts:
        """Return the parts of a unit that this worker sends."""
        ...

    def blank(self, unit: int) -> Parts:
        """Return new tensors to receive the parts of a unit in."""
        ...


@dataclass(frozen=True, slots=True)
class StateCargo:
    """Units of a worker's state. Implements `Cargo`.

    Attributes:
        codec: packs units.
        shells: all units of the model, used for their shapes only.
        state: holds the units to send.
        boundary: number of frozen layers. Frozen units have no moments to send.
        device: where units are packed and received.
        in_host: number of first units that are packed and received in host memory instead, because a worker may keep
            them off its device. Sender and receiver need the same number.
    """

    codec: UnitCodec
    shells: Sequence[nn.Module]
    state: WorkerState
    boundary: int
    device: torch.device
    in_host: int = 0

    def give(self, unit: int) -> Parts:
        return self.codec.give(self.state, unit, self._device_of(unit))

    def blank(self, unit: int) -> Parts:
        return self.codec.blank(unit, self.shells[unit], self.boundary, self._device_of(unit))

    def num_bytes(self, unit: int) -> int:
        """Return how many bytes are sent for a unit."""
        return self.codec.size(unit, self.shells[unit], self.boundary)

    def _device_of(self, unit: int) -> torch.device:
        return HOST if unit < self.in_host else self.device


@dataclass(frozen=True, slots=True)
class CopiesCargo:
    """Copies of units in host memory. Units are received there too. Implements `Cargo`.

    Attributes:
        copies: parts by unit.
        codec: the codec that packed them.
        shells: all units of the model, used for their shapes only.
        boundary: number of frozen layers when they were copied.
    """

    copies: Mapping[int, Parts]
    codec: UnitCodec
    shells: Sequence[nn.Module]
    boundary: int

    def give(self, unit: int) -> Parts:
        return self.copies[unit]

    def blank(self, unit: int) -> Parts:
        return self.codec.blank(unit, self.shells[unit], self.boundary, HOST)


def units_in_host(control: Control) -> int:
    """Return `StateCargo.in_host` for this control state."""
    return first_trainable(control.cached_layers)


class TransferListener:
    """Listens to a transfer. Subclasses override the methods that they need."""

    def on_started(self) -> None:
        """Called when all sends and receives have begun."""

    def on_moved(self) -> None:
        """Called when all sends and receives are done."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Units that are on their way.

    Attributes:
        given: the parts of each unit that this worker sends. They must stay in memory until the end.
        received: the parts of each unit that this worker receives. They are not valid before `finish`.
        works: the sends and receives.
        devices: where the parts are.
        listener: listens to the transfer.
    """

    given: Mapping[int, Parts]
    received: dict[int, Parts]
    works: Sequence[dist.Work]
    devices: Collection[torch.device]
    listener: TransferListener

    def finish(self) -> dict[int, Parts]:
        """Wait for all sends and receives. Returns the parts of each unit that this worker received.

        Raises:
            RuntimeError: a connection broke or timed out.
        """
        for work in self.works:
            work.wait()
        for device in self.devices:
            wait_for(device)
        self.listener.on_moved()
        return self.received


def move_units(moves: Sequence[Move], rank: int, group: dist.ProcessGroup | None, cargo: Cargo) -> dict[int, Parts]:
    """Send and receive units as `moves` says, and wait for them. Arguments, result and errors are those of
    `start_moves` and `Transfer.finish`."""
    return start_moves(moves, rank, group, cargo, TransferListener()).finish()


def start_moves(
    moves: Sequence[Move], rank: int, group: dist.ProcessGroup | None, cargo: Cargo, listener: TransferListener
) -> Transfer:
    """Begin to send and receive units as `moves` says. All workers call this with the same moves.

    Args:
        moves: the moves between all ranks, in the same order on all of them.
        rank: this worker's rank.
        group: has all workers that send or receive, with these ranks; None if this worker does neither.
        cargo: packs units to send, and makes tensors to receive.
        listener: listens to the transfer.

    Raises:
        RuntimeError: a connection broke.
    """
    # Pack what this worker sends, and make tensors for what it receives.
    operations: list[dist.P2POp] = []
    given: dict[int, Parts] = {}
    received: dict[int, Parts] = {}
    for move in moves:
        if move.source == rank:
            if move.unit not in given:
                given[move.unit] = cargo.give(move.unit)
            operations += _operations(dist.isend, given[move.unit], move.unit, group, move.target)
        if move.target == rank:
            received[move.unit] = cargo.blank(move.unit)
            operations += _operations(dist.irecv, received[move.unit], move.unit, group, move.source)
    # Begin all sends and receives.
    devices = {operation.tensor.device for operation in operations}
    works: list[dist.Work] = []
    for device in devices:  # all operations of a batch need the same backend
        works += dist.batch_isend_irecv([each for each in operations if each.tensor.device == device])
    listener.on_started()
    return Transfer(given, received, works, devices, listener)


def _operations(
    operation: Callable[..., object], parts: Parts, unit: int, group: dist.ProcessGroup | None, peer: int
) -> list[dist.P2POp]:
    return [
        dist.P2POp(operation, part, group=group, group_peer=peer, tag=unit * _MAX_PARTS + number)
        for number, part in enumerate(parts)
        if part.numel()
    ]
