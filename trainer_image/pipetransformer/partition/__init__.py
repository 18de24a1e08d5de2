"""Cuts layers into stages and predicts what a step costs at each number of stages. The operator chooses the number."""

from .candidates import AUTO, Candidate, Option
from .contiguous import MemoryBound, MemoryBoundError, partition
from .costs import ModelCosts, UnitCost, assumed_costs, measured_sizes, training_seconds
from .cut import Cut
from .memory import paper_bytes
from .offers import ASSUMED_PAUSE_SECONDS, PredictedLayout, make_offers, offered_stages
from .predict import Predicted
from .spans import cut_units, spans
from .step_model import StepModel

__all__ = [
    "ASSUMED_PAUSE_SECONDS",
    "AUTO",
    "Candidate",
    "Cut",
    "MemoryBound",
    "MemoryBoundError",
    "ModelCosts",
    "Option",
    "Predicted",
    "PredictedLayout",
    "StepModel",
    "UnitCost",
    "assumed_costs",
    "cut_units",
    "make_offers",
    "measured_sizes",
    "offered_stages",
    "paper_bytes",
    "partition",
    "spans",
    "training_seconds",
]
