"""How what all voted for becomes state, seen from one worker."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipetransformer.hooks import Hooks
from pipetransformer.job.load import load_job
from pipetransformer.partition import Cut
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.optimizer import learning_rate
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.commit import Committer
from pipetransformer.training.vote import StepSums, Vote
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from pipetransformer_contract.spec import Pipeline
from tests.testkit.trainer.numerics import ADAMW, make_spec

SGD = {"name": "SGD", "learningRate": 0.5, "momentum": 0.0, "weightDecay": 0.0}
#: Steps several times before its vote, if it is not alone.
ASYNCHRONOUS = {"stages": 4, "schedule": "PipeOptim"}
SKIPPED = Vote(loss_sum=math.nan, weight=1.0)


class Worker:
    """One that holds the whole model; every gradient is 1 in each of its steps."""

    def __init__(self, run_dir: Path, pipeline: dict[str, Any] | None = None) -> None:
        spec = make_spec(SGD if pipeline is None else ADAMW, freeze={"policy": "None"})
        if pipeline is not None:
            training = spec.training.model_copy(update={"max_gradient_norm": None})
            spec = spec.model_copy(update={"pipeline": Pipeline.model_validate(pipeline), "training": training})
        self.job = load_job(spec)
        self.run_dir = run_dir
        self.state = WorkerState(self.job.num_layers, self.job.model.ties)
        self.state.units = self.job.build_units(range(self.job.num_layers + 2))
        self.committer = Committer(self.job, "w0", run_dir, Hooks())

    @property
    def control(self) -> Control:
        return self.state.control

    def enter(self, number: int, pipelines: int = 1) -> StageLayout:
        """A generation of pipelines of one worker each."""
        members = [Member(name=f"w{rank}", uid="u", address="127.0.0.1:1") for rank in range(pipelines)]
        generation = Generation(
            job_uid="job", layout_generation=number, stages=1, pipelines=pipelines, members=members, leader="w0",
            nonce="n", reason=ResizeReason.START,
        )  # fmt: skip
        units = range(self.job.num_layers + 2)
        layout = StageLayout(generation, 0, [(pipeline, 0) for pipeline in range(pipelines)], Cut([units], 16))
        self.committer.equip(self.job, self.state, layout)
        return layout

    def take_steps(self, count: int) -> None:
        """Take the steps of a round, which is not committed."""
        assert self.committer.gradients is not None
        self.committer.begin_steps()
        for step in range(count):
            self.committer.gradients.clear()
            for _, parameter in self.state.trained_parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(1.0 + step)
            self.committer.step(step, 0.5)
        self.committer.hold(self.control, count)

    def everything(self) -> dict[str, torch.Tensor]:
        """Weights and moments by name, as they are now."""
        return {
            name: tensor.detach().clone()
            for index in self.state.units
            for name, tensor in self.state.unit_tensors(index, with_moments=True).items()
        }

    def step(self, vote: Vote) -> float:
        """Commit one, and return by how much it moved a parameter."""
        assert self.committer.gradients is not None
        self.committer.gradients.clear()
        for _, parameter in self.state.trained_parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(1.0)
        watched = next(iter(self.state.units[0].parameters()))
        before = watched.detach().clone()
        self.committer.hold(self.control)
        self.committer.commit(self.control, vote)
        return float((before - watched.detach()).mean())


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def test_each_step_has_its_own_learning_rate_in_every_generation(worker: Worker) -> None:
    training = worker.job.spec.training
    rates = [
        learning_rate(training.optimizer, training.learning_rate_schedule, step, worker.job.total_steps)
        for step in range(4)
    ]
    assert len(set(rates)) == 4, "the warm-up gives each step a rate of its own"
    moved, noted = [], []
    for step in range(4):
        if step in (0, 2):
            worker.enter(1 + step)
        moved.append(worker.step(Vote(loss_sum=1.0, weight=1.0, square_norms=[1.0])))
        noted.append(worker.control.last_step["learning_rate"])

    assert noted == rates
    assert moved == pytest.approx(rates)


def test_a_step_moves_parameters_by_the_mean_gradient(worker: Worker) -> None:
    worker.enter(1)
    moved = worker.step(Vote(loss_sum=1.0, weight=4.0, square_norms=[1.0]))

    assert moved == pytest.approx(worker.control.last_step["learning_rate"] / 4)


def test_the_last_step_of_an_epoch_is_noted_with_its_own_samples(worker: Worker) -> None:
    worker.enter(1)
    worker.control.step = worker.job.order.steps_per_epoch - 1

    worker.step(Vote(loss_sum=1.0, weight=1.0, square_norms=[1.0]))

    (line,) = (json.loads(line) for path in worker.run_dir.rglob("*.jsonl") for line in path.read_text().splitlines())
    assert worker.control.last_step["samples"] == len(line["samples"]) < worker.job.order.global_batch


def test_skipped_steps_count_in_a_row_and_move_nothing(worker: Worker) -> None:
    worker.enter(1)
    counted = []
    for vote in (SKIPPED, SKIPPED, Vote(loss_sum=1.0, weight=1.0, square_norms=[1.0]), SKIPPED):
        moved = worker.step(vote)
        assert (moved == 0) == (vote is SKIPPED)
        counted.append(worker.control.skipped_steps)

    assert counted == [1, 2, 0, 1]
    assert worker.control.step == 4


def test_a_committed_step_is_pending_no_longer_and_known_by_its_generation(worker: Worker) -> None:
    worker.control.earlier_generations = 3
    worker.enter(2)
    worker.committer.hold(worker.control)
    assert worker.committer.pending == 5

    worker.committer.commit(worker.control, SKIPPED)

    assert worker.committer.pending is None
    assert worker.control.point == (1, 5, 0)


def test_the_ledger_says_what_was_trained_of_the_lost_pipelines_too(worker: Worker) -> None:
    layout = worker.enter(1, pipelines=2)
    worker.step(SKIPPED)
    worker.committer.note_for_the_lost(worker.control, layout)

    lines = [json.loads(line) for path in worker.run_dir.rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert sorted(line["pipeline"] for line in lines) == [0, 1]
    assert {line["step"] for line in lines} == {0}
    trained = [sample for line in lines for sample in line["samples"]]
    assert sorted(trained) == sorted(sample for shard in worker.job.order.batch(0) for sample in shard)


def test_a_round_of_several_steps_goes_back_bit_for_bit_and_can_still_be_committed_late(tmp_path: Path) -> None:
    late, quick = Worker(tmp_path / "late", ASYNCHRONOUS), Worker(tmp_path / "quick", ASYNCHRONOUS)
    vote = Vote(loss_sum=1.0, weight=1.0, square_norms=[1.0], earlier=[StepSums(1.0, 1.0, 1.0)] * 2)
    for worker in (late, quick):
        worker.enter(1)
    start = late.everything()
    for worker in (late, quick):
        worker.take_steps(3)
    made = late.everything()
    quick.committer.commit(quick.control, vote)
    assert quick.control.point == (3, 1, 0)
    assert [line["step"] for line in [*quick.control.earlier_steps, quick.control.last_step]] == [0, 1, 2]

    late.committer.go_back()
    late.committer.go_back()  # a second break
    assert same_bits(late.everything(), start) and not same_bits(start, made)

    late.committer.commit_late(late.state, quick.control)
    assert same_bits(late.everything(), made) and same_bits(made, quick.everything())
    assert late.control == quick.control
    assert not late.committer.is_ahead
    lines = [json.loads(line) for path in late.run_dir.rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]


def test_a_round_with_a_step_that_is_not_finite_goes_back_and_is_done_one_by_one(tmp_path: Path) -> None:
    worker = Worker(tmp_path, ASYNCHRONOUS)
    worker.enter(1)
    start = worker.everything()
    worker.take_steps(3)
    bad = Vote(loss_sum=1.0, weight=1.0, square_norms=[1.0], earlier=[StepSums(1.0, 1.0, 1.0), StepSums(math.nan)])

    assert worker.committer.refuse(worker.control, bad)
    assert same_bits(worker.everything(), start)
    assert worker.control.point == (0, 0, 0)
    assert worker.control.one_a_round_until == 3
    assert worker.committer.pending is None


def test_a_late_commit_equals_the_others_and_takes_over_their_control(tmp_path: Path) -> None:
    late, quick = Worker(tmp_path / "late"), Worker(tmp_path / "quick")
    vote = Vote(loss_sum=1.0, weight=2.0, square_norms=[1.0])
    for worker in (late, quick):
        worker.enter(1)
    quick.step(vote)
    quick.control.decided_step = 1
    late.step(SKIPPED)  # fills the gradients
    late.state.control = Control()
    late.committer.hold(late.control)

    late.committer.commit_late(late.state, quick.control)

    assert late.control == quick.control
    assert torch.equal(*[next(iter(worker.state.units[0].parameters())) for worker in (late, quick)])


def test_units_of_a_vote_that_broke_are_kept_when_a_later_one_breaks(tmp_path: Path) -> None:
    def assembled(*units: int, step: int = 4) -> WorkerState:
        return WorkerState(6, control=Control(step=step), units={unit: nn.Linear(1, 1) for unit in units})

    committer = Committer(load_job(make_spec(SGD)), "w0", tmp_path, Hooks())
    kept = []
    for each in (assembled(6, 7), assembled(), None, assembled(4), assembled(1, step=5)):
        committer.doubt(each)
        assert committer.in_doubt is not None
        kept.append(sorted(committer.in_doubt.units))

    assert kept == [[6, 7], [6, 7], [6, 7], [4, 6, 7], [1]], "units of another step are no part of the same state"
