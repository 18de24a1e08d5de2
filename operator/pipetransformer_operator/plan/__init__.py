"""The decisions of the operator: pure, one rule per file, no I/O and no clock."""

from .allocate import Demand, allocate
from .demand import demand_of, may_demand
from .gangs import Gang, gang_of, prefer
from .turn import plan
from .types import (
    AVOIDED,
    FAILURES_ALLOWED,
    NOT_SET_UP,
    UNSEEN,
    Answer,
    Beat,
    EventType,
    NodeFacts,
    Observed,
    Plan,
    PlanEvent,
    Queue,
    Worker,
    WorkerPhase,
    worker_name,
)
from .yielding import Claims, Waiting, choose_claim, claims_of

__all__ = [
    "AVOIDED",
    "FAILURES_ALLOWED",
    "NOT_SET_UP",
    "UNSEEN",
    "Answer",
    "Beat",
    "Claims",
    "Demand",
    "EventType",
    "Gang",
    "NodeFacts",
    "Observed",
    "Plan",
    "PlanEvent",
    "Queue",
    "Waiting",
    "Worker",
    "WorkerPhase",
    "allocate",
    "choose_claim",
    "claims_of",
    "demand_of",
    "gang_of",
    "may_demand",
    "plan",
    "prefer",
    "worker_name",
]
