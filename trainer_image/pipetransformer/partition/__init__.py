"""How layers are cut into stages, and what each number of stages would cost: the ground of the operator's choice."""

from .contiguous import MemoryBound, MemoryBoundError, partition
from .costs import UnitTimes, layer_costs
from .memory import paper_bytes
from .offers import StepModel, make_offers, offered_stages
from .spans import spans

__all__ = [
    "MemoryBound",
    "MemoryBoundError",
    "StepModel",
    "UnitTimes",
    "layer_costs",
    "make_offers",
    "offered_stages",
    "paper_bytes",
    "partition",
    "spans",
]
