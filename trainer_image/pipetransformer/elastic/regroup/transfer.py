"""Moves units between workers, peer to peer, into new tensors: nothing that is held is touched before the commit."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from pipetransformer.elastic.transport.groups import wait_for

from .transfer_plan import Move

#: Of one unit, as `UnitCodec` gives it.
Parts = list[Tensor]
_MAX_PARTS = 1 << 12


def move_units(
    moves: Sequence[Move],
    rank: int,
    group: dist.ProcessGroup,
    give: Callable[[int], Parts],
    blank: Callable[[int], Parts],
    started: Callable[[], None] = lambda: None,
) -> dict[int, Parts]:
    """Send and receive what `moves` say; every rank of `group` calls this with the same moves.

    Args:
        moves: in the same order on all ranks.
        rank: this worker's rank in `group`.
        group: members, and leavers if there are any.
        give: the parts of a unit that this worker sends.
        blank: parts of the same shapes, to receive a unit in.
        started: called once, when all sends and receives are under way.

    Returns:
        Received parts by unit. All is there, and all that was sent has been taken.

    Raises:
        RuntimeError: a connection broke or timed out.
    """
    operations: list[dist.P2POp] = []
    given: dict[int, Parts] = {}
    received: dict[int, Parts] = {}
    for move in moves:
        if move.source == rank:
            if move.unit not in given:
                given[move.unit] = give(move.unit)
            operations += _operations(dist.isend, given[move.unit], move.unit, group, move.target)
        if move.target == rank:
            received[move.unit] = blank(move.unit)
            operations += _operations(dist.irecv, received[move.unit], move.unit, group, move.source)
    works = dist.batch_isend_irecv(operations) if operations else []
    started()
    for work in works:
        work.wait()
    for device in {operation.tensor.device for operation in operations}:
        wait_for(device)
    return received


def _operations(
    operation: Callable[..., object], parts: Parts, unit: int, group: dist.ProcessGroup, peer: int
) -> list[dist.P2POp]:
    return [
        dist.P2POp(operation, part, group=group, group_peer=peer, tag=unit * _MAX_PARTS + number)
        for number, part in enumerate(parts)
        if part.numel()
    ]
