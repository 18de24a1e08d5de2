"""The decisions of the operator: pure, one rule per file, no I/O and no clock."""

from .allocate import Demand, allocate
from .demand import demand_of
from .turn import plan
from .types import (
    Answer,
    Beat,
    EventType,
    Observed,
    Plan,
    PlanEvent,
    Queue,
    Worker,
    WorkerPhase,
    worker_name,
)

__all__ = [
    "Answer",
    "Beat",
    "Demand",
    "EventType",
    "Observed",
    "Plan",
    "PlanEvent",
    "Queue",
    "Worker",
    "WorkerPhase",
    "allocate",
    "demand_of",
    "plan",
    "worker_name",
]
