"""How layers are cut into stages, and what each number of stages would cost: the ground of the operator's choice."""

from .balance import balance
from .costs import UnitTimes, layer_costs
from .memory import paper_bytes
from .offers import StepModel, make_offers, offered_stages
from .spans import spans

__all__ = ["StepModel", "UnitTimes", "balance", "layer_costs", "make_offers", "offered_stages", "paper_bytes", "spans"]
