"""Draws a job with layouts, freezes and deaths, and compares its losses with those of one worker."""

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.distributed.pipelining import ScheduleDualPipeV, ScheduleLoopedBFS

from pipetransformer.hooks import HookPoint
from pipetransformer.job.script_parts import Parts
from pipetransformer_contract.spec import FrozenForward, ScheduleName, TrainerSpec
from tests.testkit.differences import relative_distance, worst_relative_difference
from tests.testkit.trainer.harness import Faults, Ran, Scripted, run_job

BAR_FLOAT64 = 1e-9
BAR_FLOAT32 = 1e-5
#: Frozen blocks where float32 gradients are compared.
BOUNDARIES_FLOAT32 = (0, 3)


@dataclass(frozen=True)
class Row:
    """A schedule whose losses are compared.

    Attributes:
        schedule: as the spec has it.
        own: for `Script`, torch's class that the program passes.
        pipeline: other fields of the spec's `pipeline`.
        causal: whether it needs a causal model; otherwise a vision transformer trains.
        levels: whether a smaller model trains for a while.
    """

    schedule: ScheduleName
    own: type | None = None
    pipeline: Mapping[str, Any] = field(default_factory=dict, hash=False)
    causal: bool = False
    levels: bool = False

    def __str__(self) -> str:
        own = f" {self.own.__name__}" if self.own else ""
        ahead = " Ahead" if self.frozen_forward is FrozenForward.AHEAD else ""
        return self.schedule.value + own + ahead + (" V-cycle" if self.levels else "")

    @property
    def frozen_forward(self) -> FrozenForward:
        """When frozen layers compute."""
        return FrozenForward(self.pipeline.get("frozenForward", FrozenForward.IN_PLACE))


#: Synchronous schedules, which compute what one worker does.
ROWS = [
    Row(ScheduleName.GPIPE),
    Row(ScheduleName.ONE_FORWARD_ONE_BACKWARD),
    Row(ScheduleName.INTERLEAVED),
    Row(ScheduleName.ZERO_BUBBLE),
    Row(ScheduleName.ZERO_BUBBLE_V),
    Row(ScheduleName.ONE_FORWARD_ONE_BACKWARD, pipeline={"frozenForward": "Ahead"}),
    Row(ScheduleName.TERA_PIPE, pipeline={"tokenSlices": 3}, causal=True),
    Row(ScheduleName.SCRIPT, ScheduleLoopedBFS),
    Row(ScheduleName.SCRIPT, ScheduleDualPipeV),
    Row(ScheduleName.ONE_FORWARD_ONE_BACKWARD, levels=True),
]
#: Down after so many steps, and up again after some more.
DESCENT_STEPS, ASCENT_STEPS = 4, 6


WORKERS = 4


_CAUSAL = "tests.testkit.user_code.causal_model"


#: Enough for two spans on each of four workers.
LAYERS = 8


STEPS = 18


GLOBAL_BATCH = 24


LAYOUTS = [(4, 1), (3, 1), (2, 2), (2, 1), (1, 4), (1, 3), (1, 2), (1, 1)]


OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "AdamW", "learningRate": 0.003, "weightDecay": 0.01},
    {"name": "SGD", "learningRate": 0.05, "momentum": 0.9, "weightDecay": 0.01},
]


#: Where a worker can die so that the others go on: in a round of the generation before the change.
MOMENTS = [
    HookPoint.COMPUTED,
    HookPoint.REDUCED,
    HookPoint.VOTED,
    HookPoint.STEPPED,
    HookPoint.COMMITTED,
    HookPoint.ENDED,
]


@dataclass(frozen=True)
class Scenario:
    """What happens in one random run.

    Attributes:
        script: layouts, each after some steps or after a loss.
        faults: who dies, and when.
        boundaries: freezes and unfreezes, by step.
    """

    seed: int
    script: list[Scripted]
    faults: dict[int, Faults]
    boundaries: list[dict[str, int]]
    optimizer: dict[str, Any]
    dropout: float

    def __str__(self) -> str:
        layouts = " ".join(
            f"K{entry.stages}R{entry.pipelines}" + ("" if entry.after_loss is None else "!") for entry in self.script
        )
        return f"seed {self.seed}: {self.optimizer['name']}, dropout {self.dropout:g}, {layouts}"


def draw(seed: int) -> Scenario:
    """The random scenario of a seed: up to four changes of layout, at most one of them by a death."""
    chance = random.Random(seed)
    boundaries = [{"step": step, "boundary": chance.randint(0, LAYERS - 1)}
                  for step in sorted(chance.sample(range(1, STEPS - 1), 3))]  # fmt: skip
    stages, pipelines = chance.choice(LAYOUTS)
    alive = list(range(WORKERS))
    members = chance.sample(alive, stages * pipelines)
    script = [Scripted(stages, pipelines, members)]
    faults: dict[int, Faults] = {}
    changes = chance.randint(2, 4)
    deadly = chance.randrange(changes)
    # The operator publishes the next generation only once the last is confirmed, which takes a step or two.
    for change, at_step in enumerate(sorted(chance.sample(range(2, STEPS - 2, 4), changes))):
        victim = chance.choice(members) if change == deadly and len(members) > 1 else None
        if victim is not None:
            faults[victim] = Faults(killed_at=(chance.choice(MOMENTS), at_step))
            alive.remove(victim)
            survivors = [member for member in members if member != victim]
        else:
            survivors = list(members)
        stages, pipelines = chance.choice([layout for layout in LAYOUTS if layout[0] * layout[1] <= len(alive)])
        chance.shuffle(survivors)
        others = [worker for worker in alive if worker not in survivors]
        # Whoever holds state comes first, as the operator orders its candidates.
        members = [*survivors, *others][: stages * pipelines]
        leavers = [member for member in survivors if member not in members]
        script.append(Scripted(stages, pipelines, members, at_step=at_step, leavers=leavers, after_loss=victim))
        alive = [worker for worker in alive if worker not in leavers]
    return Scenario(seed, script, faults, boundaries, OPTIMIZERS[seed % 2], 0.1 if seed % 4 < 2 else 0.0)


def make_spec(scenario: Scenario, row: Row, folder: Path, precision: str = "Float64") -> TrainerSpec:
    """The digits ViT, small, or a causal model with tied weights on samples of two padded lengths. `folder` is for
    checkpoints, which only levels need."""
    vit = {
        "name": "vit", "numLayers": LAYERS, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4,
        "dropout": scenario.dropout,
    }  # fmt: skip
    causal = {
        "name": f"{_CAUSAL}:make_model",
        "numLayers": LAYERS,
        "options": {"num_layers": LAYERS, "dropout": scenario.dropout},
    }
    boundaries, levels = scenario.boundaries, {}
    if row.levels:
        boundaries = [point for point in boundaries if point["step"] > DESCENT_STEPS + ASCENT_STEPS]
        boundaries = boundaries or [{"step": DESCENT_STEPS + ASCENT_STEPS + 2, "boundary": 1}]
        levels = {
            "checkpoint": {"location": str(folder / "checkpoints")},
            "multiLevel": {"descentSteps": DESCENT_STEPS, "ascentSteps": ASCENT_STEPS, "ascentLearningRate": 0.004},
        }
    return TrainerSpec.model_validate(
        {
            **levels,
            "model": causal if row.causal else vit,
            "data": {"name": f"{_CAUSAL}:make_data" if row.causal else "tests.testkit.user_code.few_held_out:load"},
            "training": {
                "steps": STEPS,
                "globalBatchSize": GLOBAL_BATCH,
                "optimizer": scenario.optimizer,
                "maxGradientNorm": 2.0,
                "precision": precision,
                "seed": scenario.seed,
            },
            "freeze": {"policy": "Explicit", "boundaries": boundaries},
            # The model has to fit in any layout that is drawn, so that a level never waits for a longer pipeline.
            "pipeline": {
                "stages": 1 if row.levels else 4,
                "microBatchSize": 3,
                "schedule": row.schedule.value,
                **row.pipeline,
            },
            # Without a copy of a lost stage all begins again on the survivors, and nothing else is left to compare.
            "mirror": {"everySteps": 1},
            "numShards": 4,
            "workers": WORKERS,
        }
    )


def committed(run: Ran) -> dict[int, dict[str, Any]]:
    """Lines of the committed history, by step: a step that was redone counts as it was done last."""
    return {line["step"]: line for line in run.steps}


def worst_difference(run: Ran, reference: Ran) -> float:
    """Largest relative difference of a loss or a gradient norm.

    Raises:
        ValueError: a step is missing, or was trained with another boundary.
    """
    ours, theirs = committed(run), committed(reference)
    if sorted(ours) != list(range(STEPS)) or sorted(theirs) != list(range(STEPS)):
        raise ValueError(f"steps {sorted(ours)} against {sorted(theirs)}")
    if any(ours[step]["frozenLayers"] != theirs[step]["frozenLayers"] for step in ours):
        raise ValueError("the runs froze other layers")
    return max(
        worst_relative_difference(*([run[step][key] for step in range(STEPS)] for run in (ours, theirs)))
        for key in ("loss", "gradientNorm")
    )


@dataclass
class Compared:
    """Worst relative difference of each run, by schedule, how many of its steps ran in layouts of several stages, and
    how many workers died."""

    by_schedule: dict[str, list[float]] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    deaths: int = 0

    def add(self, row: Row, difference: float, steps: int) -> None:
        self.by_schedule.setdefault(str(row), []).append(difference)
        self.steps[str(row)] += steps

    def extend(self, other: "Compared") -> None:
        for schedule, differences in other.by_schedule.items():
            self.by_schedule.setdefault(schedule, []).extend(differences)
        self.steps += other.steps
        self.deaths += other.deaths

    def worst(self) -> dict[str, float]:
        """By schedule."""
        return {schedule: max(differences) for schedule, differences in self.by_schedule.items()}


def compare(scenario: Scenario, folder: Path, precision: str = "Float64", rows: Sequence[Row] = ROWS) -> Compared:
    """Run a scenario under each schedule, and against one worker that stays alone.

    Raises:
        ValueError: a worker that should die did not, or a layout of several stages ran another schedule.
    """
    alone: dict[tuple[bool, bool], Ran] = {}
    compared = Compared()
    for row in rows:
        kind, stayed = (row.causal, row.levels), folder / f"alone-{len(alone)}"
        if kind not in alone:
            plain = Row(ScheduleName.GPIPE, causal=row.causal, levels=row.levels)
            alone[kind] = run_job(make_spec(scenario, plain, stayed, precision), [Scripted(1, 1, [0])], stayed)
        spec, parts = make_spec(scenario, row, folder / str(row), precision), Parts(schedule=row.own)
        run = run_job(spec, scenario.script, folder / str(row), faults=scenario.faults, parts=parts)
        several = [one for one in run.summary["generations"] if one["stages"] > 1]
        if others := [one["why_schedule"] for one in several if one["schedule"] != row.schedule]:
            raise ValueError(f"{row} did not run: {others}")
        numbers = {one["generation"] for one in several if one["frozen_forward"] == row.frozen_forward}
        steps = sum(line["generation"] in numbers for line in committed(run).values())
        compared.add(row, worst_difference(run, alone[kind]), steps)
        if spared := {worker for worker, fault in scenario.faults.items() if fault.ends} - run.lost_at.keys():
            raise ValueError(f"workers {sorted(spared)} were not killed")
        compared.deaths += len(run.lost_at)
    return compared


def gradients(layout: tuple[int, int], seed: int, boundary: int, folder: Path) -> dict[str, torch.Tensor]:
    """float32 gradient of every unit for the first batch, flat, by the unit's name.

    One step of plain gradient descent at a rate so large that the weights before it round away, but for frozen units,
    of which they are all that there is.
    """
    rate = 1e6
    descent = {"name": "SGD", "learningRate": rate, "momentum": 0.0}
    scenario = Scenario(seed, [], {}, [{"step": 0, "boundary": boundary}], descent, dropout=0.1)
    spec = make_spec(scenario, Row(ScheduleName.ONE_FORWARD_ONE_BACKWARD), folder, "Float32")
    training = spec.training.model_copy(update={"steps": 1, "max_gradient_norm": None})
    workers = list(range(layout[0] * layout[1]))
    run_job(spec.model_copy(update={"training": training}), [Scripted(*layout, workers)], folder)
    weights = safetensors.torch.load_file(folder / "model" / "model.safetensors")
    units: dict[str, list[torch.Tensor]] = {}
    for name, weight in weights.items():
        block = re.match(r"blocks\.\d+", name)
        units.setdefault(block[0] if block else name.partition(".")[0], []).append(weight.flatten() / -rate)
    return {unit: torch.cat(parts) for unit, parts in units.items()}


def worst_gradient(seed: int, boundary: int, folder: Path) -> float:
    """Largest distance of a unit's gradient in any layout from that on one worker, relative to its norm. The first
    `boundary` blocks are frozen: a change of their weights would count as if it were a gradient."""
    alone = gradients((1, 1), seed, boundary, folder / "alone")
    worst = 0.0
    for layout in LAYOUTS[:-1]:
        there = gradients(layout, seed, boundary, folder / f"k{layout[0]}r{layout[1]}")
        worst = max(worst, *(relative_distance(there[unit], alone[unit]) for unit in alone))
    return worst
