"""The record of a run, as the leader wrote it: `events.jsonl` and `steps.jsonl`. Times are seconds since the start."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Span:
    """A time without a change of the layout or the boundary.

    Attributes:
        start: seconds.
        end: seconds.
        stages: workers a pipeline.
        pipelines: data-parallel width.
        frozen: layers.
        cuts: first and last layer (both included) of each stage; a stage without layers is left out.
    """

    start: float
    end: float
    stages: int
    pipelines: int
    frozen: int
    cuts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Regroup:
    """A generation, as it was committed; the first is the start."""

    time: float
    generation: int
    reason: str
    stages: int
    pipelines: int
    frozen: int
    first_step: int
    pause_seconds: float
    bytes_moved: int


@dataclass(frozen=True)
class Freeze:
    """A move of the boundary to `frozen` layers before a step."""

    time: float
    step: int
    frozen: int


@dataclass(frozen=True)
class Step:
    """A committed step; what is not known, or not finite, is None."""

    time: float
    loss: float | None
    samples_per_second: float | None


@dataclass(frozen=True)
class Evaluation:
    """Metrics of the held-out samples, by name; those that are not finite are left out."""

    time: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Record:
    """A run, or as much of it as there is yet."""

    num_layers: int
    seconds: float
    outcome: str
    spans: tuple[Span, ...]
    regroups: tuple[Regroup, ...]
    freezes: tuple[Freeze, ...]
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]

    @property
    def gpu_seconds(self) -> float:
        """What the generations held, from each one's commit to the next."""
        ends = [*(regroup.time for regroup in self.regroups[1:]), self.seconds]
        return sum(one.stages * one.pipelines * (end - one.time) for one, end in zip(self.regroups, ends, strict=True))


def read(folder: Path) -> Record:
    """Reads a run's folder.

    Raises:
        ValueError: it holds no record of a run that has begun to train.
    """
    events = list(_lines(folder / "events.jsonl"))
    if not any(event["kind"] == "GenerationCommitted" for event in events):
        raise ValueError(f"{folder} holds no record of a run: events.jsonl tells of no generation")
    raw = list(_lines(folder / "steps.jsonl"))
    origin = events[0]["time"]
    end = max([events[-1]["time"], *(step["time"] for step in raw[-1:])]) - origin
    commits = [event for event in events if event["kind"] == "GenerationCommitted"]
    finished = events[-1] if events[-1]["kind"] in ("Finished", "Failed") else None
    spans = tuple(_spans(events, origin, end))
    started = next((event for event in events if event["kind"] == "Started"), {})
    return Record(
        num_layers=started.get("numLayers") or max(last for _, last in spans[0].cuts) + 1,
        seconds=end,
        outcome=_outcome(finished),
        spans=spans,
        regroups=tuple(
            Regroup(
                time=event["time"] - origin,
                generation=event["generation"],
                reason=event.get("reason") or "Start",
                stages=event["stages"],
                pipelines=event["pipelines"],
                frozen=event["frozenLayers"],
                first_step=event["firstStep"],
                pause_seconds=event["pauseSeconds"],
                bytes_moved=event["bytesMoved"],
            )
            for event in commits
        ),
        freezes=tuple(
            Freeze(event["time"] - origin, event["step"], event["frozenLayers"])
            for event in events
            if event["kind"] == "Frozen"
        ),
        steps=tuple(Step(line["time"] - origin, _finite(line["loss"]), line["samplesPerSecond"]) for line in raw),
        evaluations=tuple(
            Evaluation(event["time"] - origin, {k: v for k, v in event["metrics"].items() if v is not None})
            for event in events
            if event["kind"] == "Evaluated"
        ),
    )


def _spans(events: list[dict[str, Any]], origin: float, end: float) -> Iterator[Span]:
    """Between one change and the next. A freeze that moved no layer brings no roles: those before it still hold."""
    changes = [event for event in events if event["kind"] in ("GenerationCommitted", "Frozen")]
    layout: dict[str, Any] | None = None
    roles: list[dict[str, Any]] | None = None
    for event, after in zip(changes, [*changes[1:], None], strict=True):
        layout = event if event["kind"] == "GenerationCommitted" else layout
        roles = event.get("roles", roles)
        if layout is None or roles is None:
            continue
        cuts = sorted({(role["first_layer"], role["last_layer"]) for role in roles if role["pipeline"] == 0})
        yield Span(
            start=event["time"] - origin,
            end=end if after is None else after["time"] - origin,
            stages=layout["stages"],
            pipelines=layout["pipelines"],
            frozen=event["frozenLayers"],
            cuts=tuple((first, last) for first, last in cuts if first <= last),
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _outcome(finished: dict[str, Any] | None) -> str:
    if finished is None:
        return "not ended yet"
    if finished["kind"] == "Failed":
        return f"failed: {finished.get('message', '')}"
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in finished.get("metrics", {}).items())
    return f"complete{': ' if metrics else ''}{metrics}"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file; the last line may be half written."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
