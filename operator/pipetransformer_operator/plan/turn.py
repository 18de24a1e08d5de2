"""One turn of the loop: from what was observed to what to do."""

from datetime import datetime

from ..api.job import JobSpec
from .types import Observed, Plan


def plan(spec: JobSpec, observed: Observed, now: datetime) -> Plan:
    """Decides what a job needs now. See `Plan` for the order in which the answer is executed."""
    return Plan(status=observed.status)
