"""A run that goes on from the checkpoint of one before, and what keeps it from that."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipetransformer import Checkpoint, Evaluation, Freeze, Goal, Pipeline, PipelineModel, Training
from pipetransformer.errors import ModelError, SpecError, StorageError
from pipetransformer_contract.spec import FreezePoint, FreezePolicyName, ScheduleName
from tests.testkit.trainer.script import Log, model, run, samples
from tests.testkit.user_code import causal_model

pytestmark = pytest.mark.timeout(120)


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


def test_the_time_between_two_runs_is_no_pause(tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=3, global_batch_size=16))
    marker = max((tmp_path / "checkpoint").glob("step-*/DONE.json"))
    info = json.loads(marker.read_text())
    info["state"]["roundEndedAt"] -= 3600
    marker.write_text(json.dumps(info))

    run(tmp_path, checkpoint=checkpoint)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [entry["pause_seconds"] < 60 for entry in summary["generations"]] == [True, True]


def test_a_run_that_goes_on_numbers_its_generations_above_all_that_was_kept_or_noted(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "checkpoint": Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1),
        "evaluation": Evaluation(every_steps=1, keep_best=True, best_metric="loss", goal=Goal.LOWEST),
    }

    def generation_of_run(steps: int) -> int:
        log = Log()
        run(tmp_path, training=Training(steps=steps, global_batch_size=16), callbacks=[log], **arguments)
        number: int = log.of("generation")[0][1]
        return number

    assert generation_of_run(2) == 1
    (best,) = (tmp_path / "checkpoint" / "best").iterdir()
    marker = json.loads((best / "DONE.json").read_text())
    (best / "DONE.json").write_text(json.dumps(marker | {"layoutGeneration": 3}))
    best.rename(best.with_name(best.name.replace("-g1", "-g3")))
    assert generation_of_run(3) == 4

    events = tmp_path / "run" / "events.jsonl"
    committed = [
        event for event in map(json.loads, events.read_text().splitlines()) if event["kind"] == "GenerationCommitted"
    ]
    with events.open("a") as file:
        file.write(json.dumps(committed[-1] | {"generation": 7}) + "\n")
    assert generation_of_run(4) == 8


def test_a_run_goes_on_with_its_own_record_and_not_with_that_of_another_run_in_its_folder(tmp_path: Path) -> None:
    def losses(steps: int, **changes: Any) -> list[float]:
        name = "another" if changes else "own"
        checkpoint = Checkpoint(location=str(tmp_path / name), every_steps=1)
        run(tmp_path, checkpoint=checkpoint, training=Training(steps=steps, global_batch_size=16, **changes))
        return noted(tmp_path / "run")

    def noted(folder: Path) -> list[float]:
        return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]

    own, another = losses(3), losses(5, seed=3)
    rest = losses(4)
    assert len(rest) == 2 and rest[0] == own[-1], "the last step of before, and its own"
    assert losses(5)[:2] == rest, "it goes on with its own"
    aside = sorted((tmp_path / "run" / "earlier").iterdir())
    assert sorted(map(noted, aside)) == sorted([own, another])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    found = [summary[key] for key in ("samples_lost", "samples_repeated", "audited_from_step", "steps_redone")]
    assert found == [0, 0, 3, 0]


def test_a_run_that_goes_on_with_fewer_steps_than_it_has_evaluates_the_model_that_it_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, evaluation = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=3), Evaluation(every_steps=2)
    run(tmp_path, checkpoint=checkpoint, evaluation=evaluation, training=Training(steps=4, global_batch_size=16))
    (last,) = (tmp_path / "checkpoint").glob("step-*4-*")
    shutil.rmtree(last)  # as if the run had died before it
    log = Log()

    arguments: dict[str, Any] = {"training": Training(steps=2, global_batch_size=16), "callbacks": [log]}
    result = run(tmp_path, checkpoint=checkpoint, evaluation=evaluation, **arguments)

    assert (result.steps, log.of("evaluate")[-1][0]) == (3, 3)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    found = [summary[key] for key in ("model_step", "samples_lost", "samples_repeated", "steps_redone")]
    assert found == [3, 0, 0, 1]
    assert "trained for 3 steps already, more than the 2 asked for" in caplog.text


def test_what_fails_in_an_evaluation_of_a_run_that_goes_on_fails_before_its_first_step(tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=1, global_batch_size=16))

    def broken(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no such class")

    with pytest.raises(ModelError, match="metric broken failed: RuntimeError: no such class"):
        run(tmp_path, checkpoint=checkpoint, metrics=[broken])
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 1


def test_a_run_that_goes_on_with_slices_of_tokens_tries_them_before_its_first_step(tmp_path: Path) -> None:
    class Reversed(nn.Module):
        """A layer that mixes each position with one of another slice, although its model promises slices."""

        def forward(self, x: Tensor) -> Tensor:
            return x + x.flip(1)

    info = causal_model.make_data("", torch.float32).info
    whole = causal_model.make_model(info, 2)
    broken = PipelineModel(whole.embedding, [whole.blocks[0], Reversed()], whole.head, (16, 8), slices_tokens=True)
    rest: dict[str, Any] = {
        "model": lambda: broken,
        "data": causal_model.make_data("", torch.float32),
        "checkpoint": Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1),
    }
    run(tmp_path, training=Training(steps=1, global_batch_size=16), **rest)

    with pytest.raises(SpecError, match=r"blocks\.1 computes something else in slices"):
        run(tmp_path, pipeline=Pipeline(schedule=ScheduleName.TERA_PIPE), **rest)
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 1


def test_a_run_does_not_go_on_from_another_ones_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=1, global_batch_size=16))

    others = TensorDataset(samples(64, 0).tensors[0], 1 - samples(64, 0).tensors[1])
    another = r"name another location \(with `pipetransformer run`, another --run-dir\)"
    changed: list[tuple[dict[str, Any], str]] = [
        ({"model": lambda: [*model(), nn.Linear(2, 2)]}, f"numLayers was 3 and not 4: {another}, or change numLayers"),
        (
            {"model": lambda: [*model()[:-1], nn.Linear(8, 2, bias=False)]},
            f"number of parameters was 274 and not 272: {another}, or use the same model",
        ),
        ({"training": Training(epochs=2, global_batch_size=8)}, "globalBatchSize was 16 and not 8"),
        ({"training": Training(epochs=2, global_batch_size=16, seed=1)}, "seed was 0 and not 1"),
        ({"freeze": Freeze(always=["blocks.0"])}, r"freezeAlways was \[\] and not \['blocks.0'\]"),
        ({"data": samples(63, 0)}, "trainingSamples was 64 and not 63"),
        ({"data": others}, r"trainingTargets was \w+ and not \w+"),
    ]
    for changes, message in changed:
        with pytest.raises(SpecError, match=f"spec.checkpoint.location: .* another run, whose {message}"):
            run(tmp_path, checkpoint=checkpoint, **changes)


def test_a_run_goes_on_with_what_its_checkpoint_is_no_longer_said_to_have(tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=1, global_batch_size=16))
    marker = max((tmp_path / "checkpoint").glob("step-*/DONE.json"))
    said = json.loads(marker.read_text())
    del said["run"]["trainingTargets"]
    marker.write_text(json.dumps(said))

    assert run(tmp_path, checkpoint=checkpoint, data=(samples(64, 3), samples(20, 1))).steps == 8


def test_a_run_with_fewer_samples_than_its_checkpoints_data_have_shards_is_told_so(tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=1, global_batch_size=16))

    with pytest.raises(
        SpecError, match=r"location: /.*/checkpoint holds .* in 16 shards, .* 10 training samples: .* --run-dir"
    ):
        run(tmp_path, checkpoint=checkpoint, data=samples(10, 0))


class Named(nn.Module):
    """One weight, of a name and shape."""

    def __init__(self, name: str, *shape: int) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.parameters()).sum()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (("scale", 2, 4), "state of blocks.0 has no scale"),
        (("weight", 4, 2), r"weight of blocks.0 is \(2, 4\) and not \(4, 2\)"),
    ],
)
def test_a_run_does_not_go_on_with_weights_of_other_names_or_shapes(
    block: tuple[str, int, int], message: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1)
    training = Training(steps=1, global_batch_size=16)
    run(
        tmp_path,
        model=lambda: [nn.Linear(4, 8), Named("weight", 2, 4), nn.Linear(8, 2)],
        checkpoint=checkpoint,
        training=training,
    )

    with pytest.raises(SpecError, match=rf"location: step-0{{11}}1-g1-\w+ belongs to another model: {message}"):
        run(tmp_path, model=lambda: [nn.Linear(4, 8), Named(*block), nn.Linear(8, 2)], checkpoint=checkpoint)


def test_a_run_goes_on_with_another_freeze_policy_from_the_newest_checkpoint_that_is_whole(tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=2)
    before = Freeze(policy=FreezePolicyName.NORM_CHANGE, interval_steps=100)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=4, global_batch_size=16), freeze=before)
    [newest] = (tmp_path / "checkpoint").glob("step-000000000004-g1-*/blocks.1.safetensors")
    newest.write_bytes(newest.read_bytes()[:100])

    log = Log()
    after = Freeze(policy=FreezePolicyName.PLASTICITY, interval_steps=1)
    result = run(tmp_path, checkpoint=checkpoint, callbacks=[log], freeze=after)

    assert log.of("step") == [2, 3, 4, 5, 6, 7]
    assert result.steps == 8


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: bytes(len(content)),
        lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],  # one bit of a weight or moment
        lambda content: content.replace(b'weight"', b'weighs"', 1),
    ],
    ids=["zeros", "one bit", "a name"],
)
def test_a_checkpoint_with_a_damaged_unit_is_named(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=2)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=2, global_batch_size=16))
    [newest] = (tmp_path / "checkpoint").glob("step-000000000002-g1-*/blocks.1.safetensors")
    newest.write_bytes(damage(newest.read_bytes()))

    with pytest.raises(StorageError, match=r"remove step-000000000002-g1-.*blocks\.1\.safetensors is damaged"):
        run(tmp_path, checkpoint=checkpoint)


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

    assert (result.steps, result.frozen_layers) == (8, 2), (
        "the last layer trains, because the head has nothing to train"
    )
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert torch.equal(trained["blocks.1.fixed.weight"], built[2].get_buffer("fixed.weight"))
    assert torch.equal(trained["blocks.1.up.weight"], trained["blocks.1.down.weight"])
    assert not torch.equal(trained["blocks.1.up.weight"], built[2].get_parameter("up.weight"))


def durable(folder: Path) -> list[int]:
    """Steps of the durable checkpoints."""
    return sorted(json.loads(marker.read_text())["step"] for marker in folder.glob("step-*/DONE.json"))


@pytest.mark.parametrize("every", [None, 3, 4])
def test_a_run_that_completed_goes_on_with_more_steps_where_it_ended(every: int | None, tmp_path: Path) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=every)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=4, global_batch_size=16))
    assert durable(tmp_path / "checkpoint")[-1] == 4

    log = Log()
    result = run(tmp_path, checkpoint=checkpoint, training=Training(steps=6, global_batch_size=16), callbacks=[log])

    assert (log.of("step"), result.steps) == ([4, 5], 6)


def test_a_full_volume_of_checkpoints_does_not_lose_the_finished_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pipetransformer.checkpoint.checkpointer.commit", full)
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=100)

    with pytest.raises(StorageError, match=r"spec\.checkpoint\.location: .*No space left"):
        run(tmp_path, checkpoint=checkpoint, training=Training(steps=2, global_batch_size=16))

    assert (tmp_path / "run" / "model" / "pipetransformer.json").exists()


class Mixing(TensorDataset):
    """Targets that are drawn anew at each read, as by mixup."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = self.tensors[0][index]
        share = torch.rand(())
        return inputs, torch.stack([share, 1 - share])


def test_a_run_with_targets_that_are_drawn_anew_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    data = Mixing(*samples(64, 0).tensors), samples(20, 1)
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1)
    run(tmp_path, data=data, checkpoint=checkpoint, training=Training(steps=2, global_batch_size=16))
    log = Log()
    run(tmp_path, data=data, checkpoint=checkpoint, training=Training(steps=4, global_batch_size=16), callbacks=[log])
    assert log.of("step") == [2, 3]
