"""The decisions of the operator: pure, one rule per file, no I/O and no clock."""

from .allocate import Demand, allocate
from .demand import demand_of
from .turn import plan
from .types import Beat, EventType, Observed, Plan, PlanEvent, Worker, WorkerPhase, worker_name

__all__ = [
    "Beat",
    "Demand",
    "EventType",
    "Observed",
    "Plan",
    "PlanEvent",
    "Worker",
    "WorkerPhase",
    "allocate",
    "demand_of",
    "plan",
    "worker_name",
]
