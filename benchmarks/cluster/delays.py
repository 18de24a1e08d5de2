"""How long the operator and the workers take, from the results of the benchmarks that measured it."""

import json
import statistics
from dataclasses import dataclass
from typing import Any

from tests.testkit.results import RESULTS


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds.

    Attributes:
        start: from a created pod on a free GPU until its worker is ready.
        pause: from a decision until the next layout trains.
        checkpoint: from there until a checkpoint is durable that lets leavers go.
        delete: from the deletion of a pod until its GPU is free.
    """

    start: float
    pause: float
    checkpoint: float
    delete: float


def measured() -> Delays:
    """The slowest of the median pauses, and the medians of a release on real kubelets.

    A worker's start is that of a container there and of a new process of torchrun, which imports as much as ours.
    """
    phases = _result("release")["phases"]
    changes = [change for case in _result("regroup")["cases"].values() for change in case.values()]
    restarts = [change["torchrun_seconds"]["median"] for change in changes if change["torchrun_seconds"]]
    return Delays(
        start=phases["start"]["p50"] + statistics.median(restarts),
        pause=phases["decide"]["p50"] + max(change["pause_seconds"]["median"] for change in changes),
        checkpoint=phases["confirm"]["p50"] + phases["checkpoint"]["p50"],
        delete=phases["delete"]["p50"],
    )


def _result(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document
