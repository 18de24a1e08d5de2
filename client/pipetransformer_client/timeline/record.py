"""Reads the record of a run, `events.jsonl` and `steps.jsonl`. Times are seconds since the first event."""

import itertools
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

#: Values of `ResizeReason` that count as failures: a worker was lost or drained, or the last layout did not work.
_FAILURES = frozenset({"Failure", "Drain", "Undo"})
#: Events that a leader writes before its first step.
_OF_STARTS = frozenset({"Started", "Overruled"})


@dataclass(frozen=True, order=True)
class Held:
    """A contiguous range of layers that a stage holds: `first` to `last`, counted from 0, both included."""

    first: int
    last: int
    stage: int


@dataclass(frozen=True)
class Span:
    """A period with one layout and one number of frozen layers.

    Attributes:
        start: start of the period, in seconds.
        end: end of the period, in seconds.
        frozen: number of frozen layers.
        cuts: the layers of each stage, in the order of the model. A stage may hold several ranges.
    """

    start: float
    end: float
    frozen: int
    cuts: tuple[Held, ...]


@dataclass(frozen=True)
class Regroup:
    """A committed generation. The first one is the start of the job.

    Attributes:
        time: when the generation was committed, in seconds.
        end: when the next generation was committed, or when the job stopped or the record ends, in seconds.
        generation: number of the generation.
        reason: why the generation exists (`ResizeReason`).
        stages: workers per pipeline (K).
        pipelines: number of pipelines (R).
        frozen: number of frozen layers at the commit.
        first_step: the first step (from 0) that the generation trained.
        pause_seconds: seconds from the end of the last step before to the end of its first step.
        bytes_moved: bytes of state that workers sent each other.
        schedule: the schedule that it ran.
        why_schedule: why `schedule` is not that of the spec; empty if it is.
        idle_share: share of its steps that workers spent waiting, as a mean; None if unknown.
        ahead_share: mean share of the frozen forwards that the previous step had computed; None if unknown.
    """

    time: float
    end: float
    generation: int
    reason: str
    stages: int
    pipelines: int
    frozen: int
    first_step: int
    pause_seconds: float
    bytes_moved: int
    schedule: str
    why_schedule: str
    idle_share: float | None
    ahead_share: float | None

    @property
    def gpus(self) -> int:
        """GPUs that the generation holds, one for each worker."""
        return self.stages * self.pipelines

    @property
    def after_failure(self) -> bool:
        """Whether a failure caused the regroup."""
        return self.reason in _FAILURES


@dataclass(frozen=True)
class Freeze:
    """A change of the number of frozen layers.

    Attributes:
        time: when it changed, in seconds.
        step: the first step (from 0) with the new number.
        frozen: the new number.
        why_thawed: why layers thawed, if the trial of a freeze failed; otherwise empty.
    """

    time: float
    step: int
    frozen: int
    why_thawed: str = ""


@dataclass(frozen=True)
class Visit:
    """A period in which one level of `multiLevel` trains.

    Attributes:
        level: the level; 0 is the job's own model.
        time: end of its first step, in seconds.
        first_step: its first step (from 0).
        pause_seconds: seconds from the end of the last step before to the end of its first step; None if a generation
            began with it.
        bytes_moved: bytes of state that workers sent each other; None as above.
    """

    level: int
    time: float
    first_step: int
    pause_seconds: float | None
    bytes_moved: int | None


@dataclass(frozen=True)
class Step:
    """A committed step. A value is None if it is unknown or not finite."""

    time: float
    loss: float | None
    samples_per_second: float | None


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: its time in seconds, and held-out metrics by name. Metrics that are not finite are left out."""

    time: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Record:
    """The record of a run, which may still train.

    Attributes:
        num_layers: number of layers of the model.
        seconds: time of the newest event or step.
        outcome: how the run ended, in words.
        spans: periods with one layout and one number of frozen layers.
        regroups: the committed generations.
        freezes: the changes of the number of frozen layers.
        visits: the levels that trained, in order; a single one without `multiLevel`.
        steps: the committed steps.
        evaluations: the evaluations.
    """

    num_layers: int
    seconds: float
    outcome: str
    spans: tuple[Span, ...]
    regroups: tuple[Regroup, ...]
    freezes: tuple[Freeze, ...]
    visits: tuple[Visit, ...]
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds that the job held, over all generations."""
        return sum(regroup.gpus * (regroup.end - regroup.time) for regroup in self.regroups)


def read_record(folder: Path) -> Record:
    """Reads the record in a run's folder.

    Raises:
        ValueError: the folder holds no record, or the run has not begun to train.
    """
    events = list(_lines(folder / "events.jsonl"))
    if not any(event["kind"] == "GenerationCommitted" for event in events):
        raise ValueError(f"{folder} holds no record of a run: its events.jsonl names no generation")
    steps = list(_lines(folder / "steps.jsonl"))
    origin = events[0]["time"]
    for line in (*events, *steps):
        line["time"] -= origin
    end = max(line["time"] for line in (*events[-1:], *steps[-1:]))
    spans = tuple(_spans(events, steps, end))
    started = next((event for event in events if event["kind"] == "Started"), {})
    return Record(
        num_layers=started.get("numLayers") or spans[0].cuts[-1].last + 1,
        seconds=end,
        outcome=_outcome(events[-1]),
        spans=spans,
        regroups=tuple(_regroups(events, steps, end)),
        freezes=tuple(
            Freeze(event["time"], event["step"], event["frozenLayers"], event.get("whyThawed", ""))
            for event in events
            if event["kind"] == "Frozen"
        ),
        visits=tuple(_visits(events, steps)),
        steps=tuple(Step(line["time"], _finite(line["loss"]), line["samplesPerSecond"]) for line in steps),
        evaluations=tuple(
            Evaluation(event["time"], {name: value for name, value in event["metrics"].items() if value is not None})
            for event in events
            if event["kind"] == "Evaluated"
        ),
    )


def _regroups(events: list[dict[str, Any]], steps: list[dict[str, Any]], end: float) -> Iterator[Regroup]:
    idle, ahead = _means(steps, "idleShare"), _means(steps, "frozenAheadShare")
    commits = [event for event in events if event["kind"] == "GenerationCommitted"]
    for event, until in zip(commits, _ends(commits, events, steps, end), strict=True):
        yield Regroup(
            time=event["time"],
            end=until,
            generation=event["generation"],
            reason=event.get("reason") or "Start",
            stages=event["stages"],
            pipelines=event["pipelines"],
            frozen=event["frozenLayers"],
            first_step=event["firstStep"],
            pause_seconds=event["pauseSeconds"],
            bytes_moved=event["bytesMoved"],
            schedule=event["schedule"],
            why_schedule=event["whySchedule"],
            idle_share=idle.get(event["generation"]),
            ahead_share=ahead.get(event["generation"]),
        )


def _visits(events: list[dict[str, Any]], steps: list[dict[str, Any]]) -> Iterator[Visit]:
    changes = {event["firstStep"]: event for event in events if event["kind"] == "LevelChanged"}
    for level, lines in itertools.groupby(steps, lambda line: int(line["level"])):
        first = next(lines)
        change = changes.get(first["step"], {})
        yield Visit(level, first["time"], first["step"], change.get("pauseSeconds"), change.get("bytesMoved"))


def _means(steps: list[dict[str, Any]], key: str) -> dict[int, float]:
    """By generation: the mean of the field `key` over its steps that have a value."""
    found: dict[int, list[float]] = {}
    for line in steps:
        if line[key] is not None:
            found.setdefault(line["generation"], []).append(line[key])
    return {generation: fmean(values) for generation, values in found.items()}


def _ends(
    changes: list[dict[str, Any]], events: list[dict[str, Any]], steps: list[dict[str, Any]], end: float
) -> Iterator[float]:
    """Yields when the period after each change ended, which is when the next one began.

    A job that starts again had no workers before, such as a suspended one. So its period ended with its last line.
    """
    for later in changes[1:]:
        if later.get("reason") != "Start":
            yield later["time"]
            continue
        lines = [event for event in events[: events.index(later)] if event["kind"] not in _OF_STARTS]
        lines += [step for step in steps if step["generation"] < later["generation"]]
        yield max(line["time"] for line in lines)
    yield end


def _spans(events: list[dict[str, Any]], steps: list[dict[str, Any]], end: float) -> Iterator[Span]:
    """Yields the periods between changes of the layout or of the frozen layers.

    A freeze moves no layer between stages, so it has no `roles` in the record, and the earlier ones stay valid. A level
    of `multiLevel` begins with no frozen layers.
    """
    changes = [event for event in events if event["kind"] in ("GenerationCommitted", "Frozen", "LevelChanged")]
    roles: list[dict[str, Any]] = []
    for event, until in zip(changes, _ends(changes, events, steps, end), strict=True):
        roles = event.get("roles", roles)
        if roles:
            first = [role for role in roles if role["pipeline"] == 0]
            cuts = sorted(Held(low, high, role["stage"]) for role in first for low, high in role["layers"])
            yield Span(event["time"], until, event.get("frozenLayers", 0), tuple(cuts))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _outcome(newest: dict[str, Any]) -> str:
    """How the run ended, in words, from its newest event."""
    if newest["kind"] == "Failed":
        return f"failed: {newest.get('message', '')}"
    if newest["kind"] != "Finished":
        return "not ended yet"
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in newest.get("metrics", {}).items())
    return f"complete{': ' if metrics else ''}{metrics}"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines. An incomplete last line is left out, and so are damaged lines, which a crash
    of a machine may leave."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and "time" in found:
                    yield found
