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
        self._rank, self._size = group.rank(), group.size()
        #: The values of this rank, then of the ranks after it.
        self._rows = torch.empty(self._size, values, dtype=torch.float64)
        #: How many rows this rank holds before each message, and how many it then sends and receives.
        self._messages: list[tuple[int, int]] = []
        held = 1
        while held < self._size:
            self._messages.append((held, min(held, self._size - held)))
            held *= 2
        self._receiving: list[Any] = []

    def expect(self) -> None:
        """Begin to receive the values of the next call. gloo delivers a message at once to a rank that already waits
        for it. Otherwise gloo first asks the sender for the message.

        Raises:
            RuntimeError: a connection broke.
        """
        if self._receiving:
            return
        for held, count in self._messages:
            rows = self._rows[held : held + count]
            self._receiving.append(self._group.recv([rows], (self._rank + held) % self._size, self._tag))

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
        receiving, self._receiving = self._receiving, []
        self._rows[0] = row
        for (held, count), received in zip(self._messages, receiving, strict=True):
            sending = self._group.send([self._rows[:count]], (self._rank - held) % self._size, self._tag)
            received.wait()
            sending.wait()
        return torch.roll(self._rows, self._rank, dims=0)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum over all ranks. Each rank adds the rows in the same order, so all get the same bits on any processor.

        Raises:
            RuntimeError: as for a call.
        """
        if self._size == 1:
            return list(values)
        first, *others = self(torch.tensor(values, dtype=torch.float64))
        total = first.clone()
        for row in others:
            total += row
        sums: list[float] = total.tolist()
        return sums
