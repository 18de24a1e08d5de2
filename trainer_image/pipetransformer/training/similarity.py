"""Measures how similar a unit's outputs are for different samples. A freeze policy may use this together with gradient
norms."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipetransformer.data import MicroBatch, Split, weights_of
from pipetransformer.pipeline import StageRunner


def similarities(
    runner: StageRunner, unit: nn.Module | None, micro_batches: Sequence[MicroBatch], split: Split, *, tells: bool
) -> list[float]:
    """Return the similarities between samples, computed from the outputs of `unit` (Tung and Mori, ICCV 2019, eq. 2
    and 3).

    All workers of a pipeline call this with the same micro-batches, because the forwards run through all stages.

    Args:
        runner: runs this worker's stage.
        unit: the unit whose outputs are compared; None if this worker does not hold it.
        micro_batches: micro-batches with n samples in total, without padding.
        split: the training split of these samples.
        tells: whether this worker's pipeline measures; one pipeline is enough. If not, the result is all zeros.

    Returns:
        An (n, n) matrix with normalised rows, as a flat list. It is all zeros except on the worker of the measuring
        pipeline that holds `unit`, so a sum over all workers gives the matrix.
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
