"""Repeats an asynchronous job in one process, from its record: with one copy of the model, one round after another.

Of the trainer's schedules it uses the lists alone, and of these only which version of its weights each forward and each
backward of a span sees, as the judge counts it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.data import MicroBatch, lengths_of, read_batch
from pipetransformer.freeze.boundary import apply_boundary
from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.models import MicroBatchContext, run_unit
from pipetransformer.schedules import Asynchronous, RoundShape, planned
from pipetransformer.state.optimizer import learning_rate
from pipetransformer_contract.spec import OptimizerName, ScheduleName, TrainerSpec
from tests.testkit.trainer.harness import Ran
from tests.testkit.trainer.judge_schedule import judge
from tests.testkit.trainer.judged_schedules import document


@dataclass(frozen=True)
class Round:
    """Some steps without a flush between them.

    Attributes:
        first: the first step.
        steps: number of steps.
        boundary: frozen layers.
        pipelines: data-parallel width.
        spans: units of each stage.
    """

    first: int
    steps: int
    boundary: int
    pipelines: int
    spans: Sequence[range]


def rounds_of(spec: TrainerSpec, run: Ran, epoch: int) -> list[Round]:
    """The rounds that a run must have had: as long as the spec says, and cut at the end of an epoch of `epoch` steps,
    where the boundary may move or a mirror is due, after the first step of a layout, and at the end.

    Raises:
        ValueError: the run changed its layout elsewhere.
    """
    lines = {line["step"]: line for line in run.steps}
    layouts = {event["generation"]: event for event in run.events("GenerationCommitted")}
    points = {point.step for point in spec.freeze.boundaries}
    intervals = [epoch, *([spec.mirror.every_steps] if spec.mirror else [])]
    rounds, step = [], 0
    while step < len(lines):
        generation = lines[step]["generation"]
        layout = layouts[generation]
        wanted = 1 if layout["firstStep"] == step or layout["stages"] == 1 else spec.pipeline.most_steps
        ends = [step + wanted, len(lines), *(one for one in points if one > step)]
        end = min(*ends, *(step + interval - step % interval for interval in intervals))
        if len({lines[one]["generation"] for one in range(step, end)}) > 1:
            raise ValueError(f"the layout changed within the round from step {step} to {end}")
        spans = _spans(layout, spec.model.num_layers)
        rounds.append(Round(step, end - step, lines[step]["frozenLayers"], layout["pipelines"], spans))
        step = end
    return rounds


def _spans(layout: Mapping[str, Any], num_layers: int) -> list[range]:
    roles = sorted((role["stage"], role["layers"][0]) for role in layout["roles"] if role["pipeline"] == 0)
    starts = [0, *(first + 1 for _, (first, _) in roles[1:])]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], num_layers + 2], strict=True)]


@lru_cache
def _versions(shape: RoundShape) -> Mapping[tuple[int, int], Mapping[str, int]]:
    """By span and chunk the version of the weights that each computation sees.

    Raises:
        ValueError: the lists are wrong.
    """
    verdict = judge(document(planned(Asynchronous(), shape), shape))
    if verdict.faults:
        raise ValueError(str(verdict.faults))
    return verdict.versions


class _Stage:
    """The units of a stage, with what they were after each step of the present round.

    Attributes:
        parameters: those that train.
        versions: their values and the direction of the last step before, by steps of the round.
        seen: which version the forward and the backward of each chunk of each pipeline see.
    """

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self.parameters = [one for unit in units for one in unit.parameters() if one.requires_grad]
        self.versions: list[tuple[list[Tensor], list[Tensor]]] = []
        self.seen: dict[tuple[int, int], Mapping[str, int]] = {}
        #: What the parameters hold: a version, and the factor of its direction.
        self._placed = 0, 0.0

    def put(self, version: int, factor: float = 0.0) -> None:
        """Write a version into the parameters, moved on by `factor` times its direction. Autograd does not notice."""
        if (version, factor) == self._placed:
            return
        self._placed = version, factor
        for parameter, value, direction in zip(self.parameters, *self.versions[version], strict=True):
            parameter.data.copy_(value - factor * direction)

    def note(self, directions: Sequence[Tensor]) -> None:
        """Append the present values as a version."""
        self._placed = len(self.versions), 0.0
        self.versions.append(([one.detach().clone() for one in self.parameters], list(directions)))


@dataclass
class Replay:
    """The model and its optimizer.

    Attributes:
        job: that is repeated.
        extra_steps: how many steps more than they need predictions look ahead.
        units: of the model.
        losses: mean loss of each step.
    """

    job: Job
    extra_steps: int = 0
    units: dict[int, nn.Module] = field(init=False)
    losses: list[float] = field(default_factory=list, init=False)
    #: What the optimizer remembers of each parameter, and the last gradient with L2.
    _states: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict, init=False)
    _last: dict[nn.Parameter, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.units = self.job.build_units(range(self.job.num_layers + 2))

    def run(self, round_: Round) -> None:
        """Take the steps of a round."""
        apply_boundary(self.units, round_.boundary, self.job.model.ties)
        stages = [_Stage([self.units[unit] for unit in span]) for span in round_.spans]
        for stage in stages:
            stage.note([self._direction(one) for one in stage.parameters])
        dealt = [
            self.job.dealer.train(step, round_.pipelines, self.job.micro_batch_size)
            for step in range(round_.first, round_.first + round_.steps)
        ]
        for pipeline in range(round_.pipelines):
            self._see(round_, [len(one[pipeline]) for one in dealt], pipeline, stages)
        numbers = [0] * round_.pipelines
        for step, of_pipelines in enumerate(dealt):
            sums = [0.0, 0.0]
            for pipeline, micro_batches in enumerate(of_pipelines):
                for micro_batch in micro_batches:
                    chunk = pipeline, numbers[pipeline]
                    loss, weight = self._train(stages, chunk, micro_batch, round_, step)
                    sums = [sums[0] + loss, sums[1] + weight]
                    numbers[pipeline] += 1
            self._step(stages, sums[1], round_.first + step)
            self.losses.append(sums[0] / sums[1])

    def _see(self, round_: Round, chunks: Sequence[int], pipeline: int, stages: Sequence[_Stage]) -> None:
        """Look up the versions in the lists of a pipeline."""
        first_active = round_.boundary + 1 if round_.boundary else 0
        frozen = sum(span.stop <= first_active for span in round_.spans)
        shape = RoundShape(tuple(range(len(stages))), sum(chunks), frozen, steps=tuple(chunks))
        for (span, chunk), versions in _versions(shape).items():
            stages[span].seen[pipeline, chunk] = {"B": 0, **versions}

    def _train(
        self,
        stages: Sequence[_Stage],
        chunk: tuple[int, int],
        micro_batch: MicroBatch,
        round_: Round,
        number: int,
    ) -> tuple[float, float]:
        """Forward and backward of a micro-batch of step `number` of the round. Returns its loss and weight."""
        schedule, step = self.job.spec.pipeline.schedule, round_.first + number
        for stage in stages:
            version = stage.seen[chunk]["F"]
            predicts = schedule is ScheduleName.PIPE_OPTIM and stage.parameters
            stage.put(version, self._rate(step) * (number - version + self.extra_steps) if predicts else 0.0)
        split, ids = self.job.dataset.train, micro_batch.sample_ids
        x, labels = read_batch(split, ids, step)
        context = MicroBatchContext(step, ids, lengths_of(split, ids, x.device))
        for index in sorted(self.units):
            with torch.set_grad_enabled(not round_.boundary or index > round_.boundary):
                x = run_unit(self.units[index], x, context)
        real = torch.zeros(len(ids), dtype=self.job.dtype)
        real[: micro_batch.num_real] = 1.0
        loss, weight = self.job.model.loss(x, labels, real)
        which = "F" if schedule is ScheduleName.PIPE_DREAM else "B"
        for stage in stages:
            stage.put(stage.seen[chunk][which])
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), float(weight)

    def _step(self, stages: Sequence[_Stage], weight: float, step: int) -> None:
        parameters = [one for stage in stages for one in stage.parameters]
        for stage in stages:
            stage.put(len(stage.versions) - 1)
        optimizer = self._optimizer(parameters)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= weight
            decay = self.job.spec.training.optimizer.weight_decay
            self._last[parameter] = (parameter.grad + decay * parameter).detach()
        optimizer.state.update({one: self._states[one] for one in parameters if one in self._states})
        for group in optimizer.param_groups:
            group["lr"] = self._rate(step)
        optimizer.step()
        self._states = {one: optimizer.state[one] for one in parameters}
        for parameter in parameters:
            parameter.grad = None
        for stage in stages:
            stage.note([self._direction(one) for one in stage.parameters])

    def _optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        spec = self.job.spec.training.optimizer
        options: dict[str, Any] = {"weight_decay": spec.weight_decay, "foreach": False}
        match spec.name:
            case OptimizerName.SGD:
                return torch.optim.SGD(parameters, momentum=spec.momentum, **options)
            case OptimizerName.RMSPROP:
                return torch.optim.RMSprop(parameters, alpha=spec.alpha, eps=spec.epsilon, **options)
        kind = torch.optim.Adam if spec.name is OptimizerName.ADAM else torch.optim.AdamW
        return kind(parameters, betas=(spec.beta1, spec.beta2), eps=spec.epsilon, **options)

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """What the parameter's last step moved it by, over the rate and without decoupled decay."""
        state, spec = self._states.get(parameter), self.job.spec.training.optimizer
        if state is None:
            return torch.zeros_like(parameter)
        match spec.name:
            case OptimizerName.SGD:
                found = state["momentum_buffer"] if spec.momentum else self._last[parameter]
            case OptimizerName.RMSPROP:
                found = self._last[parameter] / (state["square_avg"].sqrt() + spec.epsilon)
            case _:
                steps = float(state["step"])
                mean, square = state["exp_avg"] / (1 - spec.beta1**steps), state["exp_avg_sq"] / (1 - spec.beta2**steps)
                found = mean / (square.sqrt() + spec.epsilon)
        return found.detach().clone()

    def _rate(self, step: int) -> float:
        training = self.job.spec.training
        return learning_rate(training.optimizer, training.learning_rate_schedule, step, self.job.total_steps)


def replay_worst(spec: TrainerSpec, run: Ran) -> float:
    """Largest relative difference of a loss of the run from the replay's.

    Raises:
        ValueError: a step is missing, or the layout changed within a round.
    """
    job = load_job(spec)
    lines = run.steps
    if [line["step"] for line in lines] != list(range(job.total_steps)):
        raise ValueError(f"steps {[line['step'] for line in lines]}")
    replay = Replay(job)
    for round_ in rounds_of(spec, run, job.order.steps_per_epoch):
        replay.run(round_)
    return max(float(abs(line["loss"] - loss) / abs(loss)) for line, loss in zip(lines, replay.losses, strict=True))
