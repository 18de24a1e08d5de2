"""The paper's estimate of a stage's memory: its parameter bytes, where those of frozen layers count a sixth."""

import math
from collections.abc import Sequence
from fractions import Fraction

from pipetransformer.freeze.boundary import first_trainable

from .contiguous import partition

#: Memory of a frozen layer relative to an active one, as measured in PipeTransformer, section 3.2.
LAMBDA_FROZEN = Fraction(1, 6)


def paper_bytes(unit_param_bytes: Sequence[int], boundary: int, stages: int) -> int:
    """Bytes of the largest stage, after the best contiguous split of the units that train over `stages` workers.

    All frozen units (with the embedding, if a layer is frozen) stay on the first worker and count `LAMBDA_FROZEN` of
    their size (PipeTransformer, Algorithm 1 and Eq. 2). If fewer units train than there are stages, some workers hold
    nothing.

    Args:
        unit_param_bytes: parameter bytes of embedding, layers and head (L + 2 items).
        boundary: number of frozen layers.
        stages: number of stages (K).
    """
    first = first_trainable(boundary)
    frozen = sum(unit_param_bytes[:first])
    active = [float(size) for size in unit_param_bytes[first:]]
    active[0] += float(LAMBDA_FROZEN * frozen)
    runs = partition(active, min(stages, len(active)))
    return math.ceil(max(sum(active[unit] for unit in run) for run in runs))
