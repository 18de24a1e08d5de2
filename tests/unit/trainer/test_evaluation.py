"""Evaluation in between: own metrics, the best model kept, an early end, and callbacks on the leader."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from pipetransformer import (
    Callback,
    Checkpoint,
    Evaluation,
    Freeze,
    FreezeObservation,
    FreezePolicy,
    Goal,
    PipelineModel,
    Result,
    Training,
    train,
)
from pipetransformer.checkpoint import latest
from pipetransformer.errors import CallbackError, ModelError, SpecError, StorageError
from pipetransformer_contract.spec import FreezePoint, FreezePolicyName, TrainerSpec
from tests.trainer_harness import Ran, Scripted, run_job

pytestmark = pytest.mark.timeout(120)

STEPS_PER_EPOCH = 4
NO_FREEZE = Freeze(policy=FreezePolicyName.NONE)


def model() -> Sequence[nn.Module]:
    return [nn.Linear(4, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2)]


def samples(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


class Log(Callback):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def on_step(self, line: Mapping[str, Any]) -> None:
        self.told.append(("step", line["step"]))

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told.append(("evaluate", (step, sorted(metrics))))

    def on_freeze(self, step: int, frozen_layers: int) -> None:
        self.told.append(("freeze", (step, frozen_layers)))

    def on_generation(self, step: int, generation: int, stages: int, pipelines: int) -> None:
        self.told.append(("generation", (step, generation, stages, pipelines)))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.told.append(("end", summary["steps"]))

    def of(self, kind: str) -> list[Any]:
        return [value for name, value in self.told if name == kind]


def run(folder: Path, **changes: Any) -> Result:
    """Two epochs of 4 steps, alone."""
    arguments: dict[str, Any] = {
        "model": model,
        "data": (samples(64, 0), samples(20, 1)),
        "training": Training(epochs=2, global_batch_size=16),
        "freeze": NO_FREEZE,
        "run_dir": folder / "run",
    }
    return train(**arguments | changes)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def positives(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return (target * weight).sum(), weight.sum()


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


def test_a_metric_is_a_quotient_of_sums_whatever_the_layout(tmp_path: Path) -> None:
    spec = TrainerSpec.model_validate(
        {
            "model": {"name": "vit", "numLayers": 2, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4},
            "data": {"name": "digits"},
            "training": {"steps": 12, "globalBatchSize": 100, "precision": "Float64"},
            "freeze": {"policy": "None"},
            "pipeline": {"stages": 2, "microBatchSize": 16},
            "evaluation": {"everySteps": 4, "metrics": ["tests.metric_functions:sevens"]},
            "numShards": 2,
            "workers": 2,
        }
    )
    changed = run_job(spec, [Scripted(2, 1, [0, 1]), Scripted(1, 2, [0, 1], at_step=6)], tmp_path / "changed")
    stayed = run_job(spec, [Scripted(1, 1, [0])], tmp_path / "stayed")

    def scores(ran: Ran) -> list[tuple[int, dict[str, float]]]:
        lines = map(json.loads, (ran.run_dir / "events.jsonl").read_text().splitlines())
        return [(event["step"], event["metrics"]) for event in lines if event["kind"] == "Evaluated"]

    assert [step for step, _ in scores(changed)] == [4, 8, 12]
    for (_, ours), (_, theirs) in zip(scores(changed), scores(stayed), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    assert changed.summary["metrics"].keys() == {"loss", "accuracy", "sevens"}


def test_training_ends_early_and_keeps_the_best_model(tmp_path: Path) -> None:
    ages: list[float] = [3, 5, 4, 4, 9]

    def score(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor(ages[0] * 20), torch.tensor(20.0)

    class Next(Callback):
        def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
            ages.pop(0)

    evaluation = Evaluation(every_steps=1, best_metric="score", keep_best=True, patience=2)
    result = run(
        tmp_path,
        evaluation=evaluation,
        metrics=[score],
        callbacks=[Next()],
        checkpoint=Checkpoint(location=str(tmp_path / "checkpoint")),
        pipeline=None,
    )

    assert (result.steps, result.best_step, result.best["score"]) == (4, 2, 5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["model_step"], summary["metrics"]["score"]) == (4, 2, 5)
    kept = latest(str(tmp_path / "checkpoint" / "best"))
    assert kept is not None and kept.step == 2
    assert [event["best"] for event in events(tmp_path, "Evaluated")] == [True, True, False, False]


def test_lower_can_be_better(tmp_path: Path) -> None:
    evaluation = Evaluation(best_metric="loss", goal=Goal.LOWEST)
    result = run(tmp_path, evaluation=evaluation)

    losses = [event["metrics"]["loss"] for event in events(tmp_path, "Evaluated")]
    assert result.best["loss"] == min(losses)


def test_data_without_a_held_out_part_is_not_evaluated(tmp_path: Path) -> None:
    assert run(tmp_path, data=samples(64, 0)).metrics == {}


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=3, global_batch_size=16))

    log = Log()
    result = run(tmp_path, checkpoint=checkpoint, callbacks=[log])

    assert log.of("step") == [3, 4, 5, 6, 7]
    assert log.of("generation")[0][1] > 1
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(8))
    assert result.steps == 8


def test_a_run_does_not_go_on_from_another_ones_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=1, global_batch_size=16))

    changed: list[tuple[dict[str, Any], str]] = [
        ({"model": lambda: [*model(), nn.Linear(2, 2)]}, "numLayers was 3 and not 4"),
        ({"training": Training(epochs=2, global_batch_size=8)}, "globalBatchSize was 16 and not 8"),
        ({"training": Training(epochs=2, global_batch_size=16, seed=1)}, "seed was 0 and not 1"),
        ({"data": samples(63, 0)}, "trainingSamples was 64 and not 63"),
    ]
    for changes, message in changed:
        with pytest.raises(SpecError, match=f"spec.checkpoint.location: .* another run, whose {message}"):
            run(tmp_path, checkpoint=checkpoint, **changes)


def test_a_run_goes_on_with_another_freeze_policy_from_the_newest_checkpoint_that_is_whole(tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=2)
    before = Freeze(policy=FreezePolicyName.NORM_CHANGE, interval_steps=100)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=4, global_batch_size=16), freeze=before)
    newest = tmp_path / "checkpoint" / "step-000000000004-g1" / "blocks.1.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])

    log = Log()
    after = Freeze(policy=FreezePolicyName.PLASTICITY, interval_steps=1)
    result = run(tmp_path, checkpoint=checkpoint, callbacks=[log], freeze=after)

    assert log.of("step") == [2, 3, 4, 5, 6, 7]
    assert result.steps == 8


def test_a_checkpoint_with_a_damaged_unit_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=2)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=2, global_batch_size=16))
    newest = tmp_path / "checkpoint" / "step-000000000002-g1" / "blocks.1.safetensors"
    newest.write_bytes(bytes(len(newest.read_bytes())))

    with pytest.raises(StorageError, match=r"remove step-000000000002-g1 .*blocks\.1\.safetensors is damaged"):
        run(tmp_path, checkpoint=checkpoint)


class Broken(Callback):
    def on_step(self, line: Mapping[str, Any]) -> None:
        raise RuntimeError("disk of the callback is full")


class Forgetful(FreezePolicy):
    def decide(self, observation: FreezeObservation) -> int:
        return observation.boundary

    def state_dict(self) -> dict[str, Any]:
        return {"norms": torch.zeros(2)}


def broken(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no such class")


def build_nothing() -> PipelineModel:
    raise ValueError("no weights")


def around(*blocks: nn.Module) -> Callable[[], list[nn.Module]]:
    """A model with these blocks."""
    return lambda: [nn.Linear(4, 8), *blocks, nn.Linear(8, 2)]


class TwoTensors(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise RuntimeError("no way back")


class NoWayBack(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Backward.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


class Unreadable(TorchDataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 37:
            raise OSError("the volume is gone")
        return torch.zeros(4), 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"callbacks": [Broken()]}, CallbackError, "Broken.on_step failed: RuntimeError: disk"),
        ({"metrics": [broken]}, ModelError, "a metric failed: RuntimeError: no such class"),
        ({"metrics": [positives, positives]}, SpecError, "two metrics are called 'positives'"),
        ({"evaluation": Evaluation(best_metric="f1")}, SpecError, "spec.evaluation.bestMetric: is 'f1'"),
        ({"evaluation": Evaluation(keep_best=True)}, SpecError, "spec.evaluation.keepBest"),
        ({"model": build_nothing}, SpecError, "model: cannot be built: ValueError: no weights"),
        ({"model": lambda: [nn.Linear(4, 2)]}, SpecError, "a list of modules"),
        ({"model": around(nn.Linear(8, 8), nn.Linear(9, 8))}, ModelError, r"forward of blocks\.1 failed: RuntimeError"),
        ({"model": around(nn.Linear(8, 8), TwoTensors())}, ModelError, r"blocks\.1 .* gives a tuple, not one tensor"),
        ({"model": around(nn.Linear(8, 9), nn.Linear(9, 8))}, ModelError, r"blocks\.0 .* the shape and type that they"),
        ({"model": around(NoWayBack(8, 8), NoWayBack(8, 8))}, ModelError, "backward failed: RuntimeError: no way back"),
        ({"data": TensorDataset(torch.zeros(8, 4), torch.full((8,), 7))}, ModelError, "loss failed: IndexError"),
        ({"data": Unreadable()}, SpecError, r"spec\.data: one of .*37.*OSError: the volume is gone"),
        ({"model": around(nn.Dropout1d(0.1))}, SpecError, r"blocks\.0 is a Dropout1d"),
        ({"model": around(nn.BatchNorm1d(8, track_running_stats=False))}, SpecError, r"blocks\.0 is a BatchNorm1d"),
        ({"run_dir": "/dev/null"}, StorageError, "the run's record in /dev/null"),
        ({"data": [1, 2, 3]}, SpecError, "data: is list"),
        ({"training": Training(global_batch_size=16)}, SpecError, "exactly one of epochs and steps"),
        ({"freeze": Freeze(policy="Explicit")}, SpecError, r"spec\.freeze\.boundaries: policy Explicit needs"),
        ({"evaluation": Evaluation(best_metric="loss")}, SpecError, r"spec\.evaluation\.goal: bestMetric loss needs"),
        ({"checkpoint": Checkpoint(location="nope://x")}, SpecError, "nope://x cannot be reached from here"),
        ({"freeze": Forgetful()}, SpecError, "Forgetful failed: TypeError: Object of type Tensor is not JSON"),
    ],
)
def test_what_the_user_brings_fails_with_its_own_words(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, **changes)


class Unusual(nn.Module):
    """Two modules share a weight, and another never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.fixed = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.down.weight = self.up.weight
        self.fixed.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh()) + self.fixed(x)  # type: ignore[no-any-return]


def test_modules_may_share_weights_and_have_some_that_never_train_and_a_head_may_have_none(tmp_path: Path) -> None:
    built: list[nn.Module] = []

    def build() -> list[nn.Module]:
        built[:] = [nn.Linear(4, 8), Unusual(), Unusual(), nn.Linear(8, 8), nn.Identity()]
        return built

    freeze = Freeze(
        policy=FreezePolicyName.EXPLICIT, boundaries=[FreezePoint(step=2, boundary=1), FreezePoint(step=6, boundary=3)]
    )
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1)
    result = run(
        tmp_path, model=build, freeze=freeze, checkpoint=checkpoint, training=Training(steps=4, global_batch_size=16)
    )
    assert (result.steps, result.frozen_layers) == (4, 1)

    result = run(tmp_path, model=build, freeze=freeze, checkpoint=checkpoint)

    assert (result.steps, result.frozen_layers) == (8, 3)
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert torch.equal(trained["blocks.1.fixed.weight"], built[2].get_buffer("fixed.weight"))
    assert torch.equal(trained["blocks.1.up.weight"], trained["blocks.1.down.weight"])
    assert not torch.equal(trained["blocks.1.up.weight"], built[2].get_parameter("up.weight"))


def test_tensorboard_gets_curves_of_training_and_test(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from pipetransformer.tensorboard import TensorBoard

    run(tmp_path, callbacks=[TensorBoard(tmp_path / "logs")])

    found = EventAccumulator(str(tmp_path / "logs"))
    found.Reload()
    assert [scalar.step for scalar in found.Scalars("train/loss")] == list(range(8))
    assert [scalar.step for scalar in found.Scalars("test/accuracy")] == [4, 8]
