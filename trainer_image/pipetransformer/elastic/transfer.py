"""Moves units between workers, peer to peer, into new buffers: nothing that is held is touched before the commit."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..state import UnitCodec, WorkerState
from .plan import Move


def move_units(
    moves: Sequence[Move],
    rank: int,
    group: dist.ProcessGroup,
    state: WorkerState,
    codec: UnitCodec,
    shells: Sequence[nn.Module],
    boundary: int,
    device: torch.device,
    started: Callable[[], None] = lambda: None,
) -> dict[int, Tensor]:
    """Send and receive what `moves` say; every rank of `group` calls this with the same moves.

    Args:
        moves: in the same order on all ranks.
        rank: this worker's rank in `group`.
        group: members, and leavers if there are any.
        state: what this worker holds.
        codec: lays units out as buffers.
        shells: every unit of the model, for shapes only (may be on the meta device).
        boundary: frozen blocks; frozen units travel without optimizer state.
        device: of the buffers.
        started: called once, when all sends and receives are under way.

    Returns:
        Received buffers by unit.

    Raises:
        RuntimeError: a connection broke or timed out.
    """
    operations: list[dist.P2POp] = []
    packed: dict[int, Tensor] = {}
    received: dict[int, Tensor] = {}
    for move in moves:
        if move.source == rank:
            buffer = packed.get(move.unit)
            if buffer is None:
                buffer = packed[move.unit] = codec.pack(state, move.unit, device)
            operations.append(dist.P2POp(dist.isend, buffer, group=group, group_peer=move.target, tag=move.unit))
        if move.target == rank:
            size = codec.size(move.unit, shells[move.unit], boundary)
            received[move.unit] = torch.empty(size, dtype=torch.uint8, device=device)
            operations.append(
                dist.P2POp(dist.irecv, received[move.unit], group=group, group_peer=move.source, tag=move.unit)
            )
    works = dist.batch_isend_irecv(operations) if operations else []
    started()
    for work in works:
        work.wait()
    return received


def moved_bytes(moves: Sequence[Move], codec: UnitCodec, shells: Sequence[nn.Module], boundary: int) -> int:
    """Bytes that all workers together receive."""
    return sum(codec.size(move.unit, shells[move.unit], boundary) for move in moves)
