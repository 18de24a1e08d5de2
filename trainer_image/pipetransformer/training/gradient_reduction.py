"""Reduction of gradients: sums over the workers that hold the same stage, and of a parameter that several units share
over the workers that hold any of them.

Units are summed a few at a time. A sum is under way as soon as the last micro-batch's backward has passed its units,
while it goes on through those below. All workers start the sums in the same order, the last unit of the stage first.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipetransformer.elastic.transport.groups import GenerationGroups, wait_for
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState

from .gradients import Gradients

#: Units are summed together up to so many bytes: a collective costs more than a small unit's bytes.
_BUCKET_BYTES = 1 << 20


class GradientReducer:
    """Sums the gradients of all that a worker holds, while it holds it and its boundary stands.

    Args:
        gradients: of the generation.
        state: whose parameters they are.
        layout: of the generation.
        groups: of the generation.
    """

    def __init__(self, gradients: Gradients, state: WorkerState, layout: StageLayout, groups: GenerationGroups) -> None:
        assert groups.data_parallel is not None
        self._gradients, self._state, self._layout, self._groups = gradients, state, layout, groups
        self._group = groups.data_parallel
        #: With one pipeline there is nobody to sum with, and nothing has to be noticed during the backward.
        self._buckets = _buckets(gradients) if self._group.size() > 1 else []
        self._bucket_of = {unit: number for number, units in enumerate(self._buckets) for unit in units}
        #: Units' backwards of the round that each bucket still waits for; empty outside of a round.
        self._missing: list[int] = []
        self._sums: list[dist.Work] = []

    @property
    def sums(self) -> bool:
        """Whether there is anybody to sum with, and so whether `passed` wants to be told."""
        return bool(self._buckets)

    @property
    def under_way(self) -> list[int]:
        """Units of the round whose sums have begun."""
        return [index for units in self._buckets[: len(self._sums)] for index in units]

    def begin(self, num_micro_batches: int) -> None:
        """A round of so many micro-batches begins; all gradients are zero."""
        self._gradients.clear()
        self._missing = [num_micro_batches * len(units) for units in self._buckets]
        self._sums = []

    def finish(self) -> list[float]:
        """Wait for all sums of the round; they are the parameters' gradients from here on.

        Returns:
            Squared norm of the sum for each unit of the model: zero for units held elsewhere, and on all pipelines but
            the first, so that the sum over all workers counts every parameter once. A tied parameter counts in its last
            unit.

        Raises:
            RuntimeError: a connection broke.
        """
        while len(self._sums) < len(self._buckets):
            self._start()
        for work in self._sums:
            work.wait()
        wait_for(self._gradients.device)  # the vote says that these gradients are complete
        self._missing, self._sums = [], []
        norms = [0.0] * (self._state.num_layers + 2)
        counts = self._layout.pipeline == 0
        if counts:
            for index, square_norm in self._gradients.square_norms().items():
                norms[index] = square_norm
        span = self._layout.span
        for tie in self._state.ties.all:
            copies = [self._state.units[unit].get_parameter(name) for unit, name in tie.places if unit in span]
            if copies:
                square_norm = reduce_tied_gradients(copies, self._groups.tied[tie.stages(self._layout.spans)])
                norms[tie.last_unit] += square_norm if counts and tie.last_unit in span else 0.0
        return norms

    def close(self) -> None:
        """Let go of sums that broke, and start no more."""
        self._missing, self._sums = [], []

    def passed(self, unit: int) -> None:
        """The backward of a micro-batch has passed this unit: all its gradients are there. One that nobody tells of
        waits for `finish`."""
        if not self._missing or unit not in self._bucket_of:
            return
        self._missing[self._bucket_of[unit]] -= 1
        # A bucket waits for those before it, so that all workers start in the same order.
        while len(self._sums) < len(self._missing) and not self._missing[len(self._sums)]:
            self._start()

    def _start(self) -> None:
        flat = self._gradients.joined(self._buckets[len(self._sums)])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._sums.append(work)


def _buckets(gradients: Gradients) -> list[list[int]]:
    """Units to sum together, in order; those that do not train are left out."""
    buckets: list[list[int]] = []
    filled = _BUCKET_BYTES
    for index, part in gradients.of_unit.items():
        if not part.numel():
            continue
        if filled >= _BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += part.nbytes
    return buckets


def reduce_tied_gradients(copies: Sequence[nn.Parameter], group: dist.ProcessGroup) -> float:
    """Give all copies of one parameter the sum of their gradients, at least in float32. Returns its squared norm.

    Args:
        copies: those that this worker holds.
        group: the workers that hold any.
    """
    if not copies[0].requires_grad:
        return 0.0
    dtype = torch.promote_types(copies[0].dtype, torch.float32)
    total = torch.zeros_like(copies[0], dtype=dtype, memory_format=torch.contiguous_format)  # it travels
    for copy in copies:
        if copy.grad is not None:
            total += copy.grad
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    for copy in copies:
        copy.grad = total.to(copy.dtype, copy=True)
    return float(total.double().square().sum())
