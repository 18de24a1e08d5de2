"""Times single units on one micro-batch, between rounds.

A probe and not hooks in the training itself: it also times what the present boundary never runs (each unit as the first
that trains), at sizes that the present layout never uses, and costs nothing in the rounds.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..models import MicroBatchContext, run_unit, set_micro_batch
from ..partition import UnitCost

_REPEATS = 3


class Probe:
    """Measures units on `device` with micro-batches of one context. Times are medians, after a warm-up."""

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
                runs = [self._run(unit, x, [], finish) for _ in range(1 + _REPEATS)]
            return UnitCost(statistics.median(run.forward for run in runs[1:]), 0.0, 0.0), runs[-1].output
        weights = [parameter for parameter in unit.parameters() if parameter.requires_grad]
        wanted: list[Tensor] = list(weights)
        if x.is_floating_point():
            x = x.detach().requires_grad_()
            wanted.append(x)
        saved = _SavedBytes(unit)
        with saved:
            self._run(unit, x, wanted, finish)
        runs = [self._run(unit, x, wanted, finish) for _ in range(_REPEATS)]
        first = self._run(unit, x.detach(), weights, finish)
        forward = statistics.median(run.forward for run in runs)
        backward = statistics.median(run.backward for run in runs)
        return UnitCost(forward, backward, min(first.backward, backward), saved.total), first.output

    def _run(
        self, unit: nn.Module, x: Tensor, wanted: Sequence[Tensor], finish: Callable[[Tensor], Tensor] | None
    ) -> "_Run":
        """A forward, and a backward to `wanted`."""
        watch = _Stopwatch(self._device)
        set_micro_batch(self._context)
        watch.mark()
        y = run_unit(unit, x)
        result = y if finish is None else finish(y)
        watch.mark()
        if wanted and result.requires_grad:
            torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)
        watch.mark()
        forward, backward = watch.laps()
        return _Run(forward, backward, y.detach())


@dataclass(frozen=True, slots=True)
class _Run:
    """Seconds of a unit's forward and backward, and its output without a graph."""

    forward: float
    backward: float
    output: Tensor


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that forwards keep for their backwards, without the unit's parameters."""

    def __init__(self, unit: nn.Module) -> None:
        own = {parameter.untyped_storage().data_ptr() for parameter in unit.parameters()}
        kept = self._kept = dict[int, int]()

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(keep, lambda tensor: tensor)

    @property
    def total(self) -> int:
        return sum(self._kept.values())


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
