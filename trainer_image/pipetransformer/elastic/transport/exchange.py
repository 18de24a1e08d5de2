"""Gathers a few hundred bytes from all ranks, by messages between pairs of ranks.

gloo's own collectives run in a thread, which has to wake for each message. Here the calling thread sends and receives,
which is faster for few bytes (`docs/decisions/0015`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Tags of the messages. Units that move in the same group (`transfer`) have tags from 0 up.
BALLOTS = 2**31 - 1
SIMILARITIES = 2**31 - 2
EVALUATION = 2**31 - 3
WEIGHTS = 2**31 - 4


class Exchange:
    """Gathers values from all ranks, as often as it is called.

    Each time, a rank sends ceil(log2(ranks)) messages one after another (the concatenation of Bruck et al., 1997).

    Args:
        group: the group. Each of its ranks makes an exchange, and calls it as often as the other ranks.
        values: number of float64 values that each rank gives.
        tag: tag of the messages. Nothing else in the group may use it.
    """

    def __init__(self, group: dist.ProcessGroup, values: int, tag: int) -> None:
        self._group = group
        self.values = values
        self._tag = tag
        self._rows = torch.empty(0)
        self._receiving: list[Any] = []

    def expect(self) -> None:
        """Begin to receive the values of the next call. gloo delivers a message at once to a rank that already waits
        for it. Otherwise gloo first asks the sender for the message.

        Raises:
            RuntimeError: a connection broke.
        """
        if self._receiving:
            return
        rank, size = self._group.rank(), self._group.size()
        self._rows = torch.empty(size, self.values, dtype=torch.float64)  # of this rank, then of the ranks after it
        held = 1
        while held < size:
            taken = min(held, size - held)
            part = self._rows[held : held + taken]
            self._receiving.append(self._group.recv([part], (rank + held) % size, self._tag))
            held += taken

    def __call__(self, row: Tensor) -> Tensor:
        """Gather the rows of all ranks.

        Args:
            row: this rank's values, of shape (values,), float64, on the CPU.

        Returns:
            The values of all ranks, of shape (ranks, values), in the order of ranks.

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
        """Sum over all ranks. Each rank adds the rows in the same order, so all get the same bits on any processor.

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
