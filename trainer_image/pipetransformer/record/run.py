"""The leader's record of a run. The leader only appends to files, and computes the summary from them at the end.

So another leader can continue the record.
"""

import datetime
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipetransformer.data import EpochOrder
from pipetransformer.errors import storing

from . import lines
from .cache_use import cache_summary
from .ledger import audit


@dataclass(frozen=True)
class Role:
    """The layers that a worker holds.

    Attributes:
        worker: name of the worker.
        pipeline: the worker's pipeline, from 0.
        stage: the worker's stage in this pipeline, from 0.
        layers: one range of layers, counted from 0, for each span (contiguous part of the model) of the stage.
    """

    worker: str
    pipeline: int
    stage: int
    layers: Sequence[range]


def set_aside(run_dir: Path) -> None:
    """Move the record of an earlier run, if there is one, so that a new run does not append to it.

    The new folder is `earlier/TIME`, the time when the earlier run began. A move that was interrupted is resumed.
    """
    events = run_dir / "events.jsonl"
    begun = next(lines.read(events), None)
    if begun is None:
        return
    began = datetime.datetime.fromtimestamp(begun["time"], datetime.UTC)
    folder = run_dir / "earlier" / began.strftime("%Y%m%dT%H%M%SZ")
    while (folder / events.name).exists():  # another run began in the same second
        folder = folder.with_name(f"{folder.name}-2")
    with storing(f"the run's record in {run_dir}"):
        found = [run_dir / name for name in ("steps.jsonl", "summary.json", "model")]
        found += [path for part in ("ledger", "cache") for path in (run_dir / part).glob("*.jsonl")]
        for path in [*found, events]:  # events last: while they exist, the next call continues the move
            if path.exists():
                target = folder / path.relative_to(run_dir)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)


def newest_generation(run_dir: Path) -> int:
    """The highest layout generation in a run's record; 0 without one. All checkpoints may be of lower ones."""
    found = [
        line["generation"] for line in lines.read(run_dir / "events.jsonl") if line["kind"] == "GenerationCommitted"
    ]
    newest = [lines.last(path) for path in (run_dir / "ledger").glob("*.jsonl")]  # generations rise within a ledger
    return max([*found, *(line["layoutGeneration"] for line in newest if line is not None)], default=0)


class RunRecord:
    """`steps.jsonl`, `events.jsonl` and `summary.json` of one run directory.

    Every line carries `time`, seconds since the epoch by the leader's clock. Only the leader of a generation writes.

    Attributes:
        redone_steps: steps that the newest `rewind` dropped.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        with storing(f"the run's record in {run_dir}"):
            run_dir.mkdir(parents=True, exist_ok=True)
        self.steps_path = run_dir / "steps.jsonl"
        self._steps = lines.Appender(self.steps_path)
        self.events_path = run_dir / "events.jsonl"
        self.redone_steps = 0

    def step(
        self,
        *,
        step: int,
        epoch: int,
        samples: int,
        loss: float | None,
        gradient_norm: float | None,
        learning_rate: float,
        generation: int,
        frozen_layers: int,
        samples_per_second: float | None = None,
        idle_share: float | None = None,
        frozen_ahead_share: float | None = None,
        staleness: float | None = None,
        staleness_largest: int | None = None,
        level: int = 0,
    ) -> None:
        """Append the line of a committed step. Measurements are None if the leader died before it wrote them.

        Args:
            step: the step, from 0.
            epoch: the epoch, from 0.
            samples: samples of the global batch.
            loss: mean loss of the global batch; None if the step was skipped.
            gradient_norm: L2 norm of the gradient, before clipping; None if the step was skipped.
            learning_rate: learning rate of the step.
            generation: layout generation that committed the step.
            frozen_layers: number of frozen layers.
            samples_per_second: speed of all workers together.
            idle_share: share of the round that workers spent waiting, as a mean.
            frozen_ahead_share: share of the frozen forwards that the previous step had computed.
            staleness: mean number of steps that the weights of forwards were behind.
            staleness_largest: largest number of steps that the weights of a forward were behind.
            level: level of `multiLevel` that trained.
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
                "idleShare": None if idle_share is None else round(idle_share, 4),
                "generation": generation,
                "frozenLayers": frozen_layers,
                "frozenAheadShare": frozen_ahead_share,
                "staleness": None if staleness is None else round(staleness, 4),
                "stalenessLargest": staleness_largest,
                "level": level,
            },
        )

    def rewind(self, step: int) -> None:
        """Remove the lines of steps from `step` on, because these steps will be redone.

        Either their leader died before other workers committed them, or the run went back to a checkpoint.
        """
        self.redone_steps = max(0, self.last_step() + 1 - step)
        if self.redone_steps:
            lines.cut_off(self.steps_path, lambda line: int(line["step"]) >= step)

    def last_step(self) -> int:
        """The step of the newest line, from 0; -1 if there is no line."""
        line = lines.last(self.steps_path)
        return -1 if line is None else int(line["step"])

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event.

        Args:
            kind: kind of the event, such as `Evaluated`, `CheckpointDurable` or `StepSkipped`.
            fields: further fields, with names in camelCase and values for JSON.
        """
        lines.append(self.events_path, {"time": time.time(), "kind": kind, **fields})

    def started(self, *, step: int, job: str, earlier_job: str = "", **fields: Any) -> bool:
        """Append the event `Started`, unless an earlier leader of this job has.

        A record of another job is first moved away (`set_aside`), unless this job resumed that job's checkpoint.

        Args:
            step: committed steps at the start.
            job: UID of the job.
            earlier_job: UID of the job whose checkpoint this job resumed; empty if unknown.
            fields: further fields of the event.

        Returns:
            Whether the event was appended.
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
        schedule: str = "",
        why_schedule: str = "",
        frozen_forward: str = "",
        why_frozen_forward: str = "",
    ) -> None:
        """Append the event of a committed regroup, or of the start.

        Args:
            generation: layout generation that now trains.
            stages: pipeline length (K).
            pipelines: data-parallel width (R).
            frozen_layers: frozen layers at the commit.
            first_step: the first step (from 0) that this generation trains.
            pause_seconds: seconds from the end of the last old step to the end of the first new step, without a
                postponed evaluation.
            phases: the leader's seconds by phase, from learning of the generation to the end of its first step.
            transfers: (source, target, bytes) of state between ranks; leavers have the ranks after the members.
            roles: the layers of each worker from now on.
            reason: the generation's `ResizeReason`.
            schedule: the schedule that the generation runs.
            why_schedule: why `schedule` is not the schedule of the spec; empty if it is.
            frozen_forward: when frozen layers compute (`FrozenForward`).
            why_frozen_forward: why `frozen_forward` is not what the spec says; empty if it is.
        """
        self.event(
            "GenerationCommitted",
            generation=generation,
            stages=stages,
            pipelines=pipelines,
            frozenLayers=frozen_layers,
            firstStep=first_step,
            transfers=list(transfers),
            **_change(pause_seconds, phases, transfers, roles),
            reason=reason,
            schedule=schedule,
            whySchedule=why_schedule,
            frozenForward=frozen_forward,
            whyFrozenForward=why_frozen_forward,
        )

    def level_changed(
        self,
        *,
        level: int,
        num_layers: int,
        first_step: int,
        generation: int,
        pause_seconds: float,
        phases: Mapping[str, float],
        transfers: Sequence[tuple[int, int, int]],
        roles: Sequence[Role],
    ) -> None:
        """Append the event that another level of `multiLevel` trains from now on, in the same generation.

        Args:
            level: the level; 0 is the job's own model.
            num_layers: number of layers of the level's model.
            first_step: the first step (from 0) that the level trains.
            generation: layout generation.
            pause_seconds: seconds from the end of the previous step to the end of the level's first step.
            phases: the leader's seconds in each phase of the change.
            transfers: (source, target, bytes) of state between ranks.
            roles: the layers of each worker from now on.
        """
        self.event(
            "LevelChanged",
            level=level,
            layers=num_layers,
            firstStep=first_step,
            generation=generation,
            **_change(pause_seconds, phases, transfers, roles),
        )

    def frozen(self, *, step: int, frozen_layers: int, generation: int, why_thawed: str = "") -> None:
        """Append the event that the number of frozen layers changes. No layer moves between stages before the next
        regroup.

        Args:
            step: the first step (from 0) with this number.
            frozen_layers: number of frozen layers.
            generation: layout generation.
            why_thawed: why layers thawed, if the trial of a freeze failed; otherwise empty.
        """
        self.event("Frozen", step=step, frozenLayers=frozen_layers, generation=generation, whyThawed=why_thawed)

    def finish(
        self, *, metrics: Mapping[str, float], model_step: int, num_steps: int, order: EpochOrder
    ) -> dict[str, Any]:
        """Write `summary.json` and return the summary.

        Args:
            metrics: metrics of the final model on the held-out split, by name; empty without held-out samples.
            model_step: committed steps of the final model.
            num_steps: committed steps of the whole run.
            order: order of the training data. The ledgers are compared with it.
        """
        # Append the last event, and compare the ledgers with the order.
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.event("Finished", step=num_steps, modelStep=model_step, metrics=metrics)
        events = list(lines.read(self.events_path))
        started_at = min((event.get("step", 0) for event in events if event["kind"] == "Started"), default=num_steps)
        found = audit(self.run_dir, order, started_at, num_steps)
        # Summarize the run.
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
                    "schedule": event["schedule"],
                    "why_schedule": event["whySchedule"],
                    "frozen_forward": event["frozenForward"],
                    "why_frozen_forward": event["whyFrozenForward"],
                }
                for event in events
                if event["kind"] == "GenerationCommitted"
            ],
        }
        # Write the summary. A reader never sees half of it.
        partial = self.run_dir / "summary.json.partial"
        with storing(f"the run's record in {self.run_dir}"):
            partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            partial.replace(self.run_dir / "summary.json")
        return summary


def _change(
    pause_seconds: float,
    phases: Mapping[str, float],
    transfers: Sequence[tuple[int, int, int]],
    roles: Sequence[Role],
) -> dict[str, Any]:
    """The fields of an event that describe a pause while state moved between workers."""
    return {
        "pauseSeconds": pause_seconds,
        "totalSeconds": sum(seconds for name, seconds in phases.items() if name != "first step"),
        "bytesMoved": sum(size for _, _, size in transfers),
        "phases": {name: round(seconds, 4) for name, seconds in phases.items()},
        "roles": _in_camel_case(roles),
    }


def _in_camel_case(roles: Sequence[Role]) -> list[dict[str, Any]]:
    return [
        {
            "worker": role.worker,
            "pipeline": role.pipeline,
            "stage": role.stage,
            "layers": [[layers.start, layers.stop - 1] for layers in role.layers],
        }
        for role in roles
    ]
