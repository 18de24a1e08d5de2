"""Runs single units between rounds: measures how long each takes on one micro-batch, and whether slices of tokens give
the same.

Hooks in the training would slow the rounds down. They also could not measure other micro-batch sizes, or a unit's
backward as the first unit that trains.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from pipetransformer.errors import RunningModel
from pipetransformer.models import MicroBatchContext, TokenSlice, run_unit
from pipetransformer.models.off_device import is_off, on_device
from pipetransformer.partition import UnitCost

_REPEATS = 3
#: Share of the largest output by which that of a sample alone may differ: accelerators use other kernels for it.
_MIXED = 0.01


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory, as after `expand`. torch lets nobody write such a tensor in place."""
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(frozen=True)
class Probe:
    """Measures the units of a span.

    Each time is the median over several passes through all units, after one pass to warm up. So a short disturbance
    affects one pass, but not the result of a unit.

    Attributes:
        units: the units in order; some may be kept in host memory.
        num_frozen: number of leading units that are frozen. Only their forward is measured.
        finish: computes the loss from the last unit's output; None except on the last span.
        context: the context that units get with the micro-batch.
        device: the units' device.
    """

    units: Sequence[nn.Module]
    num_frozen: int
    finish: Callable[..., Tensor] | None
    context: MicroBatchContext
    device: torch.device

    def measure(self, x: Tensor) -> list[UnitCost]:
        """Cost of each unit. `x` is the first unit's input. Units, gradients and random state stay unchanged.

        Raises:
            ModelError: a unit failed.
            DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        """
        saved = [_SavedBytes(unit) for unit in self.units]
        with RunningModel("measuring"), self._without_trace():  # on copies, because the first unit may change its input
            self._pass(x.clone(), to_input=True, saved=saved)
            forwards, backwards = zip(*[self._pass(x.clone(), to_input=True) for _ in range(_REPEATS)], strict=True)
            weights_backwards = [self._pass(x.clone(), to_input=False)[1] for _ in range(_REPEATS)]
        times = zip(_medians(forwards), _medians(backwards), _medians(weights_backwards), strict=True)
        return [UnitCost(f, b, min(w, b), kept.total) for (f, b, w), kept in zip(times, saved, strict=True)]

    def measure_slices(self, x: Tensor, slices: Sequence[TokenSlice]) -> list[tuple[list[float], list[float]]]:
        """Seconds of each unit's forward and backward for each slice of tokens of the first unit's input `x`.

        Raises:
            ModelError: a unit failed.
            DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        """
        seconds = []
        with RunningModel("measuring"), self._without_trace():
            for index, unit in enumerate(self.units):
                with on_device(unit, self.device):
                    seconds.append(self._slices_of(index, x, slices))
                    with torch.no_grad():
                        x = run_unit(unit, x.clone(), self.context.before_unit())
        return seconds

    def first_unlike_in_slices(self, x: Tensor) -> int | None:
        """The first unit whose outputs in slices of tokens differ from those of the whole sample by more than rounding.

        Only the first position of each later slice counts. A layer that misses earlier slices is wrong there, and so is
        one that sees later slices. Rounding may change the choice of a layer, such as the expert of a token, but hardly
        ever at just these positions.

        Args:
            x: (1, positions, ...) the first unit's input.

        Returns:
            The unit's place in `units`; None if all compute the same.

        Raises:
            ModelError: a unit failed.
            DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        """
        if self.context.lengths is not None:
            x = x[:, : int(self.context.lengths[0])]
        lengths = [len(part) for part in torch.arange(x.shape[1]).tensor_split(min(3, x.shape[1]))]
        starts = list(accumulate(lengths))[:-1]
        with RunningModel("a slice of tokens"), self._without_trace(), torch.no_grad():
            for index, unit in enumerate(self.units):
                context = replace(self.context.before_unit(), autocast=None, memory={})
                parts = zip(torch.split(x, lengths, dim=1), context.in_slices(lengths), strict=True)
                with on_device(unit, self.device):
                    outputs = torch.cat([run_unit(unit, part.clone(), each) for part, each in parts], dim=1)
                    x = run_unit(unit, x.clone(), context)
                if outputs.shape != x.shape or not _is_close(outputs[:, starts], x[:, starts]):
                    return index
        return None

    def first_that_mixes(self, x: Tensor) -> int | None:
        """The first unit that computes something else for samples together than for each alone, beyond rounding.

        Args:
            x: (samples, ...) the first unit's input, of at least two samples.

        Returns:
            The unit's place in `units`; None if no unit does, or only one whose output is not of one row a sample.

        Raises:
            ModelError: a unit failed.
            DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        """
        together = replace(self.context, autocast=None)
        each = [together.of_samples(slice(place, place + 1)) for place in range(len(x))]
        with RunningModel("single samples"), self._without_trace(), torch.no_grad():
            for index, unit in enumerate(self.units):
                with on_device(unit, self.device):
                    alone = [run_unit(unit, x[place : place + 1].clone(), one) for place, one in enumerate(each)]
                    x = run_unit(unit, x.clone(), together.before_unit())
                if len(x) != len(each):
                    return None
                if torch.cat(alone).shape != x.shape or not _is_close(torch.cat(alone), x, share=_MIXED):
                    return index
        return None

    def _slices_of(self, index: int, x: Tensor, slices: Sequence[TokenSlice]) -> tuple[list[float], list[float]]:
        laps = [[self._slice(index, x, tokens) for _ in range(_REPEATS + 1)][1:] for tokens in slices]
        medians = [_medians(some) for some in laps]
        return [forward for forward, _ in medians], [backward for _, backward in medians]

    def _slice(self, index: int, x: Tensor, tokens: TokenSlice) -> list[float]:
        """Seconds of one unit's forward and backward for one slice. The tokens before the slice run first, unmeasured,
        because the slice attends to them."""
        unit, trains = self.units[index], index >= self.num_frozen
        before = TokenSlice(0, tokens.start, tokens.total)
        context = replace(self.context.before_unit(), tokens=tokens, memory={})
        if tokens.start:
            with torch.no_grad():
                run_unit(unit, x[:, : tokens.start].clone(), replace(context, tokens=before, draws={}, kept={}))
        part = x[:, tokens.start : tokens.stop].detach().clone()
        part.requires_grad_(trains and part.is_floating_point())
        wanted = [tensor for tensor in (part, *unit.parameters()) if tensor.requires_grad] if trains else []
        laps = _Laps(self.device)
        with torch.set_grad_enabled(trains):
            laps.mark()
            result = run_unit(unit, part, context)
            if self.finish is not None and index == len(self.units) - 1:
                result = self.finish(result, tokens)
            laps.mark()
            if wanted and result.requires_grad:
                torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)
            laps.mark()
        forward, backward = laps.seconds()
        return [forward, backward if trains else 0.0]

    @contextlib.contextmanager
    def _without_trace(self) -> Iterator[None]:
        """Restore buffers and the random state, which forwards may change. Other state needs no care: gradients never
        reach the parameters, and a unit in host memory computes with copies of its tensors."""
        there = (buffer for unit in self.units if not is_off(unit) for buffer in unit.buffers())
        before = [(buffer, buffer.clone()) for buffer in there if not _is_expanded(buffer)]
        try:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                yield
        finally:
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)

    def _pass(
        self, x: Tensor, *, to_input: bool, saved: Sequence["_SavedBytes"] = ()
    ) -> tuple[list[float], list[float]]:
        """Seconds of each unit's forward and of its backward. The backward computes the gradients of the weights, and
        with `to_input` also that of the unit's input. `saved` counts the bytes that forwards keep."""
        forwards, backwards = [], []
        for index, unit in enumerate(self.units):
            trains = index >= self.num_frozen
            x = x.detach().requires_grad_(to_input and trains and x.is_floating_point())
            wanted = [tensor for tensor in (x, *unit.parameters()) if tensor.requires_grad] if trains else []
            laps = _Laps(self.device)
            with (
                on_device(unit, self.device),
                torch.set_grad_enabled(trains),
                saved[index] if saved else contextlib.nullcontext(),
            ):
                if saved and trains:
                    saved[index].keep(x)
                laps.mark()
                x = run_unit(unit, x, self.context)
                result = x
                if self.finish is not None and index == len(self.units) - 1:
                    result = self.finish(x)
                laps.mark()
                if wanted and result.requires_grad:
                    torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)
                laps.mark()
            forward, backward = laps.seconds()
            forwards.append(forward)
            backwards.append(backward if trains else 0.0)
        return forwards, backwards


def _medians(passes: Sequence[Sequence[float]]) -> list[float]:
    """The median over the passes at each place."""
    return [statistics.median(times) for times in zip(*passes, strict=True)]


def _is_close(one: Tensor, other: Tensor, share: float | None = None) -> bool:
    """Whether the tensors differ by no more than rounding, or than this share of the largest value. NaN equals
    itself."""
    largest = other.nan_to_num().abs().amax().item() if other.numel() else 0.0
    bound = (math.sqrt(torch.finfo(other.dtype).eps) if share is None else share) * largest
    return torch.allclose(one, other, rtol=0, atol=bound, equal_nan=True)


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that a forward keeps for its backward, without the unit's parameters."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__(self.keep, lambda tensor: tensor)
        self._own = {parameter.untyped_storage().data_ptr() for parameter in unit.parameters()}
        self._kept: dict[int, int] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor's memory, once."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        return sum(self._kept.values())


class _Laps:
    """Marks points in a device's work: events in the current stream on CUDA, the wall clock on the CPU."""

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

    def seconds(self) -> list[float]:
        """Seconds from each mark to the next."""
        if self._cuda:
            self._events[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
