"""Probes the spans of a worker between rounds: measures their units, and checks what the units promise."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pipetransformer.data import MicroBatch, Split
from pipetransformer.errors import SpecError
from pipetransformer.models import TokenSlice
from pipetransformer.partition import UnitCost
from pipetransformer.schedules import TeraPipe

from .batch import Batch
from .probe import Probe
from .runner import StageRunner


class SpanProbes:
    """Probes the units of a worker's spans with the first samples of a split. All workers of the pipeline must call the
    same methods with the same arguments."""

    def __init__(self, runner: StageRunner, split: Split) -> None:
        self._runner, self._split = runner, split
        self._spec, self._model, self._units = runner.spec, runner.model, runner.units

    def measure(self, micro_batch_size: int) -> list[UnitCost]:
        """Cost of each unit of this worker for a micro-batch of `micro_batch_size` samples. Frozen units have a
        backward of 0 seconds. Units and gradients stay unchanged."""
        return [cost for probe, x in self._probes(micro_batch_size) for cost in probe.measure(x)]

    def measure_slices(
        self, micro_batch_size: int, slices: Sequence[tuple[int, int]]
    ) -> list[tuple[list[float], list[float]]]:
        """Measure slices of tokens. Returns, for each unit of this worker, the seconds of its forward and of its
        backward for each slice.

        Args:
            micro_batch_size: number of samples in the micro-batch.
            slices: (length, tokens before it) of each slice.
        """
        tokens = [TokenSlice(context, context + length, context + length) for length, context in slices]
        return [unit for probe, x in self._probes(micro_batch_size) for unit in probe.measure_slices(x, tokens)]

    def check_slices(self) -> None:
        """With TeraPipe, check that each unit keeps the promise of `slices_tokens`.

        Raises:
            SpecError: a unit computes something else in slices of tokens than on whole samples.
        """
        if not isinstance(self._spec.schedule, TeraPipe):
            return
        for (probe, x), span in zip(self._probes(1), self._spec.own_spans.values(), strict=True):
            if (unlike := probe.first_unlike_in_slices(x)) is not None:
                raise SpecError(
                    "spec.pipeline.schedule",
                    f"TeraPipe would train another model: {self._model.unit_name(span[unlike])} computes something else"
                    " in slices of tokens than on whole samples. See Slices of tokens in docs/models.md",
                )

    def check_samples(self) -> None:
        """Check that no unit mixes samples in evaluation mode.

        Raises:
            SpecError: a unit computes something else for two samples together than for each alone.
        """
        with self._runner.evaluating():
            # First as in training, because that finds other faults, and has better words for them.
            two = MicroBatch((0, 1 % len(self._split)), 2)
            self._runner.forward(Batch(self._spec, self._split, "train", 0, [two], cached=False))
            for (probe, x), span in zip(self._probes(2), self._spec.own_spans.values(), strict=True):
                if (mixing := probe.first_that_mixes(x)) is not None:
                    raise SpecError(
                        "spec.model",
                        f"the output of {self._model.unit_name(span[mixing])} for a sample depends on the other samples"
                        " of its micro-batch, which the layout decides: compute each sample alone. Modules with"
                        " batch_first need batch_first=True",
                    )

    def _probes(self, micro_batch_size: int) -> Iterator[tuple[Probe, Tensor]]:
        """For each span of this worker, a probe and the input of its first unit."""
        spec, split = self._spec, self._split
        ids = tuple(index % len(split) for index in range(micro_batch_size))
        batch = Batch(spec, split, "train", 0, [MicroBatch(ids, micro_batch_size)], cached=False)
        inputs = {0: batch.inputs(ids).to(spec.device)} if len(spec.spans) == 1 else self._inputs_of_spans(batch)
        labels = batch.labels().to(spec.device)
        weights = torch.ones(micro_batch_size, dtype=spec.dtype, device=spec.device)

        def loss(output: Tensor, tokens: TokenSlice | None = None) -> Tensor:
            wanted = labels if tokens is None else labels[:, tokens.start : tokens.stop]
            return self._model.loss(output, wanted, weights)[0]

        for index, span in spec.own_spans.items():
            units, finish = [self._units[unit] for unit in span], loss if index == len(spec.spans) - 1 else None
            yield Probe(units, spec.num_frozen(span), finish, batch.context(ids), spec.device), inputs[index]

    def _inputs_of_spans(self, batch: Batch) -> dict[int, Tensor]:
        """Run a micro-batch forward through the pipeline. Returns the input of each span of this worker.

        Made-up inputs would not do, because layers may compute by values, such as token ids in the hidden states.
        """
        inputs: dict[int, Tensor] = {}

        def note(index: int, _: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs[index] = given[0].clone()  # the unit may change it in place

        first_units = {index: self._units[span.start] for index, span in self._spec.own_spans.items()}
        handles = [unit.register_forward_pre_hook(partial(note, index)) for index, unit in first_units.items()]
        try:
            self._runner.forward(batch)
        finally:
            for handle in handles:
                handle.remove()
        return inputs
