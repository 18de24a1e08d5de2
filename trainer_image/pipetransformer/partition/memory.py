"""The paper's stand-in for a stage's memory: parameter bytes, frozen ones counted at a sixth."""

import math
from collections.abc import Sequence
from fractions import Fraction

from .contiguous import partition

#: Memory of a frozen layer against an active one (PipeTransformer, section 3.2, measured there).
LAMBDA_FROZEN = Fraction(1, 6)


def paper_bytes(
    unit_param_bytes: Sequence[int], boundary: int, stages: int, lambda_frozen: float | Fraction = LAMBDA_FROZEN
) -> int:
    """Bytes of the largest stage after the best contiguous split of the active units over `stages` workers.

    The frozen prefix (with the embedding as soon as one block is frozen) stays on the first worker and counts
    `lambda_frozen` of its size (PipeTransformer, Algorithm 1 and Eq. 2). Units that are fewer than stages leave
    workers empty.

    Args:
        unit_param_bytes: parameter bytes of embedding, blocks and head (L + 2 items).
        boundary: frozen blocks.
        stages: pipeline length (K).
    """
    first_active = boundary + 1 if boundary else 0
    frozen = sum(unit_param_bytes[:first_active])
    active = [float(size) for size in unit_param_bytes[first_active:]]
    active[0] += float(lambda_frozen * frozen)
    runs = partition(active, min(stages, len(active)))
    return math.ceil(max(sum(active[unit] for unit in run) for run in runs))
