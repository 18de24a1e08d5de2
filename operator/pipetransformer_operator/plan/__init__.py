"""The decisions of the operator: pure, one rule per file, no I/O and no clock."""

from .turn import plan
from .types import Beat, EventType, Observed, Plan, PlanEvent, Worker, WorkerPhase, worker_name

__all__ = ["Beat", "EventType", "Observed", "Plan", "PlanEvent", "Worker", "WorkerPhase", "plan", "worker_name"]
