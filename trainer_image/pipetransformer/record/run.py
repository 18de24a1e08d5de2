"""The leader's record. Files are only appended to and the summary is computed from them, for leaders change."""

import datetime
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipetransformer.data import EpochOrder
from pipetransformer.errors import storing

from . import lines
from .cache_use import cache_summary
from .ledger import audit


@dataclass(frozen=True)
class Role:
    """What a worker holds: blocks `first_layer`..`last_layer` (from 0, both included) of one stage of one pipeline."""

    worker: str
    pipeline: int
    stage: int
    first_layer: int
    last_layer: int


def set_aside(run_dir: Path) -> None:
    """Move the record of an earlier run, if there is one, into `earlier/` and the time when that began, so that a run
    from the start does not add to it. What was broken off is gone on with."""
    events = run_dir / "events.jsonl"
    begun = next(lines.read(events), None)
    if begun is None:
        return
    began = datetime.datetime.fromtimestamp(begun["time"], datetime.UTC)
    folder = run_dir / "earlier" / began.strftime("%Y%m%dT%H%M%SZ")
    while (folder / events.name).exists():  # another began in that second
        folder = folder.with_name(f"{folder.name}-2")
    with storing(f"the run's record in {run_dir}"):
        found = [run_dir / name for name in ("steps.jsonl", "summary.json")]
        found += [path for part in ("ledger", "cache") for path in (run_dir / part).glob("*.jsonl")]
        for path in [*found, events]:  # the events last: they tell that there is more to move
            if path.exists():
                target = folder / path.relative_to(run_dir)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)


def newest_generation(run_dir: Path) -> int:
    """The highest layout generation in the record of a run, 0 for none: one that trained need not have left anything
    in the storage of checkpoints."""
    found = [
        line["generation"] for line in lines.read(run_dir / "events.jsonl") if line["kind"] == "GenerationCommitted"
    ]
    newest = [lines.last(path) for path in (run_dir / "ledger").glob("*.jsonl")]  # in a ledger they only rise
    return max([*found, *(line["layoutGeneration"] for line in newest if line is not None)], default=0)


class RunRecord:
    """`steps.jsonl`, `events.jsonl` and `summary.json` of one run directory.

    Every line carries `time`, seconds since the epoch by the leader's clock. Only the leader of a generation writes.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        with storing(f"the run's record in {run_dir}"):
            run_dir.mkdir(parents=True, exist_ok=True)
        self.steps_path = run_dir / "steps.jsonl"
        self._steps = lines.Appender(self.steps_path)
        self.events_path = run_dir / "events.jsonl"

    def step(
        self,
        *,
        step: int,
        epoch: int,
        samples: int,
        loss: float | None,
        gradient_norm: float | None,
        learning_rate: float,
        samples_per_second: float | None,
        generation: int,
        frozen_layers: int,
    ) -> None:
        """Note a committed step (from 0): samples and mean loss of the global batch, L2 norm of its gradient unclipped.

        Nobody knows the speed of a step whose leader died before it was noted.
        """
        self._steps.append(
            {
                "time": time.time(),
                "step": step,
                "epoch": epoch,
                "samples": samples,
                "loss": loss,
                "gradientNorm": gradient_norm,
                "learningRate": learning_rate,
                "samplesPerSecond": samples_per_second,
                "generation": generation,
                "frozenLayers": frozen_layers,
            },
        )

    def rewind(self, step: int) -> None:
        """Drop the lines of steps from `step` on, which will be redone: their leader died before others knew of them,
        or the run went back to a checkpoint."""
        if self.last_step() >= step:
            lines.cut_off(self.steps_path, lambda line: int(line["step"]) >= step)

    def last_step(self) -> int:
        """The step of the newest line, -1 before the first."""
        line = lines.last(self.steps_path)
        return -1 if line is None else int(line["step"])

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event, such as `Evaluated`, `CheckpointDurable`, `WorkerLost`; fields in camelCase, JSON-able."""
        lines.append(self.events_path, {"time": time.time(), "kind": kind, **fields})

    def started(self, *, step: int, job: str, earlier_job: str = "", **fields: Any) -> bool:
        """Note that the job of this UID starts at `step`, unless an earlier leader has. A record of other jobs is gone
        on with where the job goes on from the checkpoint of one of them, and else set aside.

        Args:
            step: steps that are committed.
            job: UID of the job.
            earlier_job: of the one whose checkpoint it went on from; empty where nobody knows.
            fields: of the event.

        Returns:
            Whether it was noted now.
        """
        jobs = [line["job"] for line in lines.read(self.events_path) if line["kind"] == "Started"]
        if jobs and jobs[-1] == job:
            return False
        if step == 0 or (earlier_job and not {job, earlier_job} & set(jobs)):
            set_aside(self.run_dir)
        self.event("Started", job=job, step=step, **fields)
        return True

    def generation_committed(
        self,
        *,
        generation: int,
        stages: int,
        pipelines: int,
        frozen_layers: int,
        first_step: int,
        pause_seconds: float,
        phases: Mapping[str, float],
        transfers: Sequence[tuple[int, int, int]],
        roles: Sequence[Role],
        reason: str = "",
    ) -> None:
        """Note a regroup (or the start).

        Args:
            generation: layout generation that now trains.
            stages: pipeline length (K).
            pipelines: data-parallel width (R).
            frozen_layers: frozen boundary at the commit.
            first_step: the first step (from 0) that this generation trains.
            pause_seconds: from the end of the last old step to the end of the first new one, the step itself included,
                an evaluation that was put off until then not.
            phases: the leader's seconds in each phase, from its knowledge of the generation to its first step's end.
            transfers: (source, target, bytes) of the state that ranks sent each other; leavers come after members.
            roles: who holds what from here on.
            reason: the generation's `ResizeReason`.
        """
        self.event(
            "GenerationCommitted",
            generation=generation,
            stages=stages,
            pipelines=pipelines,
            frozenLayers=frozen_layers,
            firstStep=first_step,
            pauseSeconds=pause_seconds,
            totalSeconds=sum(seconds for name, seconds in phases.items() if name != "first step"),
            bytesMoved=sum(size for _, _, size in transfers),
            phases={name: round(seconds, 4) for name, seconds in phases.items()},
            transfers=list(transfers),
            roles=[asdict(role) for role in roles],
            reason=reason,
        )

    def frozen(self, *, step: int, frozen_layers: int, generation: int, roles: Sequence[Role] | None = None) -> None:
        """Note that `frozen_layers` are frozen from step `step` on, more or fewer than before.

        `roles` when layers moved between stages because of it.
        """
        moved = {} if roles is None else {"roles": [asdict(role) for role in roles]}
        self.event("Frozen", step=step, frozenLayers=frozen_layers, generation=generation, **moved)

    def finish(
        self, *, metrics: Mapping[str, float], model_step: int, num_steps: int, order: EpochOrder
    ) -> dict[str, Any]:
        """Write `summary.json` and return the summary.

        Args:
            metrics: of the final model on the held-out split; empty when there is none.
            model_step: steps that the final model has been trained.
            num_steps: committed steps of the whole run.
            order: of the training data, against which the ledgers are held.
        """
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.event("Finished", step=num_steps, modelStep=model_step, metrics=metrics)
        events = list(lines.read(self.events_path))
        started_at = min((event.get("step", 0) for event in events if event["kind"] == "Started"), default=num_steps)
        found = audit(self.run_dir, order, started_at, num_steps)
        summary: dict[str, Any] = {
            "wall_seconds": events[-1]["time"] - events[0]["time"],
            "test_accuracy": metrics.get("accuracy"),
            "metrics": metrics,
            "model_step": model_step,
            "samples_lost": found.lost,
            "samples_repeated": found.repeated,
            "samples_unaudited": found.unaudited,
            "audited_from_step": found.first_step,
            "steps": num_steps,
            "steps_redone": found.redone_steps,
            "cache": cache_summary(self.run_dir),
            "generations": [
                {
                    "generation": event["generation"],
                    "stages": event["stages"],
                    "pipelines": event["pipelines"],
                    "frozen_layers": event["frozenLayers"],
                    "first_step": event["firstStep"],
                    "pause_seconds": event["pauseSeconds"],
                    "total_seconds": event["totalSeconds"],
                    "bytes_moved": event["bytesMoved"],
                    "phases": event["phases"],
                    "transfers": event["transfers"],
                }
                for event in events
                if event["kind"] == "GenerationCommitted"
            ],
        }
        partial = self.run_dir / "summary.json.partial"
        with storing(f"the run's record in {self.run_dir}"):
            partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            partial.replace(self.run_dir / "summary.json")
        return summary
