"""Measures how similar samples look to one unit; a freeze policy may ask for this in addition to gradient norms."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipetransformer.data import MicroBatch, Split, weights_of
from pipetransformer.pipeline import StageRunner


def similarities(
    runner: StageRunner, unit: nn.Module | None, micro_batches: Sequence[MicroBatch], split: Split, *, tells: bool
) -> list[float]:
    """Return normalised similarities of the samples by the outputs of `unit` (Tung and Mori, ICCV 2019, eq. 2 and 3).

    All workers of a pipeline call this with the same micro-batches, because an evaluation runs through all stages.

    Args:
        runner: of this worker's stage.
        unit: the unit to look at; None if this worker does not hold it.
        micro_batches: n samples; padding does not count.
        split: the training split that they come from.
        tells: whether this worker's pipeline measures.

    Returns:
        The (n, n) matrix, flat, with normalised rows; zeros on all workers except one.
    """
    real = weights_of(micro_batches, torch.float64) > 0
    nothing = [0.0] * int(real.sum()) ** 2
    if not tells:
        return nothing
    if unit is None:
        runner.evaluate(micro_batches, split, name="train")
        return nothing
    outputs: list[Tensor] = []
    # Clone, because the next unit may change its input in place.
    handle = unit.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach().clone()))
    try:
        runner.evaluate(micro_batches, split, name="train")
    finally:
        handle.remove()
    longest = max(output.shape[1] for output in outputs)  # samples may come in several lengths
    padded = [
        nn.functional.pad(output, (0, 0) * (output.dim() - 2) + (0, longest - output.shape[1])) for output in outputs
    ]
    features = torch.cat(padded).cpu()[real].flatten(1).double()
    matrix: list[float] = nn.functional.normalize(features @ features.T, dim=1).flatten().tolist()
    return matrix
