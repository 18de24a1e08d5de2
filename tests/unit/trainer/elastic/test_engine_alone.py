"""What one regroup looks up, takes over and leaves behind, seen from one worker that is alone in it."""

import datetime
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.checkpoint.best_model import best_location
from pipetransformer.checkpoint.checkpointer import Checkpointer
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, host_store
from pipetransformer.elastic.regroup.mirrors import Mirror, Mirrors
from pipetransformer.elastic.regroup.tools import RegroupTools, Unsettled
from pipetransformer.elastic.regroup.transaction import Regrouped, regroup
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import TCPStore, Transport
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer.hooks import Hooks
from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.models import unit_name
from pipetransformer.partition import Cut
from pipetransformer.record import Ledger
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import CheckpointInfo, commit, save_unit
from pipetransformer.training.commit import Committer
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from tests.testkit.trainer.numerics import ADAMW, make_spec
from tests.testkit.trainer.storing import until

pytestmark = pytest.mark.timeout(60)

TIMEOUT = datetime.timedelta(seconds=30)
CPU = torch.device("cpu")
EVALUATED = {"accuracy": 0.5, "loss": 1.0}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    checkpoint = {"location": str(tmp_path / "checkpoint"), "everySteps": 100}
    return load_job(
        make_spec(
            ADAMW,
            checkpoint=checkpoint,
            evaluation={"everySteps": 2, "keepBest": True},
            pipeline={"stages": 1, "microBatchSize": 16},
            workers=1,
        )
    )


@pytest.fixture
def hosted() -> tuple[TCPStore, str]:
    """The store that the worker hosts, and where."""
    return host_store("127.0.0.1", TIMEOUT)


class Published:
    """The source of one generation."""

    def __init__(self, address: str) -> None:
        self._generation = Generation(
            job_uid="job", layout_generation=4, stages=1, pipelines=1, leader="w0", nonce="n",
            members=[Member(name="w0", uid="u0", address=address)], reason=ResizeReason.FAILURE,
        )  # fmt: skip

    def next_generation(self, after: int) -> Generation:
        return self._generation

    def newest(self) -> int:
        return self._generation.layout_generation

    def close(self) -> None:
        pass


def enter(
    job: Job,
    mirrors: Mirrors,
    hosted: tuple[TCPStore, str],
    state: WorkerState | None = None,
    unsettled: Unsettled | None = None,
    run_dir: Path = Path("no-record"),
    *,
    in_group: bool = False,
) -> Regrouped:
    """The only generation of a worker. By default it holds nothing but mirrors."""
    store, address = hosted
    handler = GenerationRendezvousHandler("w0", store, Published(address), timeout=TIMEOUT)
    watchdog = Watchdog()
    tools = RegroupTools(
        handler=handler,
        transport=Transport("127.0.0.1", TIMEOUT),
        job=job,
        checkpoints=Checkpointer(job),
        run_dir=run_dir,
        mirrors=mirrors,
        read_ahead=mock.Mock(units={}),
        barrier=Barrier(watchdog),
        watchdog=watchdog,
        hooks=Hooks(),
    )
    state = state or WorkerState(job.num_layers, job.model.ties)
    unsettled = unsettled or mock.Mock(pending=None, pending_steps=1, in_doubt=None)
    return regroup(tools, state, unsettled, in_group=in_group)


def mirrored(job: Job, control: Control) -> Mirrors:
    """All units, as they were when this was the control state."""
    codec = UnitCodec(job.spec.training.optimizer, job.num_layers, job.model.ties)
    state = WorkerState(job.num_layers, control=control, units=job.build_units(range(job.num_layers + 2)))
    units = {index: [part.clone() for part in codec.give(state, index, CPU)] for index in state.units}
    return Mirrors(1, codec, job.model.units, CPU, [Mirror(control.step, control.to_dict(), units)])


def write_checkpoint(job: Job, control: Control) -> None:
    assert job.spec.checkpoint is not None
    info = CheckpointInfo(
        step=control.step, boundary=control.boundary, layout_generation=3, num_layers=job.num_layers,
        state=control.to_file(), run=job.identity,
    )  # fmt: skip
    state = WorkerState(job.num_layers, units=job.build_units(range(job.num_layers + 2)))
    for index in state.units:
        tensors = {name: tensor.detach() for name, tensor in state.unit_tensors(index, with_moments=False).items()}
        save_unit(job.spec.checkpoint.location, info, unit_name(index, job.num_layers), tensors)
    commit(job.spec.checkpoint.location, info)


def keep_best(job: Job, step: int) -> None:
    assert job.spec.checkpoint is not None
    location = best_location(job.spec.checkpoint.location)
    info = CheckpointInfo(step=step, boundary=0, layout_generation=3, num_layers=job.num_layers)
    for index in range(job.num_layers + 2):
        unit = unit_name(index, job.num_layers)
        save_unit(location, info, unit, {f"{unit}.weight": torch.ones(1)})
    commit(location, info, keep=1)


@pytest.mark.parametrize(("kept", "is_kept"), [(10, True), (18, False)])
def test_a_worker_on_a_mirror_knows_whether_its_best_model_is_kept(
    job: Job, hosted: tuple[TCPStore, str], kept: int, is_kept: bool
) -> None:
    mirrors = mirrored(job, Control(step=15, best=EVALUATED, best_step=10, kept_step=10))
    keep_best(job, kept)

    control = enter(job, mirrors, hosted).state.control

    assert (control.step, control.best_step, control.kept_step) == (15, 10, kept)
    assert control.best_is_kept is is_kept


def test_a_mirror_stays_as_it_was_when_the_worker_trains_on_from_it(hosted: tuple[TCPStore, str]) -> None:
    """It may have to return there again, before the next mirror. Large tensors are not packed, and so not copied."""
    wide = {"name": "vit", "numLayers": 1, "hiddenSize": 64, "numHeads": 2, "mlpSize": 256, "patchSize": 4}
    pipeline = {"stages": 1, "microBatchSize": 16}
    job = load_job(make_spec(ADAMW, model=wide, pipeline=pipeline, workers=1, freeze={"policy": "None"}))
    mirrors = mirrored(job, Control(step=15))
    before = {index: [part.clone() for part in parts] for index, parts in mirrors.kept[0].units.items()}
    assert any(len(parts) > 1 for parts in before.values())

    state = enter(job, mirrors, hosted).state
    with torch.no_grad():
        for _, parameter in state.trained_parameters():
            parameter.add_(1.0)

    for index, parts in mirrors.kept[0].units.items():
        assert all(map(torch.equal, parts, before[index])), index


@pytest.mark.parametrize(
    ("returns_to", "in_group", "frees"), [("checkpoint", False, True), ("mirror", False, True), ("mirror", True, False)]
)
def test_a_stage_that_no_plan_can_use_is_freed_before_another_is_made(
    returns_to: str, in_group: bool, frees: bool, job: Job, hosted: tuple[TCPStore, str], tmp_path: Path
) -> None:
    """Otherwise an accelerator that is more than half full could not return to an earlier state. But a group that is
    whole trains on if the regroup fails."""
    earlier = Control(step=5, job_uid="job")
    mirrors = mirrored(job, earlier) if returns_to == "mirror" else Mirrors(None, job.codec, [], CPU)
    if returns_to == "checkpoint":
        write_checkpoint(job, earlier)
    state = WorkerState(job.num_layers, job.model.ties, Control(step=8, job_uid="job", last_generation=3))
    state.units = job.build_units(range(2))  # the others are lost
    state.apply_boundary()
    committer = Committer(job, "w0", tmp_path / "run", Hooks())
    published = Published("127.0.0.1:1").next_generation(0)
    gradients = committer.equip(job, state, StageLayout(published, 0, [(0, 0)], Cut([range(2)], 16)))
    gradients.clear()
    assert committer.optimizer is not None
    committer.optimizer.step()
    committer.hold(state.control)
    tensors: list[Tensor] = [parameter for _, parameter in state.trained_parameters()]
    tensors += [entry for entries in state.moments.values() for entry in entries.values()]
    held = list(map(weakref.ref, [*tensors, *gradients.of_unit.values()]))
    del tensors, gradients
    alive: list[int] = []
    blank_unit = Job.blank_unit

    def make(job: Job, index: int) -> nn.Module:
        alive.append(sum(one() is not None for one in held))
        return blank_unit(job, index)

    with mock.patch.object(Job, "blank_unit", make):
        entered = enter(job, mirrors, hosted, state, committer, in_group=in_group)

    assert alive == [0 if frees else len(held)] * (job.num_layers + 2)
    assert (entered.state.control.step, state.control.step) == (5, 8)
    assert set(state.units) == (set() if frees else {0, 1})


def test_the_record_of_another_run_numbers_no_generations(
    job: Job, hosted: tuple[TCPStore, str], tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path, "w0")
    ledger.append(step=0, epoch=0, layout_generation=7, stages=1, pipelines=1, pipeline=0, sample_ids=[0])
    nothing = Mirrors(None, job.codec, [], CPU)

    assert enter(job, nothing, hosted, run_dir=tmp_path).state.control.earlier_generations == 0
    keep_best(job, 2)
    assert enter(job, nothing, hosted, run_dir=tmp_path).state.control.earlier_generations == 7


def test_the_leaders_store_keeps_nothing_of_what_a_generation_agreed_on(job: Job, hosted: tuple[TCPStore, str]) -> None:
    store = enter(job, mirrored(job, Control(step=15)), hosted).store

    until(lambda: not any(store.check([key]) for key in ("inventory/0", "plan", "plan/by-storage")))
    assert store.check(["here/w0"]), "it is this generation's"
