"""What one regroup looks up, takes over and leaves behind, seen from one worker that is alone in it."""

import datetime
from pathlib import Path
from unittest import mock

import pytest
import torch

from pipetransformer.checkpoint.best_model import best_location
from pipetransformer.checkpoint.checkpointer import Checkpointer
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, host_store
from pipetransformer.elastic.regroup.mirrors import Mirror, Mirrors
from pipetransformer.elastic.regroup.tools import RegroupTools
from pipetransformer.elastic.regroup.transaction import Regrouped, regroup
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import TCPStore, Transport
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer.hooks import Hooks
from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.models import unit_name
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import CheckpointInfo, commit, save_unit
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


def enter(job: Job, mirrors: Mirrors, hosted: tuple[TCPStore, str]) -> Regrouped:
    """The only generation of a worker that holds nothing but mirrors."""
    store, address = hosted
    handler = GenerationRendezvousHandler("w0", store, Published(address), timeout=TIMEOUT)
    watchdog = Watchdog()
    tools = RegroupTools(
        handler=handler,
        transport=Transport("127.0.0.1", TIMEOUT),
        job=job,
        checkpoints=Checkpointer(job),
        run_dir=Path("no-record"),
        mirrors=mirrors,
        read_ahead=mock.Mock(units={}),
        barrier=Barrier(watchdog),
        watchdog=watchdog,
        hooks=Hooks(),
    )
    state = WorkerState(job.num_layers, job.model.ties)
    return regroup(tools, state, mock.Mock(pending=None, pending_steps=1, in_doubt=None), in_group=False)


def mirrored(job: Job, control: Control) -> Mirrors:
    """All units, as they were when this was the control state."""
    codec = UnitCodec(job.spec.training.optimizer, job.num_layers, job.model.ties)
    state = WorkerState(job.num_layers, control=control, units=job.build_units(range(job.num_layers + 2)))
    units = {index: [part.clone() for part in codec.give(state, index, CPU)] for index in state.units}
    return Mirrors(1, codec, job.model.units, CPU, [Mirror(control.step, control.to_dict(), units)])


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


def test_the_leaders_store_keeps_nothing_of_what_a_generation_agreed_on(job: Job, hosted: tuple[TCPStore, str]) -> None:
    store = enter(job, mirrored(job, Control(step=15)), hosted).store

    until(lambda: not any(store.check([key]) for key in ("inventory/0", "plan", "plan/by-storage")))
    assert store.check(["here/w0"]), "it is this generation's"
