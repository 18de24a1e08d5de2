"""The operator's decisions about one job, as pure functions: no I/O and no clock. Each rule has its file in `rules`."""

from .sharing.allocate import Demand, allocate
from .sharing.demand import demand_of, may_demand
from .sharing.for_others import Claims, PendingPod, choose_claim, claims_of
from .sharing.gangs import Gang, gang_of, prefer
from .turn import plan
from .types import (
    AVOIDED,
    FAILURES_ALLOWED,
    NOT_SET_UP,
    UNSEEN,
    Answer,
    Beat,
    Deletion,
    DisruptionBudget,
    EventType,
    FailureCause,
    NodeFacts,
    NodeFailure,
    Observed,
    Plan,
    PlanEvent,
    Queue,
    Worker,
    WorkerPhase,
    worker_name,
)

__all__ = [
    "AVOIDED",
    "FAILURES_ALLOWED",
    "NOT_SET_UP",
    "UNSEEN",
    "Answer",
    "Beat",
    "Claims",
    "Deletion",
    "Demand",
    "DisruptionBudget",
    "EventType",
    "FailureCause",
    "Gang",
    "NodeFacts",
    "NodeFailure",
    "Observed",
    "PendingPod",
    "Plan",
    "PlanEvent",
    "Queue",
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
