"""All-gathers of a few hundred bytes between rounds, by messages between pairs.

gloo's own collectives work in a thread that has to wake for each message. Here the caller sends and receives, which is
quicker for few bytes (`docs/decisions/0015`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Tags of the messages. State that moves in the same group (`transfer`) uses the tags from 0.
BALLOTS = 2**31 - 1
SIMILARITIES = 2**31 - 2
EVALUATION = 2**31 - 3
WEIGHTS = 2**31 - 4


class Exchange:
    """All-gathers one after another, each in ceil(log2(ranks)) rounds (the concatenation of Bruck et al., 1997).

    Args:
        group: each of its ranks makes an exchange, and calls it as often as the others.
        values: number of float64 values that each rank gives.
        tag: tag of the messages; nothing else in this group may use it.
    """

    def __init__(self, group: dist.ProcessGroup, values: int, tag: int) -> None:
        self._group = group
        self.values = values
        self._tag = tag
        self._rows = torch.empty(0)
        self._receiving: list[Any] = []

    def expect(self) -> None:
        """Begin to receive the next values of the others. gloo delivers a message at once to a rank that waits for it,
        and otherwise asks the sender for it first.

        Raises:
            RuntimeError: a connection broke.
        """
        if self._receiving:
            return
        rank, size = self._group.rank(), self._group.size()
        self._rows = torch.empty(size, self.values, dtype=torch.float64)  # this rank's first, then the next one's
        held = 1
        while held < size:
            taken = min(held, size - held)
            part = self._rows[held : held + taken]
            self._receiving.append(self._group.recv([part], (rank + held) % size, self._tag))
            held += taken

    def __call__(self, row: Tensor) -> Tensor:
        """Gather the rows of all ranks.

        Args:
            row: this rank's values: (values,), float64, on the CPU.

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
        """Sum over all ranks. Rows are added in the order of ranks, which gives the same bits on every processor.

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
