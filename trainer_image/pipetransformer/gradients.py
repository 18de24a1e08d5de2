"""Reduction of gradients: sums over the workers that hold the same stage, one flat buffer a unit, and of a parameter
that several units share over the workers that hold any of them.

A unit's sum is under way as soon as the last micro-batch's backward has passed the unit, while it goes on through those
below. All workers start the sums in the same order, the last unit of the stage first.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from .elastic.groups import GenerationGroups
from .layout import StageLayout
from .state import WorkerState


class GradientReducer:
    """Sums the gradients of all that a worker holds, while it holds it and its boundary stands.

    Args:
        state: whose parameters get hooks, until `close`.
        layout: of the generation.
        groups: of the generation.
    """

    def __init__(self, state: WorkerState, layout: StageLayout, groups: GenerationGroups) -> None:
        assert groups.data_parallel is not None
        self._state, self._layout, self._groups = state, layout, groups
        self._group = groups.data_parallel
        self._parameters = {index: self._own_parameters(index) for index in reversed(layout.span)}
        #: Gradients of the round that each unit still waits for; empty outside of a round.
        self._missing: dict[int, int] = {}
        self._sums: dict[int, _Sum] = {}
        #: With one pipeline there is nobody to sum with, and nothing has to be noticed during the backward.
        self._alone = self._group.size() == 1
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._accumulated, index)
            )
            for index, parameters in self._parameters.items()
            for parameter in parameters
            if not self._alone
        ]

    @property
    def under_way(self) -> list[int]:
        """Units of the round whose sums have begun."""
        return list(self._sums)

    def begin(self, num_micro_batches: int) -> None:
        """A round of so many micro-batches begins."""
        self._missing = {index: num_micro_batches * len(found) for index, found in self._parameters.items()}
        self._sums = {}

    def finish(self) -> list[float]:
        """Wait for all sums of the round; they are the parameters' gradients from here on.

        Returns:
            Squared norm of the sum for each unit of the model: zero for units held elsewhere, and on all pipelines but
            the first, so that the sum over all workers counts every parameter once. A tied parameter counts in its last
            unit.

        Raises:
            RuntimeError: a connection broke.
        """
        norms = [0.0] * (self._state.num_layers + 2)
        if self._alone:
            self._fill(norms)
        else:
            for index in self._parameters:
                self._start(index)
            for index, found in self._sums.items():
                norms[index] = found.wait()
        self._missing, self._sums = {}, {}
        span = self._layout.span
        for tie in self._state.ties.all:
            copies = [self._state.units[unit].get_parameter(name) for unit, name in tie.places if unit in span]
            if copies:
                square_norm = reduce_tied_gradients(copies, self._groups.tied[tie.stages(self._layout.spans)])
                norms[tie.last_unit] += square_norm if tie.last_unit in span else 0.0
        return norms if self._layout.pipeline == 0 else [0.0] * len(norms)

    def close(self) -> None:
        """Take the hooks off, and let go of sums that broke."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._sums = [], {}

    def _fill(self, norms: list[float]) -> None:
        """Squared norms of gradients that are sums already; one wait for the device for all of them."""
        trained = [p for parameters in self._parameters.values() for p in parameters]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        found = iter(torch.stack(torch._foreach_norm(gradients)).tolist() if gradients else [])
        for index, parameters in self._parameters.items():
            norms[index] = sum(next(found) ** 2 for _ in parameters)

    def _own_parameters(self, index: int) -> list[nn.Parameter]:
        """Those of a unit that train and that no other unit shares."""
        return [
            parameter
            for name, parameter in self._state.units[index].named_parameters()
            if parameter.requires_grad and self._state.ties.find(index, name) is None
        ]

    def _accumulated(self, index: int, parameter: nn.Parameter) -> None:
        if not self._missing:
            return  # a measurement between rounds
        self._missing[index] -= 1
        for unit, missing in self._missing.items():
            if missing:
                return  # those below wait for it, so that all workers start in the same order
            self._start(unit)

    def _start(self, index: int) -> None:
        if index not in self._sums and self._parameters[index]:
            self._sums[index] = _Sum(self._parameters[index], self._group)


class _Sum:
    """The sum of a unit's gradients over a group, at least in float32, under way from the start.

    A parameter that got no gradient counts as zero, since another worker may have one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        self._flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
        self._work = dist.all_reduce(self._flat, group=group, async_op=True) if group.size() > 1 else None

    def wait(self) -> float:
        """Make the sum the parameters' gradients; its squared norm."""
        flat = self._flat
        if self._work is not None:
            self._work.wait()
        parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        return float(torch.dot(flat, flat)) if flat.dtype is torch.float64 else float(flat.double().square().sum())


def reduce_tied_gradients(copies: Sequence[nn.Parameter], group: dist.ProcessGroup) -> float:
    """Give all copies of one parameter the sum of their gradients, at least in float32. Returns its squared norm.

    Args:
        copies: those that this worker holds.
        group: the workers that hold any.
    """
    if not copies[0].requires_grad:
        return 0.0
    total = torch.zeros_like(copies[0], dtype=torch.promote_types(copies[0].dtype, torch.float32))
    for copy in copies:
        if copy.grad is not None:
            total += copy.grad
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    for copy in copies:
        copy.grad = total.to(copy.dtype, copy=True)
    return float(total.double().square().sum())
