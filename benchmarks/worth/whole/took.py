"""What a run took, from its record and from what the operator saw it hold."""

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.testkit.differences import worst_relative_difference

#: (seconds since the first step began, GPUs held from then on).
Held = list[tuple[float, int]]


@dataclass(frozen=True)
class Took:
    """One run.

    Attributes:
        seconds: from the first generation's commit to the last committed step: pauses, measurements, checkpoints and
            the filling of caches are included, the start of processes is not.
        gpu_seconds: GPUs held meanwhile, each until its worker was gone.
        losses: of all steps.
        held: GPUs over time.
        layouts: (first step, stages, pipelines) of each generation.
        pauses: seconds without training, of each later generation.
        step_seconds: median of the steps at each number of frozen layers.
        samples_lost: by the ledgers.
        samples_repeated: by the ledgers.
        other_cores: processors that other programs used meanwhile; None if it is not known.
        commit: of the code that ran; empty if it is not known.
    """

    seconds: float
    gpu_seconds: float
    losses: list[float]
    held: Held = field(default_factory=list)
    layouts: list[tuple[int, int, int]] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    step_seconds: dict[str, float] = field(default_factory=dict)
    samples_lost: int = 0
    samples_repeated: int = 0
    other_cores: float | None = None
    commit: str = ""

    @property
    def layout_names(self) -> str:
        """The layouts in order, without repetitions."""
        names = [f"{stages}x{pipelines}" for _, stages, pipelines in self.layouts]
        return ", ".join(name for at, name in enumerate(names) if at == 0 or name != names[at - 1])


def read_took(run_dir: Path, seen: Sequence[tuple[float, int]]) -> Took:
    """Read the record of a finished run.

    Args:
        run_dir: its folder.
        seen: (seconds since the epoch, workers that were there), as the operator counted them.

    Raises:
        ValueError: a step is missing.
    """
    events, steps = _lines(run_dir / "events.jsonl"), _lines(run_dir / "steps.jsonl")
    summary = json.loads((run_dir / "summary.json").read_text())
    if [line["step"] for line in steps] != list(range(summary["steps"])):
        raise ValueError(f"{run_dir}: the record does not hold each step once")
    begun = next(event["time"] for event in events if event["kind"] == "Started")
    seconds = steps[-1]["time"] - begun
    held = _within(seen, begun, seconds)
    generations = summary["generations"]
    return Took(
        seconds=seconds,
        gpu_seconds=integral(held, seconds),
        losses=[line["loss"] for line in steps],
        held=held,
        layouts=[(one["first_step"], one["stages"], one["pipelines"]) for one in generations],
        pauses=[one["pause_seconds"] for one in generations[1:]],
        step_seconds=_by_boundary(steps),
        samples_lost=summary["samples_lost"],
        samples_repeated=summary["samples_repeated"],
    )


def integral(held: Held, seconds: float) -> float:
    """GPU-seconds until `seconds`."""
    ends = [*(begun for begun, _ in held[1:]), seconds]
    return sum(gpus * max(0.0, min(end, seconds) - begun) for (begun, gpus), end in zip(held, ends, strict=True))


def worst_difference(losses: Sequence[Sequence[float]]) -> float:
    """Largest relative difference of a step's loss from the first run's; 0 for a lone run.

    Raises:
        ValueError: the runs have different numbers of steps.
    """
    first, *others = losses
    return max((worst_relative_difference(other, first) for other in others), default=0.0)


def _within(seen: Sequence[tuple[float, int]], begun: float, seconds: float) -> Held:
    """What was held at the first step's begin, and each change until the end."""
    held: Held = []
    for when, gpus in seen:
        at = when - begun
        if at <= 0:
            held = [(0.0, gpus)]
        elif at < seconds and (not held or held[-1][1] != gpus):
            held.append((at, gpus))
    return held


def _by_boundary(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median seconds between the ends of two steps, by frozen layers."""
    found: dict[str, list[float]] = {}
    for before, line in itertools.pairwise(steps):
        found.setdefault(str(line["frozenLayers"]), []).append(line["time"] - before["time"])
    return {boundary: statistics.median(seconds) for boundary, seconds in found.items()}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
