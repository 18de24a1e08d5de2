"""A module on a virtual device: it computes for real, and then waits until its declared time has passed.

Marks in the autograd graph find what a backward does. The mark of the output notes when it begins. The mark of the
input takes the time of the input's gradient, and the mark of a weight the time of the weights' gradients. So a backward
in one piece takes both times, each half takes its own, and a unit whose input wants no gradient takes only the second.
"""

import time

import torch
from torch import Tensor, nn

from pipetransformer.models.context import current_micro_batch

from .calibration import UnitTimes

#: A sleep ends this much late at most by the timer alone. More comes from other processes, and counts as time.
_TIMER_SECONDS = 0.0003


class _Waits:
    """Waits that give the processor up. What a sleep ends late, the next wait is shorter.

    So units take their declared times in the sum, and no worker holds a core while it waits.
    """

    def __init__(self) -> None:
        self._late = 0.0

    def until(self, due: float) -> None:
        """Return about when `time.perf_counter()` is `due`."""
        early = due - self._late
        remaining = early - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
            self._late = min(time.perf_counter() - early, _TIMER_SECONDS)
        else:
            self._late = min(self._late, -remaining)


_waits = _Waits()


class Timed(nn.Module):
    """`inner`, whose forward and halves of a backward take at least their declared times.

    A forward without gradients, such as a frozen unit's, takes the forward's time alone. On the meta device nothing
    takes time. Samples come first in the input, then tokens if it has three dimensions.
    """

    def __init__(self, inner: nn.Module, times: UnitTimes) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.ones(()))
        self._times = times

    def forward(self, x: Tensor) -> Tensor:
        begun = time.perf_counter()
        seconds = self._seconds(x)
        backward = _Backward(seconds * self._times.input_gradient, seconds * self._times.weight_gradient)
        y = self.inner(_Mark.apply(x, backward.take_input_time))  # type: ignore[no-untyped-call]
        y = _Mark.apply(y, backward.begin)  # type: ignore[no-untyped-call]
        # The product comes last, because torch cannot split a backward that begins at a view.
        output: Tensor = y * _Mark.apply(self.gain, backward.take_weight_time)  # type: ignore[no-untyped-call]
        _waits.until(begun + seconds)
        return output

    def _seconds(self, x: Tensor) -> float:
        if x.is_meta:
            return 0.0
        tokens = x.shape[1] if x.dim() > 2 else 0
        return self._times.forward(len(x), tokens, _earlier_tokens() if tokens else 0)


def _earlier_tokens() -> int:
    """Tokens of the same samples before the present slice; 0 without slices."""
    tokens = getattr(current_micro_batch(), "tokens", None)
    return 0 if tokens is None else int(tokens.start)


class _Backward:
    """The backward of one forward, perhaps in halves. Each part of it begins where the part before has ended."""

    __slots__ = ("_input_seconds", "_since", "_weight_seconds")

    def __init__(self, input_seconds: float, weight_seconds: float) -> None:
        self._input_seconds, self._weight_seconds = input_seconds, weight_seconds
        self._since: float | None = None

    def begin(self) -> None:
        self._since = time.perf_counter()

    def take_input_time(self) -> None:
        """Autograd comes here last, because the input's mark is the oldest node. Another half begins anew."""
        self._take(self._input_seconds)
        self._since = None

    def take_weight_time(self) -> None:
        self._take(self._weight_seconds)

    def _take(self, seconds: float) -> None:
        begun = time.perf_counter() if self._since is None else self._since
        _waits.until(begun + seconds)
        self._since = time.perf_counter()


class _Mark(torch.autograd.Function):
    """The identity, whose backward calls a function before it passes the gradient on."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, on_backward: object) -> Tensor:
        ctx.on_backward = on_backward  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.on_backward()  # type: ignore[attr-defined]
        return gradients[0], None
