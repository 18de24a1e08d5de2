"""A module on a virtual device: it computes for real, and then waits until its declared time has passed.

Marks in the autograd graph find what a backward does. The mark of the output notes when it begins. The mark of the
input takes the time of the input's gradient, and the mark of a weight the time of the weights' gradients. So a backward
in one piece takes both times, each half takes its own, and a unit whose input wants no gradient takes only the second.

Units that follow each other in one computation run back to back, as launches in the queue of an accelerator do: the
next one begins when the last one was due, although the host woke later. The host's time counts before and after.
"""

import time

import torch
from torch import Tensor, nn

from pipetransformer.models.context import current_micro_batch

from .calibration import UnitTimes

#: Longest time of the host between two units that a queue of launches hides.
_QUEUED_SECONDS = 0.005
#: Name of the attribute of a unit's output that tells the next unit of it.
_LAST = "_virtual_device_last"


class Timed(nn.Module):
    """`inner`, whose forward and halves of a backward take at least their declared times.

    A forward without gradients, such as a frozen unit's, takes the forward's time alone. On the meta device nothing
    takes time. Samples come first in the input, then tokens if it has three dimensions.
    """

    def __init__(self, inner: nn.Module, times: UnitTimes) -> None:
        super().__init__()
        self.inner = inner
        self.shift = nn.Parameter(torch.zeros(1))
        self._times = times

    def forward(self, x: Tensor) -> Tensor:
        last: _Pass | None = getattr(x, _LAST, None)
        begun = _begun(None if last is None else last.end)
        seconds = self._seconds(x)
        own = _Pass(seconds * self._times.input_gradient, seconds * self._times.weight_gradient, last)
        y = self.inner(_Mark.apply(x, own.take_input_time))  # type: ignore[no-untyped-call]
        y = _Mark.apply(y, own.begin_backward)  # type: ignore[no-untyped-call]
        # The sum comes last, because torch cannot split a backward that begins at a view.
        output: Tensor = y + _Mark.apply(self.shift, own.take_weight_time)  # type: ignore[no-untyped-call]
        own.end = _wait(begun, seconds)
        setattr(output, _LAST, own)
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


def _begun(last_end: float | None) -> float:
    """When a unit begins: with the end of the last one, or now if that is not just over."""
    now = time.perf_counter()
    return now if last_end is None or now - last_end > _QUEUED_SECONDS else last_end


def _wait(begun: float, seconds: float) -> float:
    """Give the processor up until the seconds have passed. Returns when the device ended, which is before the host
    wakes."""
    due, now = begun + seconds, time.perf_counter()
    if due > now:
        time.sleep(due - now)
    return max(due, now)


class _Pass:
    """A forward and its backward, perhaps in halves. Each part of a backward begins where the part before has ended.

    Attributes:
        end: when the forward ended.
    """

    __slots__ = ("_input_seconds", "_last", "_since", "_weight_seconds", "end")

    def __init__(self, input_seconds: float, weight_seconds: float, last: "_Pass | None") -> None:
        """
        Args:
            input_seconds: of the input's gradient.
            weight_seconds: of the weights' gradients.
            last: of the unit before in this computation, whose backward follows; None before the first one.
        """
        self.end = 0.0
        self._input_seconds, self._weight_seconds, self._last = input_seconds, weight_seconds, last
        self._since: float | None = None

    def begin_backward(self) -> None:
        self._since = _begun(self._since)

    def take_input_time(self) -> None:
        """Autograd comes here last, because the input's mark is the oldest node. Another half begins anew."""
        self._take(self._input_seconds)
        if self._last is not None:
            self._last._since = self._since
        self._since = None

    def take_weight_time(self) -> None:
        self._take(self._weight_seconds)

    def _take(self, seconds: float) -> None:
        self._since = _wait(_begun(self._since), seconds)


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
