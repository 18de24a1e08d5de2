"""Frozen layers that leave the device change no bit: by freezes, evaluations, a thaw, regroups, kills or a resume."""

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from pipetransformer.elastic.regroup.from_storage import AssemblyWithoutPeers
from pipetransformer.elastic.regroup.transfer_plan import Origin, TransferPlan
from pipetransformer.errors import DeviceMemoryError
from pipetransformer.hooks import HookPoint
from pipetransformer.job.load import load_job
from pipetransformer.library.forecast import measure_here
from pipetransformer.models import Ties, unit_name
from pipetransformer.models.off_device import is_off
from pipetransformer.partition import Cut
from pipetransformer.partition.ideal import segments
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.kit import Kit
from pipetransformer.worker import trainer as trainer_module
from pipetransformer.worker.trainer import Ending, Trainer
from pipetransformer_contract.messages import Report
from pipetransformer_contract.spec import TrainerSpec
from pipetransformer_contract.wire import Env
from tests.testkit.trainer.harness import Faults, Ran, Scripted, run_job
from tests.testkit.trainer.ledger_checker import check

pytestmark = pytest.mark.timeout(240)

SAMPLES = 1433
STEPS_PER_EPOCH = 8
#: Device bytes that bound nothing here.
ROOMY = 1 << 40
#: Two layers freeze at once, two more after two epochs. After four, three of the four train again; then two freeze.
BOUNDARIES = [(0, 2), (16, 4), (32, 1), (40, 3)]
STAY = [Scripted(1, 1, [0])]
WIDEN = [Scripted(2, 1, [0, 1]), Scripted(1, 2, [1, 0], at_step=12), Scripted(2, 1, [0, 1], at_step=29)]
KILL = [Scripted(1, 2, [0, 1]), Scripted(1, 1, [0], after_loss=1)]
KILLED = {1: Faults(killed_at=(HookPoint.REDUCED, 27))}


def make_spec(offload_frozen: str, *, epochs: int = 6, **changes: Any) -> TrainerSpec:
    """Six epochs of digits, with an evaluation after each."""
    spec: dict[str, Any] = {
        "model": {
            "name": "vit", "numLayers": 6, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4,
            "dropout": 0.1,
        },
        "data": {"name": "digits"},
        "training": {
            "epochs": epochs,
            "globalBatchSize": 200,
            "optimizer": {"name": "AdamW", "learningRate": 0.003, "weightDecay": 0.01},
            "maxGradientNorm": 2.0,
        },
        "freeze": {
            "policy": "Explicit",
            "boundaries": [{"step": step, "boundary": boundary} for step, boundary in BOUNDARIES],
        },
        "pipeline": {"stages": 2, "microBatchSize": 50},
        "cache": {"policy": "Always", "offloadFrozen": offload_frozen},
        "numShards": 4,
        "workers": 2,
    }  # fmt: skip
    return TrainerSpec.model_validate(spec | changes)


def run(spec: TrainerSpec, script: Sequence[Scripted], folder: Path, *, device_bytes: int = ROOMY, **more: Any) -> Ran:
    return run_job(spec, script, folder, environment={Env.DEVICE_BYTES: str(device_bytes)}, **more)


def numbers(ran: Ran) -> list[tuple[Any, ...]]:
    """What was computed in each step that counts."""
    newest = {step["step"]: step for step in ran.steps}
    return [(n, s["frozenLayers"], s["loss"], s["gradientNorm"]) for n, s in sorted(newest.items())]


def left(ran: Ran) -> list[tuple[int, int]]:
    """(step, layers off the device since)."""
    return [(event["step"], event["layers"]) for event in ran.events("LayersOffloaded")]


@pytest.mark.parametrize(
    ("script", "faults"), [(STAY, {}), (WIDEN, {}), (KILL, KILLED)], ids=["alone", "regroups", "kill"]
)
def test_a_run_computes_the_same_bits(script: list[Scripted], faults: dict[int, Faults], tmp_path: Path) -> None:
    kept = run(make_spec("Never"), script, tmp_path / "never", faults=faults)
    offloaded = run(make_spec("Auto"), script, tmp_path / "auto", faults=faults)

    assert numbers(offloaded) == numbers(kept)
    assert [e["metrics"] for e in offloaded.events("Evaluated")] == [e["metrics"] for e in kept.events("Evaluated")]
    assert offloaded.lost_at.keys() == kept.lost_at.keys() == faults.keys()
    assert check(offloaded.run_dir, SAMPLES, 6).clean
    assert not left(kept)
    assert left(offloaded), "otherwise nothing was compared"


def test_layers_leave_once_an_epoch_of_what_they_make_is_cached(tmp_path: Path) -> None:
    ran = run(make_spec("Auto"), STAY, tmp_path)

    # Two of the layers that thaw return at once. The one that stays frozen computes what the cache lacks of it.
    assert left(ran) == [(8, 2), (24, 4), (48, 3)]
    planned = segments(BOUNDARIES, len(ran.steps) + 1, STEPS_PER_EPOCH)
    assert left(ran) == [(now.first_step, now.off) for before, now in pairwise(planned) if now.off > before.off]


def test_nothing_leaves_where_host_memory_is_the_same_memory(tmp_path: Path) -> None:
    assert not left(run_job(make_spec("Auto", epochs=2), STAY, tmp_path))


@pytest.mark.parametrize("cache", [{"policy": "Never"}, {"memoryBytes": 300_000}], ids=["none", "too small"])
def test_nothing_leaves_without_a_cache_that_holds_an_epoch(cache: dict[str, Any], tmp_path: Path) -> None:
    assert not left(run(make_spec("Auto", epochs=2, cache=cache), STAY, tmp_path))


def test_a_run_that_resumes_has_its_layers_on_the_device_until_its_cache_is_full(tmp_path: Path) -> None:
    whole = run(make_spec("Never"), STAY, tmp_path / "whole")
    kept: dict[str, Any] = {"checkpoint": {"location": str(tmp_path / "checkpoint"), "everySteps": 10}}
    first = run(make_spec("Auto", epochs=3, **kept), STAY, tmp_path / "first")

    second = run(make_spec("Auto", **kept), STAY, tmp_path / "second", first_generation=2, job_uid="other")

    assert left(first) == [(8, 2), (24, 4)]
    resumed = numbers(second)
    assert resumed == numbers(whole)[resumed[0][0] :]
    assert 0 < resumed[0][0] <= 24
    assert left(second)[0][0] >= resumed[0][0] + STEPS_PER_EPOCH


def test_mirrors_and_a_kill_return_to_layers_off_the_device(tmp_path: Path) -> None:
    """Both stages of the only pipeline are needed, so the survivor takes the lost stage from its mirror."""
    script = [Scripted(2, 1, [0, 1]), Scripted(1, 1, [0], after_loss=1)]
    mirror: dict[str, Any] = {"mirror": {"everySteps": 2}}
    faults = {1: Faults(killed_at=(HookPoint.COMPUTED, 27))}

    kept = run(make_spec("Never", **mirror), script, tmp_path / "never", faults=faults)
    offloaded = run(make_spec("Auto", **mirror), script, tmp_path / "auto", faults=faults)

    assert numbers(offloaded) == numbers(kept)
    assert left(offloaded)[0] == (8, 2)


def test_a_return_to_a_checkpoint_keeps_layers_off_the_device(tmp_path: Path) -> None:
    """The second worker dies with the only copy of its stage, so both stages come from the checkpoint."""
    freeze: dict[str, Any] = {"freeze": {"policy": "Explicit", "boundaries": [{"step": 0, "boundary": 2}]}}
    storage: dict[str, Any] = {"checkpoint": {"location": str(tmp_path / "checkpoint"), "everySteps": 4}}
    script = [Scripted(2, 1, [0, 1]), Scripted(1, 1, [0], after_loss=1)]
    faults = {1: Faults(killed_at=(HookPoint.COMPUTED, 22))}
    whole = run(make_spec("Never", epochs=5, **freeze), STAY, tmp_path / "whole")

    ran = run(make_spec("Auto", epochs=5, **freeze, **storage), script, tmp_path / "auto", faults=faults)

    assert ran.lost_at.keys() == {1}
    assert [(step, frozen) for step, frozen, *_ in numbers(ran)] == [(step, 2) for step in range(40)]
    losses = [[loss for _, _, loss, _ in numbers(each)] for each in (ran, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert check(ran.run_dir, SAMPLES, 5).clean
    assert left(ran) == [(8, 2)], "they never came back, so they did not leave again"


def test_units_of_a_checkpoint_that_stay_off_the_device_are_never_on_it() -> None:
    """The device is `meta`, from which nothing could be moved to host memory."""
    units = [nn.Linear(2, 2) for _ in range(4)]
    codec = mock.Mock(num_layers=2, ties=Ties())
    job = mock.Mock(blank_unit=lambda index: nn.Linear(2, 2, device="meta"))

    def load_unit(index: int) -> dict[str, torch.Tensor]:
        return {f"{unit_name(index, 2)}.{name}": tensor for name, tensor in units[index].state_dict().items()}

    found = Control(step=6, boundary=2, kept_step=4)
    checkpoints = mock.Mock(load_control=lambda name: found, load_unit=load_unit)
    sources: Any = mock.Mock(codec=codec, job=job, checkpoints=checkpoints)
    cut = Cut([range(1), range(1, 2), range(2, 4)], 1, owners=(0, 1, 0), ahead_units=2, holders=(0,))
    plan = TransferPlan(
        origin=Origin.CHECKPOINT, step=6, control={}, roles=[(0, 0)], cut=cut, moves=[],
        cached_layers=1, costs={"boundary": 2}, round_ended_at=9.0,
    )  # fmt: skip
    meta = torch.device("meta")

    failed = threading.Event()
    assembly = AssemblyWithoutPeers(sources, plan, 0, meta, failed)

    made = assembly.assemble()

    assert [is_off(unit) for _, unit in sorted(made.held.items())] == [True, True, False, False]
    devices = [next(unit.parameters()).device.type for _, unit in sorted(made.held.items())]
    assert devices == ["cpu", "cpu", "meta", "meta"]
    assert (set(made.copies), set(made.units)) == ({1}, {0, 2, 3})
    assert (made.control.cached_layers, made.control.awaited_layers) == (1, 2)
    assert made.control.costs == {"boundary": 2}
    assert made.control.round_ended_at == 9.0, "the end of the last round, which the checkpoint does not know"
    assert made.control.kept_step == 0, "the best model of that time has been replaced"
    failed.set()
    checkpoints.load_unit = mock.Mock(side_effect=AssertionError)
    with pytest.raises(ConnectionAbortedError):
        assembly.assemble()


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError),
        (RuntimeError("Connection closed by peer"), RuntimeError),
    ],
)
def test_an_accelerator_without_room_for_a_stage_from_the_seed_is_said_to_have_too_little_memory(
    failure: Exception, kind: type[Exception]
) -> None:
    """No worker holds a state to continue with, so trying again would not help."""
    job = mock.Mock(build_units=mock.Mock(side_effect=failure))
    sources: Any = mock.Mock(codec=mock.Mock(num_layers=2, ties=Ties()), job=job)
    plan: Any = mock.Mock(origin=Origin.FRESH, roles=[])

    with pytest.raises(kind, match=str(failure)) as caught:
        AssemblyWithoutPeers(sources, plan, 0, torch.device("cpu"), threading.Event()).assemble()

    assert type(caught.value) is kind


def test_layers_that_leave_in_a_step_that_breaks_the_generation_are_recorded(tmp_path: Path) -> None:
    """The second pipeline dies when the eighth step is committed, so the evaluation after it breaks."""
    faults = {1: Faults(killed_at=(HookPoint.COMMITTED, 7))}
    ran = run(make_spec("Auto", epochs=2), KILL, tmp_path, faults=faults)

    assert ran.lost_at.keys() == {1}
    assert left(ran) == [(8, 2)]


def test_an_accelerator_without_room_for_layers_that_return_is_said_to_have_too_little_memory() -> None:
    kit: Any = mock.Mock()
    state: Any = mock.Mock()
    state.keep_off_device.side_effect = torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(DeviceMemoryError, match="moving frozen layers between the accelerator and host memory"):
        Kit.place(kit, state, mock.Mock())


def test_a_worker_that_left_has_no_layers_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    left_group = mock.Mock(layout=None, state=WorkerState(1))
    left_group.groups.release.return_value = []
    monkeypatch.setattr(trainer_module, "regroup", lambda *_, **__: left_group)
    trainer: Any = mock.Mock(_member=None)

    assert Trainer._regroup(trainer, in_group=False) is Ending.LEFT

    trainer._kit.meter.on_placed.assert_called_once_with(0)


def offered(reports: Sequence[Report]) -> set[tuple[int, ...]]:
    """The numbers of stages that reports with predicted times offer."""
    timed = [report for report in reports if report.step_seconds is not None]
    return {tuple(offer.stages for offer in report.offers) for report in timed}


def test_measured_offers_obey_declared_bytes_and_count_what_has_left(tmp_path: Path) -> None:
    """Four of six layers are frozen, three of them in the first stage. The device is too small for a lone stage, but
    not by all that these three take."""
    spec = make_spec(
        "Auto",
        epochs=2,
        freeze={"policy": "Explicit", "boundaries": [{"step": 0, "boundary": 4}]},
        pipeline={"stages": 2, "microBatchSize": 50, "packing": "Measured"},
    )
    job = load_job(spec)
    costs = measure_here(job).model_copy(update={"host_apart": True})
    needed = []
    for cached_layers in (0, 3):
        model = job.layouts.step_model(costs, cached_layers)
        needed.append(model.bytes_per_worker(4, model.cut(4, 1, 1), 1))
    assert needed[1] < needed[0]

    ran = run(spec, [Scripted(2, 1, [0, 1])], tmp_path, device_bytes=sum(needed) // 2)

    ((step, layers),) = left(ran)
    assert (step, layers) == (STEPS_PER_EPOCH, 3)
    assert offered([report for report in ran.reports if report.step < step]) == {(2,)}
    assert offered([report for report in ran.reports if report.step >= step]) == {(2, 1)}
