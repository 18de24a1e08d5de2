"""Moves units between workers, peer to peer, into new tensors: what a worker holds stays as it is until the commit."""

from collections.abc import Callable, Mapping, Sequence
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
_MAX_PARTS = 1 << 12


class Cargo(Protocol):
    """The units that one worker sends and receives."""

    def give(self, unit: int) -> Parts:
        """Return the parts of a unit that this worker sends."""
        ...

    def blank(self, unit: int) -> Parts:
        """Return parts of the same shapes, to receive a unit in."""
        ...


@dataclass(frozen=True, slots=True)
class StateCargo:
    """The units of a worker's state (`Cargo`).

    Attributes:
        codec: packs units.
        shells: all units, used for their shapes only.
        state: holds the units to send.
        boundary: tells which units carry moments.
        device: where units are packed and received.
        in_host: number of leading units that travel through host memory, because a worker may keep them off its
            device. Both ends need the same number.
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
        """Return the bytes of a unit on the wire."""
        return self.codec.size(unit, self.shells[unit], self.boundary)

    def _device_of(self, unit: int) -> torch.device:
        return HOST if unit < self.in_host else self.device


@dataclass(frozen=True, slots=True)
class CopiesCargo:
    """Units that were copied to host memory, where new ones are received too (`Cargo`).

    Attributes:
        copies: parts by unit.
        codec: the codec that packed them.
        shells: all units, used for their shapes only.
        boundary: the boundary at which they were copied.
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
    """Return the number of leading units that travel through host memory."""
    return first_trainable(control.cached_layers)


class Progress:
    """Told how a transfer proceeds; override what is of interest."""

    def on_started(self) -> None:
        """All sends and receives are under way."""

    def on_moved(self) -> None:
        """All that was to be received is here."""


UNHEARD = Progress()


def move_units(
    moves: Sequence[Move], rank: int, group: dist.ProcessGroup, cargo: Cargo, progress: Progress = UNHEARD
) -> dict[int, Parts]:
    """Send and receive what `moves` say. Every rank of `group` calls this with the same moves.

    Args:
        moves: in the same order on all ranks.
        rank: this worker's rank in `group`.
        group: members, and leavers if there are any.
        cargo: this worker's units.
        progress: told once all is under way, and once all is here.

    Returns:
        Received parts by unit. They have arrived, and the others have received what this worker sent.

    Raises:
        RuntimeError: a connection broke or timed out.
    """
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
    devices = {operation.tensor.device for operation in operations}
    works = []
    for device in devices:  # a batch has one backend
        works += dist.batch_isend_irecv([each for each in operations if each.tensor.device == device])
    progress.on_started()
    for work in works:
        work.wait()
    for device in devices:
        wait_for(device)
    progress.on_moved()
    return received


def _operations(
    operation: Callable[..., object], parts: Parts, unit: int, group: dist.ProcessGroup, peer: int
) -> list[dist.P2POp]:
    return [
        dist.P2POp(operation, part, group=group, group_peer=peer, tag=unit * _MAX_PARTS + number)
        for number, part in enumerate(parts)
        if part.numel()
    ]
