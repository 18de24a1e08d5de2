"""Evaluation in between: own metrics, the best model kept, an early end, and callbacks on the leader."""

import json
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

from pipetransformer import (
    Callback,
    Checkpoint,
    DataInfo,
    Dataset,
    Evaluation,
    Freeze,
    Goal,
    Pipeline,
    PipelineModel,
    Result,
    Training,
    current_micro_batch,
)
from pipetransformer.callbacks.callback import Teller
from pipetransformer.data import script_dataset
from pipetransformer.data.tokens import PaddedTokens
from pipetransformer.errors import CallbackError, ModelError
from pipetransformer.storage import latest
from pipetransformer_contract.spec import FreezePoint, FreezePolicyName, TrainerSpec
from tests.testkit.trainer.harness import Ran, Scripted, run_job
from tests.testkit.trainer.script import REHEARSED, Log, events, positives, run, samples

pytestmark = pytest.mark.timeout(120)

STEPS_PER_EPOCH = 4


def test_callbacks_are_told_of_all_that_happens(tmp_path: Path) -> None:
    log = Log()
    freeze = Freeze(policy=FreezePolicyName.EXPLICIT, boundaries=[FreezePoint(step=3, boundary=1)])

    result = run(tmp_path, callbacks=[log], freeze=freeze, metrics=[positives])

    assert log.of("step") == list(range(8))
    assert log.of("evaluate") == [(4, ["accuracy", "loss", "positives"]), (8, ["accuracy", "loss", "positives"])]
    assert log.of("freeze") == [(3, 1)]
    assert log.of("generation") == [(0, 1, 1, 1)]
    assert log.told[-1] == ("end", 8)
    expected = float(samples(20, 1).tensors[1].double().mean())
    assert result.metrics["positives"] == pytest.approx(expected)


def test_what_a_callback_does_with_metrics_is_its_own(tmp_path: Path) -> None:
    class Taking(Callback):
        def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
            assert isinstance(metrics, dict)
            metrics.clear()

    result = run(tmp_path, callbacks=[Taking()])
    assert result.metrics.keys() == result.best.keys() == {"loss", "accuracy"}


def test_each_callback_gets_a_line_of_its_own(tmp_path: Path) -> None:
    class Popping(Callback):
        def on_step(self, line: Mapping[str, Any]) -> None:
            assert isinstance(line, dict)
            line.pop("step")

    log = Log()
    run(tmp_path, callbacks=[Popping(), log])
    assert log.of("step") == list(range(8))


class Masked(nn.Linear):
    """Has a buffer whose elements share memory, as masks have that were expanded."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mask", torch.ones(1, 8).expand(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.get_buffer("mask")[0]


def test_a_model_may_have_a_buffer_that_was_expanded(tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"))
    result = run(tmp_path, model=lambda: [nn.Linear(4, 8), Masked(), nn.Linear(8, 2)], checkpoint=checkpoint)
    assert result.steps == 8


def test_a_boundary_that_holds_from_the_first_step_on_is_told_too(tmp_path: Path) -> None:
    log = Log()
    boundaries = [FreezePoint(step=0, boundary=2), FreezePoint(step=3, boundary=1)]

    run(tmp_path, callbacks=[log], freeze=Freeze(policy=FreezePolicyName.EXPLICIT, boundaries=boundaries))

    assert log.of("freeze") == [(0, 2), (3, 1)]
    assert [(event["step"], event["frozenLayers"]) for event in events(tmp_path, "Frozen")] == [(0, 2), (3, 1)]


@pytest.mark.parametrize(
    ("training", "evaluation", "ends_at"),
    [
        (Training(epochs=2, global_batch_size=16), Evaluation(), 8),
        (Training(epochs=9, global_batch_size=16), Evaluation(best_metric="positives", patience=2), 12),
    ],
    ids=["after the last step", "where patience ends the training"],
)
def test_no_block_freezes_once_there_is_no_step_left_to_train(
    training: Training, evaluation: Evaluation, ends_at: int, tmp_path: Path
) -> None:
    log = Log()
    points = [FreezePoint(step=3, boundary=1), FreezePoint(step=ends_at, boundary=2)]
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"))
    freeze = Freeze(policy=FreezePolicyName.EXPLICIT, boundaries=points)
    said: dict[str, Any] = {"freeze": freeze, "checkpoint": checkpoint, "callbacks": [log], "metrics": [positives]}

    result = run(tmp_path, training=training, evaluation=evaluation, **said)

    assert (result.steps, result.frozen_layers) == (ends_at, 1)
    assert log.of("freeze") == [(3, 1)]
    assert [(event["step"], event["frozenLayers"]) for event in events(tmp_path, "Frozen")] == [(3, 1)]

    longer = Training(steps=ends_at + 1, global_batch_size=16)
    result = run(tmp_path, training=longer, **said)
    assert (result.steps, result.frozen_layers) == (ends_at + 1, 2), "what the last step left open is decided now"


def test_a_metric_is_a_quotient_of_sums_whatever_the_layout(tmp_path: Path) -> None:
    spec = TrainerSpec.model_validate(
        {
            "model": {"name": "vit", "numLayers": 2, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4},
            "data": {"name": "digits"},
            "training": {"steps": 12, "globalBatchSize": 100, "precision": "Float64"},
            "freeze": {"policy": "None"},
            "pipeline": {"stages": 2, "microBatchSize": 16},
            "evaluation": {"everySteps": 4, "metrics": ["tests.testkit.user_code.metric_functions:sevens"]},
            "numShards": 2,
            "workers": 2,
        }
    )
    changed = run_job(spec, [Scripted(2, 1, [0, 1]), Scripted(1, 2, [0, 1], at_step=6)], tmp_path / "changed")
    stayed = run_job(spec, [Scripted(1, 1, [0])], tmp_path / "stayed")

    def scores(ran: Ran) -> list[tuple[int, dict[str, float]]]:
        return [(event["step"], event["metrics"]) for event in ran.events("Evaluated")]

    assert [step for step, _ in scores(changed)] == [4, 8, 12]
    for (_, ours), (_, theirs) in zip(scores(changed), scores(stayed), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    assert changed.summary["metrics"].keys() == {"loss", "accuracy", "sevens"}


class Slow(Callback):
    """Returns once so many steps are committed, as its own record says."""

    def __init__(self, steps: Path, committed: int) -> None:
        self._steps, self._committed = steps, committed
        self.told: list[int] = []

    def on_step(self, line: Mapping[str, Any]) -> None:
        deadline = time.monotonic() + 30
        while not self.told and len(self._steps.read_text().splitlines()) < self._committed:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.told.append(int(line["step"]))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.told.append(-1)


def test_training_goes_on_while_a_callback_works_but_not_far_ahead(tmp_path: Path) -> None:
    slow = Slow(tmp_path / "run" / "steps.jsonl", 5)
    run(tmp_path, callbacks=[slow])
    assert slow.told == [*range(8), -1]


def test_training_waits_for_callbacks_that_are_told_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[int] = []

    class Late(Callback):
        def on_step(self, line: Mapping[str, Any]) -> None:
            steps, deadline = tmp_path / "run" / "steps.jsonl", time.monotonic() + 0.05
            ahead.append(0)
            while ahead[-1] <= 2 and time.monotonic() < deadline:
                ahead[-1] = len(steps.read_text().splitlines()) - line["step"]
                time.sleep(0.005)

    monkeypatch.setattr("pipetransformer.callbacks.callback._BACKLOG", 0)
    run(tmp_path, callbacks=[Late()])

    assert len(ahead) == 8 and max(ahead) <= 2, "the vote of the next step has told everybody to wait"


def test_a_callback_that_fails_late_is_reported_nevertheless() -> None:
    waited = threading.Event()

    class Failing(Callback):
        def on_step(self, line: Mapping[str, Any]) -> None:
            assert waited.wait(30)
            raise ValueError("full disk")

        def on_generation(self, *_: int) -> None:
            told_late.append("generation")

    told_late: list[str] = []
    teller = Teller([Failing()])
    teller.tell(Callback.on_step, {"step": 0})
    teller.tell(Callback.on_generation, 0, 1, 1, 1)
    with ThreadPoolExecutor(1) as barrier:
        left_behind = barrier.submit(teller.catch_up)
        waited.set()
    assert isinstance(left_behind.exception(), CallbackError)
    assert not told_late, "what may take long delays only what the user has to know"

    with pytest.raises(CallbackError, match="full disk"):
        teller.tell(Callback.on_freeze, 1, 1)
    with pytest.raises(CallbackError, match="full disk"):
        teller.catch_up()
    teller.close()


def test_an_interrupted_run_no_longer_waits_for_callbacks() -> None:
    called, interrupted, told = threading.Event(), threading.Event(), []

    class Slow(Callback):
        def on_step(self, line: Mapping[str, Any]) -> None:
            called.set()
            assert interrupted.wait(30)
            told.append(line["step"])

    teller = Teller([Slow()])
    for step in range(3):
        teller.tell(Callback.on_step, {"step": step})
    with ThreadPoolExecutor(1) as barrier:
        left_behind = barrier.submit(teller.catch_up)
        assert called.wait(30)
        teller.close()
        interrupted.set()

        assert isinstance(left_behind.exception(30), CancelledError)
    assert told == [0]


def test_training_ends_early_and_keeps_the_best_model(tmp_path: Path) -> None:
    scores, scored = [3, 5, 4, 4, 9], -REHEARSED

    def score(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal scored
        value, scored = scores[scored // 20], scored + int(weight.sum())
        return torch.tensor(value * 20), torch.tensor(20.0)

    evaluation = Evaluation(every_steps=1, best_metric="score", keep_best=True, patience=2)
    result = run(
        tmp_path,
        evaluation=evaluation,
        metrics=[score],
        checkpoint=Checkpoint(location=str(tmp_path / "checkpoint")),
        pipeline=Pipeline(micro_batch_size=REHEARSED),
    )

    assert (result.steps, result.best_step, result.best["score"]) == (4, 2, 5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["model_step"], summary["metrics"]["score"]) == (4, 2, 5)
    kept = latest(str(tmp_path / "checkpoint" / "best"))
    assert kept is not None and kept.step == 2
    assert [event["best"] for event in events(tmp_path, "Evaluated")] == [True, True, False, False]


@pytest.mark.parametrize("lost", ["never kept", "not copied"])
def test_the_best_model_is_the_best_of_those_that_could_be_kept(lost: str, tmp_path: Path) -> None:
    scores, scored = [9, 5, 7, 6], 0

    def score(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal scored
        value, scored = scores[scored // 20], scored + int(weight.sum())
        return weight.sum() * value, weight.sum()

    def train_to(steps: int, *, keep_best: bool) -> Result:
        nonlocal scored
        scored -= REHEARSED
        return run(
            tmp_path,
            training=Training(steps=steps, global_batch_size=16),
            evaluation=Evaluation(every_steps=1, best_metric="score", keep_best=keep_best),
            metrics=[score],
            checkpoint=Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1),
            pipeline=Pipeline(micro_batch_size=REHEARSED),
        )

    train_to(1, keep_best=lost == "not copied")
    shutil.rmtree(tmp_path / "checkpoint" / "best", ignore_errors=True)

    result = train_to(4, keep_best=True)

    assert (result.best_step, result.best["score"]) == (3, 7)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["model_step"], summary["metrics"]["score"]) == (3, 7)


def test_lower_can_be_better(tmp_path: Path) -> None:
    evaluation = Evaluation(best_metric="loss", goal=Goal.LOWEST)
    result = run(tmp_path, evaluation=evaluation)

    losses = [event["metrics"]["loss"] for event in events(tmp_path, "Evaluated")]
    assert result.best["loss"] == min(losses)


class Regression(PipelineModel):
    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ((output - target).square().mean(dim=-1) * weight).sum(), weight.sum()


def test_a_model_without_accuracy_is_best_at_its_lowest_loss(tmp_path: Path) -> None:
    def numbers(data: TensorDataset) -> TensorDataset:
        return TensorDataset(data.tensors[0], data.tensors[0].sum(dim=1, keepdim=True))

    result = run(
        tmp_path,
        model=lambda: Regression(nn.Linear(4, 8), [nn.Linear(8, 8)], nn.Linear(8, 1), (8,)),
        data=(numbers(samples(64, 0)), numbers(samples(20, 1))),
        evaluation=Evaluation(keep_best=True, patience=5),
        checkpoint=Checkpoint(location=str(tmp_path / "checkpoint")),
    )
    losses = [event["metrics"] for event in events(tmp_path, "Evaluated")]
    assert [list(scores) for scores in losses] == [["loss"], ["loss"]]
    assert losses[1]["loss"] < losses[0]["loss"]
    assert (result.best_step, result.best) == (8, losses[1])


def test_a_metric_may_give_numbers(tmp_path: Path) -> None:
    def misses(output: Tensor, target: Tensor, weight: Tensor) -> tuple[float, int]:
        return float(((output.argmax(dim=-1) != target) * weight).sum()), int(weight.sum())

    metrics = run(tmp_path, metrics=[misses]).metrics
    assert metrics["misses"] == pytest.approx(1 - metrics["accuracy"])


def test_what_fails_in_an_evaluation_fails_before_the_first_step(tmp_path: Path) -> None:
    unknown = TensorDataset(torch.zeros(20, 4), torch.full((20,), 7))
    with pytest.raises(ModelError, match=r"^loss failed: ValueError: Target 7 is out of bounds"):
        run(tmp_path, data=(samples(64, 0), unknown))
    assert not (tmp_path / "run" / "steps.jsonl").exists()


def test_parts_of_a_dataset_have_its_classes() -> None:
    whole = samples(64, 0)
    parts = random_split(whole, [0.8, 0.2])
    assert script_dataset(parts, dtype=torch.float32).info == DataInfo((4,), 2)
    for none in (None, 3):
        whole.classes = none  # type: ignore[attr-defined]
        assert script_dataset(parts, dtype=torch.float32).info == DataInfo((4,), 2)
    whole.classes = ["a", "b", "c"]  # type: ignore[attr-defined]
    assert script_dataset(parts, dtype=torch.float32).info == DataInfo((4,), 3, labels=("a", "b", "c"))


class Pooled(nn.Module):
    """The mean over the positions that are no padding, at each of them."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = current_micro_batch().lengths
        assert lengths is not None
        used = (torch.arange(x.shape[1]) < lengths[:, None])[..., None]
        return ((x * used).sum(dim=1, keepdim=True) / lengths[:, None, None]).expand_as(x)


def test_a_custom_layer_knows_the_length_of_samples_from_the_first_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split = PaddedTokens(torch.randint(9, (64, 6)), torch.arange(64) % 2, torch.arange(64) % 6 + 1)
    result = run(
        tmp_path,
        model=lambda: [nn.Embedding(9, 8), Pooled(), nn.Sequential(nn.Flatten(), nn.Linear(48, 2))],
        data=Dataset(split, split, DataInfo((6,), 2, 9)),
    )
    assert result.steps == 8
    assert "not warm" not in caplog.text


def test_data_without_a_held_out_part_is_not_evaluated(tmp_path: Path) -> None:
    assert run(tmp_path, data=samples(64, 0)).metrics == {}


def test_tensorboard_gets_curves_of_training_and_test(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from pipetransformer.callbacks.tensorboard import TensorBoard

    run(tmp_path, callbacks=[TensorBoard(tmp_path / "logs")])

    found = EventAccumulator(str(tmp_path / "logs"))
    found.Reload()
    assert [scalar.step for scalar in found.Scalars("train/loss")] == list(range(8))
    assert [scalar.step for scalar in found.Scalars("test/accuracy")] == [3, 7]


@pytest.mark.parametrize("new_leader", [False, True])
def test_tensorboard_hides_what_is_done_again(new_leader: bool, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from pipetransformer.callbacks.tensorboard import TensorBoard

    curves = ("gradient_norm", "learning_rate", "samples_per_second", "idle_share", "frozen_layers", "generation")
    board = TensorBoard(tmp_path)
    for first, last in ((0, 9), (4, 11)):  # back to a checkpoint before step 4, with the evaluation that came before it
        board = TensorBoard(tmp_path) if new_leader and first else board
        for step in range(first, last):
            board.on_step({"step": step, "loss": float(10 * first + step), **dict.fromkeys(curves, 1.0)})
            if step % 4 == 3:
                board.on_evaluate(step + 1, {"accuracy": float(step)})
    board.on_end({})

    found = EventAccumulator(str(tmp_path))
    found.Reload()
    losses = {scalar.step: scalar.value for scalar in found.Scalars("train/loss")}
    assert len(found.Scalars("train/loss")) == len(losses) == 11
    assert [losses[step] for step in (3, 4, 10)] == [3.0, 44.0, 50.0]
    assert [(scalar.step, scalar.value) for scalar in found.Scalars("test/accuracy")] == [(3, 3.0), (7, 7.0)]


class Smoothed(PipelineModel):
    """Made and configured as its author likes, not as a dataclass."""

    def __init__(self, blocks: int) -> None:
        linear = [nn.Linear(8, 8) for _ in range(blocks)]
        super().__init__(nn.Linear(4, 8), list(linear), nn.Linear(8, 2), (8,))
        self.smoothing = 0.0

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        loss, total = super().loss(output, target, weight)
        return loss + self.smoothing * (output.square().sum(1) @ weight), total


def smoothed(smoothing: float) -> PipelineModel:
    model = Smoothed(3)
    model.smoothing = smoothing
    return model


def test_a_model_of_the_users_class_keeps_what_was_set_in_it(tmp_path: Path) -> None:
    plain, own = (
        run(tmp_path / str(smoothing), model=partial(smoothed, smoothing)).metrics["loss"] for smoothing in (0.0, 100.0)
    )
    assert own > plain + 1
