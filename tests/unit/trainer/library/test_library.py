"""The trainer as a library: what a script may pass, and what is refused."""

import json
import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.utils.data import TensorDataset

from pipetransformer import (
    Callback,
    Checkpoint,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Pipeline,
    SpecError,
    Training,
    train,
)
from pipetransformer.elastic.transport.groups import HashStore
from pipetransformer.errors import CallbackError
from pipetransformer.job.load import load_job
from pipetransformer.job.script_parts import Overruled, Parts
from pipetransformer.schedules import Action, GPipe, RoundShape
from pipetransformer.worker.torchrun_agent import GENERATION
from pipetransformer.worker.trainer import Ending, Trainer
from pipetransformer_contract.spec import ScheduleName, TrainerSpec
from pipetransformer_contract.wire import Env

pytestmark = pytest.mark.timeout(600)


def test_a_manifest_and_a_script_that_contradict_each_other_are_refused() -> None:
    spec = TrainerSpec(model=Model(name="vit"), data=Data(name="digits"), training=Training(epochs=1))

    with pytest.raises(SpecError, match=r"spec\.model\.name: is vit, but this program passes its own model"):
        load_job(spec, Parts(model=list))
    with pytest.raises(SpecError, match=r"spec\.data\.name: is script, but this program passes no data"):
        load_job(spec.model_copy(update={"data": Data(name="script")}))


@dataclass(frozen=True)
class OwnSchedule:
    """A script's."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        return GPipe().actions(shape)


@pytest.mark.parametrize(
    ("name", "own", "in_turns"),
    [
        ("GPipe", None, False),
        ("OneForwardOneBackward", None, True),
        ("Script", Schedule1F1B, True),
        ("Script", ScheduleGPipe, False),
        ("Script", OwnSchedule(), False),
    ],
)
def test_steps_are_predicted_by_what_the_schedule_is_and_not_by_who_brings_it(
    name: str, own: type[ScheduleGPipe | Schedule1F1B] | OwnSchedule | None, in_turns: bool
) -> None:
    spec = TrainerSpec(
        model=Model(name="vit", num_layers=4),
        data=Data(name="digits"),
        training=Training(epochs=1),
        pipeline=Pipeline(stages=2, schedule=ScheduleName(name)),
    )

    job = load_job(spec, Parts(schedule=own))
    model, cut = job.layouts.step_model(None), job.layouts.cut(0, 2, 1, None)
    like = ScheduleName.ONE_FORWARD_ONE_BACKWARD if in_turns else ScheduleName.GPIPE
    assert cut.schedule == name
    assert model.predict(0, cut, 1) == model.predict(0, replace(cut, schedule=like), 1)


def test_what_the_script_sets_and_the_manifest_has_otherwise_is_told_and_defaults_are_not() -> None:
    parts = Model(name="vit"), Data(name="digits")
    optimizer = Optimizer(learning_rate=1e-3, weight_decay=0.1)
    training = Training(epochs=4, max_gradient_norm=1.0, optimizer=optimizer)
    said = TrainerSpec(model=parts[0], data=parts[1], training=training, checkpoint=Checkpoint(location="/there"))
    manifest = TrainerSpec(model=parts[0], data=parts[1], training=Training(epochs=5, seed=1))

    assert Parts(said=said).overruled(manifest) == [
        Overruled("spec.training.epochs", 4, 5),
        Overruled("spec.training.optimizer.weightDecay", 0.1, 0.0),
        Overruled("spec.training.maxGradientNorm", 1.0, None),
        Overruled("spec.checkpoint.location", "/there", None),
    ]
    assert Parts().overruled(manifest) == []


def small_model() -> list[nn.Module]:
    return [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)]


def small_run(run_dir: Path, /, **parts: Any) -> None:
    """Two steps in this process."""
    samples = TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.long))
    said: dict[str, Any] = {
        "model": small_model,
        "data": (samples, samples),
        "training": Training(steps=2, global_batch_size=8),
        "run_dir": run_dir,
    }
    train(**said | parts)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("loader_processes", -1, "Input should be greater than or equal to 0; got -1"),
        ("loader_processes", 300, "Input should be less than or equal to 256; got 300"),
        ("loader_processes", 2.5, "Input should be a valid integer, .*; got 2.5"),
        ("loader_processes", "two", "Input should be a valid integer, .*; got 'two'"),
        ("training", None, "Input should be .* instance of Training; got None"),
        ("training", Evaluation(), r"Input should be .* instance of Training; got Evaluation\("),
        ("pipeline", 2, "Input should be .* instance of Pipeline; got 2"),
        ("pipeline.stages", {"stages": "two"}, "Input should be a valid integer, .*; got 'two'"),
        (
            "freeze.boundaries.0.boundry",
            {"policy": "Explicit", "boundaries": [{"step": 1, "boundary": 1, "boundry": 2}]},
            r'there is no such field \(did you mean "boundary"\?\)',
        ),
        (
            "training.learningRateSchedule.shap",
            {"steps": 2, "learningRateSchedule": {"shap": "Linear"}},
            r'there is no such field \(did you mean "shape"\?\)',
        ),
        ("checkpoint", "/path", "Input should be .* instance of Checkpoint; got '/path'"),
        ("freeze", "GradientNorm", "must be a Freeze, or a FreezePolicy, not 'GradientNorm'"),
        ("model", 3, r"must be a Model, or a function without arguments .*, not 3"),
        ("model", lambda: None, r"the function must return .* \(embedding, layers, head\), not NoneType"),
        ("metrics", small_model, "must be a list of functions, not <function small_model"),
        ("callbacks", Callback(), "must be a list of Callback objects, not <.*Callback object"),
        ("callbacks", [Callback], "must be a list of Callback objects, not "),
        ("run_dir", None, "must be a path, not None"),
    ],
)
def test_an_argument_of_another_type_is_refused_with_its_name_what_was_given_and_what_is_wanted(
    name: str, given: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(name)}: {message}") as refused:
        small_run(tmp_path, **{name.partition(".")[0]: given})
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_what_is_of_a_type_of_the_spec_may_be_a_dict_of_its_fields(tmp_path: Path) -> None:
    small_run(
        tmp_path / "run",
        training={"steps": 2, "globalBatchSize": 8},
        freeze={"policy": "None"},
        pipeline={"stages": 1},
        cache={"policy": "Never"},
        evaluation={"every_steps": 1},
        checkpoint={"location": str(tmp_path / "checkpoint"), "every_steps": 1},
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    with pytest.raises(SpecError, match=r"^spec\.model\.hiddenSize: "):  # so both were taken
        small_run(tmp_path, model={"name": "vit", "hidden_size": 65}, data={"name": "digits"})


def test_a_tilde_in_the_location_of_checkpoints_is_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    small_run(tmp_path / "run", checkpoint={"location": "~/kept", "every_steps": 1})

    assert list((tmp_path / "kept").iterdir())
    assert not (tmp_path / "~").exists()


def refusal(run_dir: Path, monkeypatch: pytest.MonkeyPatch, **parts: Any) -> str:
    """With what words the program ends its job, as a worker."""
    told = run_dir / "termination-log"
    for name in (Env.JOB_NAMESPACE, Env.JOB_NAME, Env.JOB_UID, Env.WORKER_NAME, Env.WORKER_ADDRESS, Env.CHANNEL_URL):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv(Env.TERMINATION_LOG, str(told))

    with pytest.raises(SystemExit) as end:
        small_run(run_dir / "run", **parts)

    said = json.loads(told.read_text())
    assert (end.value.code, said["outcome"], said["reason"]) == (2, "Failed", "InvalidSpec")
    return str(said["message"])


def test_a_worker_whose_program_passes_something_else_ends_its_job_and_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal(tmp_path, monkeypatch, callbacks=Callback())
    assert message.startswith("callbacks: must be a list of Callback objects")


def test_an_agent_that_starts_several_processes_for_one_worker_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them would be one member of the generation."""
    generation: dict[str, Any] = {
        "jobUid": "x",
        "layoutGeneration": 1,
        "stages": 1,
        "pipelines": 1,
        "leader": "x",
        "nonce": "n",
    }
    generation |= {"members": [{"name": "x", "uid": "x", "address": "x:1"}], "reason": "Start"}
    monkeypatch.setenv(GENERATION, json.dumps(generation))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    assert re.match(r"spec\.podTemplate: .* use --nproc-per-node 1", refusal(tmp_path, monkeypatch))


def test_a_run_that_fails_leaves_no_thread_that_watches_for_generations(tmp_path: Path) -> None:
    class Failing(Callback):
        def on_step(self, line: Any) -> None:
            raise ValueError("no")

    before = set(threading.enumerate())
    with pytest.raises(CallbackError):
        small_run(tmp_path, callbacks=[Failing()])

    watching = [each for each in set(threading.enumerate()) - before if each.name.startswith("watch-generation")]
    for thread in watching:
        thread.join(10)
    assert not any(thread.is_alive() for thread in watching)


def test_a_second_run_at_the_same_time_in_one_process_is_refused(tmp_path: Path) -> None:
    refused = []

    class Nested(Callback):
        def on_step(self, line: Any) -> None:
            with pytest.raises(SpecError, match="this process already trains") as error:
                small_run(tmp_path / "second")
            refused.append(error)

    small_run(tmp_path / "first", callbacks=[Nested()])
    assert len(refused) == 2
    small_run(tmp_path / "third")


def test_a_rank_that_comes_back_into_the_layout_warms_up_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warms, run = [], Trainer.run

    def leave_first(trainer: Trainer, *, warm: bool) -> Ending:
        warms.append(warm)
        return Ending.LEFT if len(warms) == 1 else run(trainer, warm=warm)

    monkeypatch.setattr(Trainer, "run", leave_first)
    small_run(tmp_path)

    assert warms == [False, True]


def test_a_program_makes_its_own_default_group_before_or_after_a_run(tmp_path: Path) -> None:
    if dist.is_initialized():  # by another test
        dist.destroy_process_group()
    small_run(tmp_path / "first")

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        own = dist.group.WORLD
        small_run(tmp_path / "second")
        assert dist.group.WORLD is own
    finally:
        dist.destroy_process_group()
