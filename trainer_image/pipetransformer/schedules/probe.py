"""Times single units on one micro-batch, between rounds.

A probe and not hooks in the training itself: it also times what the present boundary never runs (each unit as the first
that trains), at sizes that the present layout never uses, and costs nothing in the rounds.
"""

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..models import MicroBatchContext, set_micro_batch
from ..partition import UnitCost

_REPEATS = 3


class Probe:
    """Measures units on `device` with micro-batches of one context. Every time is a median, after a warm-up."""

    def __init__(self, device: torch.device, context: MicroBatchContext) -> None:
        self._device = device
        self._context = context

    @contextlib.contextmanager
    def without_trace(self, module: nn.Module) -> Iterator[None]:
        """Puts back buffers and the random state, which forwards may change; gradients never reach the parameters."""
        before = [(buffer, buffer.clone()) for buffer in module.buffers()]
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                yield
        except Exception as error:
            raise ModelError(f"measuring failed: {type(error).__name__}: {error}") from error
        finally:
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)

    def measure(
        self, unit: nn.Module, x: Tensor, *, frozen: bool, finish: Callable[[Tensor], Tensor] | None
    ) -> tuple[UnitCost, Tensor]:
        """Cost of a unit, and its output without a graph.

        Args:
            unit: as it trains, on the device.
            x: its input.
            frozen: whether it runs without a graph: then only the forward is measured.
            finish: from the unit's output to the loss, for the last unit.
        """
        if frozen:
            with torch.no_grad():
                forward, _, y = self._median(unit, x, [], finish)
            return UnitCost(forward, 0.0, 0.0), y
        weights = [parameter for parameter in unit.parameters() if parameter.requires_grad]
        forward, weights_backward, y = self._median(unit, x, weights, finish)
        if not x.is_floating_point():
            backward = weights_backward
        else:
            x = x.detach().requires_grad_()
            forward, backward, y = self._median(unit, x, [x, *weights], finish)
        saved = self._saved_bytes(unit, x)
        return UnitCost(forward, backward, weights_backward, saved), y

    def _median(
        self, unit: nn.Module, x: Tensor, wanted: Sequence[Tensor], finish: Callable[[Tensor], Tensor] | None
    ) -> tuple[float, float, Tensor]:
        """Seconds of a forward, and of a backward to `wanted`; the output."""
        forwards, backwards = [], []
        for repeat in range(_REPEATS + 1):
            watch = _Stopwatch(self._device)
            watch.mark()
            y = self._forward(unit, x)
            result = y if finish is None else finish(y)
            watch.mark()
            if wanted and result.requires_grad:
                torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)
            watch.mark()
            if repeat > 0:
                forward, backward = watch.laps()
                forwards.append(forward)
                backwards.append(backward)
        return statistics.median(forwards), statistics.median(backwards), y.detach()

    def _forward(self, unit: nn.Module, x: Tensor) -> Tensor:
        set_micro_batch(replace(self._context, draws=Counter()))
        return unit(x)  # type: ignore[no-any-return]

    def _saved_bytes(self, unit: nn.Module, x: Tensor) -> int:
        """Bytes that a forward keeps for its backward, without the parameters."""
        kept: dict[int, int] = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in unit.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = self._forward(unit, x)
        del y
        return sum(kept.values())


class _Stopwatch:
    """Marks in the work of a device: events of the present stream on CUDA, the wall clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Seconds from each mark to the next."""
        if self._cuda:
            self._events[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
