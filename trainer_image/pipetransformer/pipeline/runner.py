"""Runs one worker's stage of a pipeline. A change of the stage, by a freeze or a regroup, makes a new runner."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from pipetransformer.cache import ActivationCache, FrozenPrefix
from pipetransformer.data import MicroBatch, Readers, Split, Wanted, weights_of
from pipetransformer.device_copies import to_device
from pipetransformer.errors import RunningModel
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.models import PipelineModel, Unchanged
from pipetransformer.models.metrics import Metric
from pipetransformer.partition import UnitCost

from .batch import Batch, sample_ids_of
from .probe import Probe
from .stage import StageModule, StageSpec
from .static_stages import StaticStages
from .target import Target

_BACKWARD = RunningModel("backward")

#: Micro-batches for each stage that are evaluated together: enough to keep all stages busy.
_EVALUATED_TOGETHER = 2


@dataclass(slots=True)
class RoundSums:
    """Sums over the real samples of a round; zero on all but the last stage."""

    loss: float = 0.0
    weight: float = 0.0


class StageRunner:
    """Trains and evaluates by micro-batches. All workers of the pipeline call the same methods with the same
    micro-batches.

    It is part of no reference cycle, so that its memory and its group's sockets are freed with the last reference.
    """

    def __init__(
        self,
        spec: StageSpec,
        model: PipelineModel,
        units: Sequence[nn.Module],
        cache: ActivationCache | None = None,
        samples_of: Callable[[int], Sequence[int]] = lambda step: (),
        readers: Readers | None = None,
    ) -> None:
        """
        Args:
            spec: the stage.
            model: for shapes and the loss.
            units: the modules of `spec.span`, on the device.
            cache: this worker's cache; only a first stage uses it.
            samples_of: returns the samples that this pipeline trains at a step, to read them ahead.
            readers: readers of this worker's samples; None to read them in the round.
        """
        self.spec = spec
        self._model = model
        self._samples_of = samples_of
        self._readers = readers
        num_frozen = min(max(first_trainable(spec.boundary) - spec.span.start, 0), len(units))
        frozen = units[:num_frozen] if spec.is_first else ()
        if cache is not None:
            # A parameter that is shared with a unit that trains changes the prefix at every step.
            changes = any(parameter.requires_grad for unit in frozen for parameter in unit.parameters())
            cache.use(() if changes else frozen)
        self._prefix = None
        if spec.is_first:
            self._prefix = FrozenPrefix(frozen, device=spec.device, dtype=spec.dtype, cache=cache)
        names = [model.unit_name(index) for index in spec.span]
        head = spec.span[-1] if spec.is_last else None  # the warm-up's model has only one layer
        blocks = [index not in (0, head) for index in spec.span]
        named = dict(zip(names, units, strict=True))
        self._module = StageModule(named, blocks, num_frozen, self._prefix, sends=not spec.is_last)
        self._unchanged = Unchanged(named)
        self._target = Target(model)
        self._stages = StaticStages(spec, model, self._module, self._target)

    def tell(self, passed: Callable[[int], None]) -> None:
        """From now on call `passed` with a unit's index when a micro-batch's backward has passed it. Units whose input
        gradient goes to no unit of this stage are left out."""
        start = self.spec.span.start
        self._module.passed = lambda number: passed(start + number)

    def train(self, step: int, micro_batches: Sequence[MicroBatch], split: Split) -> RoundSums:
        """Forward and backward of every micro-batch; gradients of the summed loss accumulate in the parameters."""
        self._target.take_weights()  # drops those of a broken round
        losses: list[Tensor] = []
        parts = _by_length(micro_batches)
        for number, part in enumerate(parts, start=1):
            following = partial(_after, step, parts[number:], self._samples_of)
            losses += self._run(Batch(split, "train", step, part, following=following, readers=self._readers))
        if not losses:
            return RoundSums()
        # One wait for the device, not one a micro-batch.
        sums = torch.stack([*losses, *self._target.take_weights()]).tolist()
        return RoundSums(math.fsum(sums[: len(losses)]), math.fsum(sums[len(losses) :]))

    def evaluate(
        self,
        micro_batches: Sequence[MicroBatch],
        split: Split,
        metrics: Sequence[Metric] = (),
        *,
        name: str,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Tensor:
        """Evaluate without gradients, a few micro-batches at a time to limit memory. The units keep their mode.

        Args:
            micro_batches: all micro-batches of the pipeline.
            split: the split of their samples.
            metrics: metrics to sum.
            name: the split's name, `train` or `test`, which is part of cache keys.
            goes_on: called after each part (see `lengths_of_parts`). If it returns false, on all workers of the
                pipeline alike, the rest is left out.

        Returns:
            (metrics, 2) sums of numerators and denominators in float64; zero on all but the last stage.
        """
        parts = self._parts(micro_batches)
        modes = [unit.training for unit in self._module.units]
        self._module.eval()
        self._target.begin_scores(metrics)
        with torch.no_grad():
            for part, following in zip(parts, [*parts[1:], []], strict=True):
                wanted = partial(_wanted, None, following)
                self._run(Batch(split, name, None, part, following=wanted, readers=self._readers))
                if not goes_on():
                    break
        for unit, mode in zip(self._module.units, modes, strict=True):
            unit.train(mode)
        return self._target.take_scores()

    def lengths_of_parts(self, micro_batches: Sequence[MicroBatch]) -> list[int | None]:
        """Length of the samples in each part of an evaluation."""
        return [part[0].length for part in self._parts(micro_batches)]

    def first_non_finite(self, step: int, micro_batches: Sequence[MicroBatch], split: Split) -> int | None:
        """Index of the stage's first unit whose output is not finite for one of these micro-batches of `step`; None if
        there is none. Runs forwards only and changes nothing."""
        units, start = list(self._module.units), self.spec.span.start
        finite = torch.ones(len(units), dtype=torch.bool, device=self.spec.device)

        def note(number: int, _: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            finite[number] &= output.isfinite().all()

        handles = [unit.register_forward_hook(partial(note, number)) for number, unit in enumerate(units)]
        self._target.begin_scores(())
        try:
            with torch.no_grad():
                for part in self._parts(micro_batches):
                    self._run(Batch(split, "train", step, part, readers=self._readers, forward_only=True))
        finally:
            for handle in handles:
                handle.remove()
        return next((start + number for number, good in enumerate(finite.tolist()) if not good), None)

    def measure(self, micro_batch_size: int, split: Split) -> list[UnitCost]:
        """Cost of each unit for a micro-batch of that many samples. The backward of frozen units counts 0. Units and
        gradients stay unchanged."""
        spec = self.spec
        ids = tuple(index % len(split) for index in range(micro_batch_size))
        batch = Batch(split, "train", 0, [MicroBatch(ids, micro_batch_size)])
        labels = batch.labels().to(spec.device)
        weights = torch.ones(micro_batch_size, dtype=spec.dtype, device=spec.device)

        def loss(output: Tensor) -> Tensor:
            return self._model.loss(output, labels, weights)[0]

        x = batch.inputs(batch.sample_ids).to(spec.device)
        if not spec.is_first:
            generator = torch.Generator(spec.device).manual_seed(0)
            shape = self._model.activation_shape(micro_batch_size)
            x = torch.randn(shape, generator=generator, dtype=spec.dtype, device=spec.device)
        units, finish = list(self._module.units), loss if spec.is_last else None
        return Probe(units, self._module.num_frozen, finish, batch.context(spec, ids), spec.device).measure(x)

    def _parts(self, micro_batches: Sequence[MicroBatch]) -> list[Sequence[MicroBatch]]:
        """Parts of micro-batches of one length, small enough for the memory."""
        most = _EVALUATED_TOGETHER * self.spec.stages
        return [some[start : start + most] for some in _by_length(micro_batches) for start in range(0, len(some), most)]

    def _run(self, batch: Batch) -> list[Tensor]:
        """Run the batch. Returns its micro-batches' losses on the last stage.

        Raises:
            SpecError: a forward changed a parameter or a buffer.
        """
        with self._unchanged.over():
            return self._run_forwards(batch)

    def _run_forwards(self, batch: Batch) -> list[Tensor]:
        spec = self.spec
        self._module.upcoming = [batch.context(spec, micro_batch.sample_ids) for micro_batch in batch.micro_batches]
        if spec.is_last:
            weights = weights_of(batch.micro_batches, spec.dtype)
            self._target.set(to_device(batch.labels(), spec.device), to_device(weights, spec.device))
        if self._prefix is not None:
            ids = [micro_batch.sample_ids for micro_batch in batch.micro_batches]
            self._prefix.begin(batch.source(spec), ids)
        shape = self._model.activation_shape(batch.micro_batch_size, batch.length)
        self._module.activation = shape, spec.dtype
        if spec.stages > 1:
            return self._stages.run(batch)
        size = batch.micro_batch_size
        starts = range(0, len(batch.sample_ids), size)
        return [self._alone(slice(start, start + size), training=batch.training) for start in starts]

    def _alone(self, rows: slice, *, training: bool) -> Tensor:
        """Run one micro-batch on a worker that holds the whole model."""
        output = self._module(None)
        if not training:
            return self._target.score(output, rows)
        loss = self._target.loss(output, rows)
        trains = loss.requires_grad or any(parameter.requires_grad for parameter in self._module.parameters())
        if trains:  # not if all layers are frozen and the head has no parameters
            with _BACKWARD:
                torch.autograd.backward(loss)
        return loss.detach()


def _after(step: int, rest: Sequence[Sequence[MicroBatch]], samples_of: Callable[[int], Sequence[int]]) -> list[Wanted]:
    """The samples after a part of a step: the rest of the step, and the next step."""
    later = [wanted for part in rest for wanted in _wanted(step, part)]
    return later + [(step + 1, sample) for sample in samples_of(step + 1)]


def _wanted(step: int | None, micro_batches: Sequence[MicroBatch]) -> list[Wanted]:
    return [(step, sample) for sample in sample_ids_of(micro_batches)]


def _by_length(micro_batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    return [list(some) for _, some in groupby(micro_batches, lambda micro_batch: micro_batch.length)]
