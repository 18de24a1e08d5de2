"""An all-gather of few bytes by messages between pairs.

gloo's own collectives hand the work to a thread of theirs, which has to be woken for each message. Here the caller
sends and receives, which is what counts for a few hundred bytes between rounds (`docs/decisions/0015`).
"""

import torch
import torch.distributed as dist
from torch import Tensor

#: Of these messages: state, too, moves between the ranks of the group.
_TAG = 1


def exchange(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What each rank gives, in ceil(log2(ranks)) rounds (the concatenation of Bruck et al., 1997).

    Args:
        row: (values,) on the CPU, of one length and type on all ranks.

    Returns:
        (ranks, values), by rank.

    Raises:
        RuntimeError: a connection broke, or a rank did not take part within the group's timeout.
    """
    rank, size = group.rank(), group.size()
    rows = row.new_empty(size, len(row))  # this rank's first, then the next one's
    rows[0] = row
    held = 1
    while held < size:
        taken = min(held, size - held)
        receiving = group.recv([rows[held : held + taken]], (rank + held) % size, _TAG)
        sending = group.send([rows[:taken]], (rank - held) % size, _TAG)
        receiving.wait()
        sending.wait()
        held += taken
    return torch.roll(rows, rank, dims=0)
