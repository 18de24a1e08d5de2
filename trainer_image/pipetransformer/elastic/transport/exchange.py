"""All-gathers of few bytes by messages between pairs.

gloo's own collectives hand the work to a thread of theirs, which has to be woken for each message. Here the caller
sends and receives, which is what counts for a few hundred bytes between rounds (`docs/decisions/0015`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Tags of the messages. State that moves between ranks of the same group (`transfer`) has those from 0 on.
BALLOTS = 2**31 - 1
SIMILARITIES = 2**31 - 2
EVALUATION = 2**31 - 3


class Exchange:
    """All-gathers one after another, each in ceil(log2(ranks)) rounds (the concatenation of Bruck et al., 1997).

    Args:
        group: all of its ranks make one, and call it alike.
        values: float64 numbers of each rank.
        tag: of the messages, in this group of no other's.
    """

    def __init__(self, group: dist.ProcessGroup, values: int, tag: int) -> None:
        self._group = group
        self._values = values
        self._tag = tag
        self._rows = torch.empty(0)
        self._receiving: list[Any] = []

    def expect(self) -> None:
        """Begin to receive what the others give the next time: gloo hands a message at once to who waits for it, and
        else has its sender asked for it.

        Raises:
            RuntimeError: a connection broke.
        """
        if self._receiving:
            return
        rank, size = self._group.rank(), self._group.size()
        self._rows = torch.empty(size, self._values, dtype=torch.float64)  # this rank's first, then the next one's
        held = 1
        while held < size:
            taken = min(held, size - held)
            part = self._rows[held : held + taken]
            self._receiving.append(self._group.recv([part], (rank + held) % size, self._tag))
            held += taken

    def __call__(self, row: Tensor) -> Tensor:
        """What each rank gives.

        Args:
            row: (values,), float64, on the CPU.

        Returns:
            (ranks, values), by rank.

        Raises:
            RuntimeError: a connection broke, or a rank did not take part within the group's timeout.
        """
        self.expect()
        rank, size = self._group.rank(), self._group.size()
        rows, receiving, self._receiving = self._rows, self._receiving, []
        rows[0] = row
        held = 1
        for received in receiving:
            taken = min(held, size - held)
            sending = self._group.send([rows[:taken]], (rank - held) % size, self._tag)
            received.wait()
            sending.wait()
            held += taken
        return torch.roll(rows, rank, dims=0)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks, added one after another in the order of ranks: the same bits on every processor.

        Raises:
            RuntimeError: as for a call.
        """
        if self._group.size() == 1:
            return list(values)
        first, *others = self(torch.tensor(values, dtype=torch.float64))
        total = first.clone()
        for row in others:
            total += row
        sums: list[float] = total.tolist()
        return sums
