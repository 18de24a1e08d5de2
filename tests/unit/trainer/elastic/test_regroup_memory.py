"""What a worker holds while its stage becomes another one: never both layouts' gradients, nor what has moved away."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipetransformer.checkpoint.checkpointer import Checkpointer
from pipetransformer.elastic.regroup.mirrors import Mirror
from pipetransformer.elastic.regroup.phases import Phases
from pipetransformer.elastic.regroup.transaction import Regrouped
from pipetransformer.elastic.transport.groups import GenerationGroups, Transport, alone
from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.partition import Cut
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.worker import trainer as trainer_module
from pipetransformer.worker.trainer import Trainer
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from tests.testkit.trainer.numerics import ADAMW, make_spec

pytestmark = pytest.mark.timeout(120)

LAYERS = 6
UNITS = LAYERS + 2
RANK = 1  # neither leads nor listens
SMALL = {"name": "vit", "numLayers": LAYERS, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4}
#: Its matrices are too large to be packed.
LARGE = SMALL | {"hiddenSize": 64, "mlpSize": 384}
TIED = {"name": "tests.testkit.user_code.tied_model:make_model", "numLayers": LAYERS}
MOMENTUM = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9}


class Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the memory that operations in here have made and that anything still refers to, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, kinds: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, list | tuple) else [output]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._made:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
                    self.most = max(self.most, self.now())
        return output

    def now(self) -> int:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._made.values())


def layout_of(number: int, span: range, stages: int) -> StageLayout:
    """In which this worker has the last stage, which is the span."""
    members = [Member(name=f"w{rank}", uid="u", address="127.0.0.1:1") for rank in range(max(2, stages))]
    pipelines = len(members) // stages
    generation = Generation(
        job_uid="job", layout_generation=number, stages=stages, pipelines=pipelines, members=members, leader="w0",
        nonce="n", reason=ResizeReason.PACK,
    )  # fmt: skip
    others = [range(span.start)] * (stages - 1)  # whatever they have
    return StageLayout(generation, RANK, [(0, 0), (pipelines - 1, stages - 1)], Cut([*others, span], 1))


class Worker:
    """A real trainer, to whom regroups happen whose states were made here."""

    def __init__(self, job: Job, run_dir: Path, held: Held) -> None:
        self.job, self.held = job, held
        transport = Transport("127.0.0.1", cast(Any, None), torch.device("cpu"))
        self.trainer = Trainer(job, "w1", mock.Mock(), mock.Mock(), transport, mock.Mock(), run_dir)
        self.in_flight = 0

    def made(self, units: Sequence[int]) -> WorkerState:
        """Units as they start, in memory of this worker's."""
        state = WorkerState(self.job.num_layers, self.job.model.ties)
        with _disable_current_modes():  # what they are copied from is not this worker's
            built = self.job.build_units(units)
        for index, unit in built.items():
            for name, parameter in list(unit.named_parameters()):
                owner, _, own = name.rpartition(".")
                setattr(unit.get_submodule(owner), own, nn.Parameter(parameter.detach().clone()))
            state.units[index] = unit
        return state

    def regroup(self, number: int, span: range, stages: int) -> None:
        """Commit a generation in which this worker has the span; what it lacks arrives with moments."""
        layout = layout_of(number, span, stages)

        def arrive(_: object, old: WorkerState, *__: object, **___: object) -> Regrouped:
            before = self.held.now()
            new = self.made([index for index in span if index not in old.units])
            new.control = Control.from_dict(old.control.to_dict())
            new.units |= {index: unit for index, unit in old.units.items() if index in span}
            for index in span:
                for name, parameter in new.named_parameters(index):
                    state = old.moments.get(name) or {
                        key: torch.zeros_like(parameter.detach()) if entry.dim() else entry.clone()
                        for key, entry in self.example.items()
                    }
                    new.moments[name] = state
            new.apply_boundary()
            self.in_flight = self.held.now() - before
            groups = mock.Mock(spec=GenerationGroups)
            groups.tied = mock.MagicMock()
            groups.world = alone()
            groups.data_parallel.size.return_value = 1
            groups.release_transfer.return_value = groups.release.return_value = []
            return Regrouped(layout.generation, layout, new, groups, mock.Mock(), [], Phases())

        with mock.patch.object(trainer_module, "regroup", arrive):
            member = self.trainer._member  # as the round that called has it
            self.trainer._regroup(in_group=True)
            del member

    @property
    def example(self) -> dict[str, Tensor]:
        """The moments of a parameter, by name; none before the first step."""
        return next((state for state in self.trainer._state.moments.values() if state), {})

    def step(self) -> None:
        """What a round leaves: gradients and moments."""
        committer = self.trainer._kit.committer
        assert committer.gradients is not None and committer.optimizer is not None
        committer.gradients.clear()
        for _, parameter in self.trainer._state.trained_parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad.fill_(1.0)
        committer.optimizer.step()

    def freeze(self, boundary: int) -> None:
        state, member = self.trainer._state, self.trainer._member
        assert member is not None
        state.control.boundary = boundary
        state.apply_boundary()
        self.trainer._kit.equip(state, member)

    def needs(self) -> int:
        """Parameters, moments and gradients of the stage, once it is stepped."""
        state = self.trainer._state
        moments = 0 if not self.example else sum(1 for entry in self.example.values() if entry.dim())
        return sum(
            parameter.nbytes * (2 + moments if parameter.requires_grad else 1)
            for unit in state.units.values()
            for parameter in unit.parameters()
        )

    def largest_unit(self) -> int:
        """What an optimizer moves at once, into one tensor."""
        units = self.trainer._state.units.values()
        return max(sum(parameter.nbytes for parameter in unit.parameters()) for unit in units)


@pytest.fixture
def collects_nothing() -> Iterator[None]:
    """Memory goes with its last reference, and not when the garbage collector comes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


STEP_COUNTS = 4096  # Adam's, one of a few bytes for each parameter


@pytest.mark.usefixtures("collects_nothing")
@pytest.mark.parametrize("model", [SMALL, LARGE, TIED], ids=["small", "large", "tied"])
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((range(4, 6), 3), (range(4, 8), 2)),
        ((range(2, 4), 4), (range(4, 8), 2)),
        ((range(6, 8), 4), (range(8), 1)),
        ((range(8), 1), (range(4, 8), 2)),
        ((range(4, 8), 2), (range(6, 8), 3)),
    ],
    ids=["pack", "pack-elsewhere", "pack-to-one", "split", "longer"],
)
def test_a_regroup_needs_the_larger_of_both_layouts_and_what_is_in_flight(
    old: tuple[range, int], new: tuple[range, int], optimizer: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    job = load_job(spec_of(model, optimizer))
    with Held() as held:
        worker = Worker(job, tmp_path, held)
        worker.regroup(1, *old)
        worker.step()
        before, in_old = held.now(), worker.needs()
        assert before == pytest.approx(in_old, abs=STEP_COUNTS)

        held.most = 0
        worker.regroup(2, *new)

        in_new = worker.needs()
        most = max(in_old + worker.in_flight, in_new + worker.largest_unit())
        assert most <= max(in_old, in_new) + worker.in_flight + worker.largest_unit()
        assert held.most <= most + STEP_COUNTS
        worker.step()
        assert held.now() == pytest.approx(in_new, abs=STEP_COUNTS), "nothing of the old layout is left"


@pytest.mark.usefixtures("collects_nothing")
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["small", "large"])
def test_a_freeze_needs_no_more_than_the_layout_that_it_leaves(
    optimizer: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    job = load_job(spec_of(model, optimizer))
    with Held() as held:
        worker = Worker(job, tmp_path, held)
        worker.regroup(1, range(8), 1)
        worker.step()
        before = held.now()

        held.most = 0
        worker.freeze(2)

        assert held.most <= before
        assert held.now() == pytest.approx(worker.needs(), abs=STEP_COUNTS)


def test_a_regroup_that_returns_to_a_step_drops_later_mirrors(tmp_path: Path) -> None:
    with Held() as held:
        worker = Worker(load_job(spec_of(SMALL, ADAMW)), tmp_path, held)
        mirrors = worker.trainer._kit.mirrors
        mirrors.kept = [Mirror(step, Control(step=step).to_dict(), {}) for step in (4, 6, 8)]
        worker.trainer._state.control.step = 6
        worker.regroup(1, range(8), 1)

    assert [mirror.step for mirror in mirrors.kept] == [4, 6]


@pytest.mark.parametrize(("step", "asked"), [(0, ["cancel"]), (6, ["cancel", "want"])])
def test_a_new_generation_drops_the_checkpoint_of_the_one_before_and_writes_its_own(
    step: int, asked: list[str], tmp_path: Path
) -> None:
    """Members that wrote other parts may have left. No accelerator is released before the new one is durable."""
    calls = mock.Mock()
    with Held() as held, mock.patch.multiple(Checkpointer, cancel=calls.cancel, want=calls.want):
        worker = Worker(load_job(spec_of(SMALL, ADAMW)), tmp_path, held)
        worker.trainer._state.control.step = step
        worker.regroup(1, range(8), 1)

    assert [call[0] for call in calls.mock_calls] == asked


def spec_of(model: dict[str, Any], optimizer: dict[str, Any]) -> Any:
    data = {"name": "tests.testkit.user_code.tied_model:make_data"} if model is TIED else {"name": "digits"}
    training = {"steps": 3, "globalBatchSize": 8, "optimizer": optimizer, "precision": "Float32"}
    return make_spec(optimizer, model=model, data=data, training=training, freeze={"policy": "None"})
