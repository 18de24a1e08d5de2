"""What of a unit travels between workers, and what becomes of it there."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.models import Ties
from pipetransformer.models.off_device import is_off
from pipetransformer.models.ties import Tie
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.optimizer import make_optimizer
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.spec import Evaluation, Optimizer, OptimizerName

CPU = torch.device("cpu")
BLOCK = 1  # of a model of one block, that is units 0 to 2


class Unit(nn.Module):
    """Large and small parameters, one of them under two names and one a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(256, 256)
        self.shared = nn.Linear(2, 2)
        self.alias = self.shared
        self.gate = nn.Parameter(torch.tensor(0.1))
        self.register_buffer("count", torch.tensor(7))


def holding(unit: nn.Module, boundary: int = 0) -> WorkerState:
    state = WorkerState(1, control=Control(boundary=boundary), units={BLOCK: unit})
    state.apply_boundary()
    return state


def stepped(state: WorkerState, optimizer: Optimizer, steps: int = 1) -> WorkerState:
    """The state after some steps with gradients that are known."""
    made = make_optimizer(optimizer, state.trained_parameters(), state.moments)
    assert made is not None
    for step in range(steps):
        for _, parameter in state.trained_parameters():
            parameter.grad = torch.full_like(parameter, step + 1.0)
        made.step()
    return state


def travel(state: WorkerState, optimizer: Optimizer) -> WorkerState:
    """The unit as it arrives at a worker that knows its shapes only."""
    codec, boundary = UnitCodec(optimizer, 1), state.control.boundary
    shell = copy.deepcopy(state.units[BLOCK]).to("meta")
    parts = codec.blank(BLOCK, shell, boundary, CPU)
    given = codec.give(state, BLOCK, CPU)
    assert [part.shape for part in parts] == [part.shape for part in given]
    for part, content in zip(parts, given, strict=True):
        part.copy_(content)
    arrived = WorkerState(1, control=Control(boundary=boundary))
    arrived.put_unit(BLOCK, shell, codec.take(parts, BLOCK, shell, boundary))
    arrived.apply_boundary()
    return arrived


def everything(state: WorkerState) -> dict[str, Tensor]:
    return state.unit_tensors(BLOCK, with_moments=True)


OPTIMIZERS = [
    Optimizer(name=OptimizerName.ADAMW, weight_decay=0.1),
    Optimizer(name=OptimizerName.SGD, momentum=0.9),
    Optimizer(name=OptimizerName.SGD, momentum=0.0),
    Optimizer(name=OptimizerName.ADAM, weight_decay=0.1),
    Optimizer(name=OptimizerName.RMSPROP, weight_decay=0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "momentum", "sgd", "adam", "rmsprop"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_unit_that_travelled_trains_on_bit_for_bit(optimizer: Optimizer, steps: int) -> None:
    stayed = stepped(holding(Unit()), optimizer, steps)

    arrived = stepped(travel(stayed, optimizer), optimizer)

    expected = everything(stepped(stayed, optimizer))
    assert everything(arrived).keys() == expected.keys()
    assert all(torch.equal(everything(arrived)[name], expected[name]) for name in expected)


def test_tensors_to_send_are_contiguous_whatever_their_parameters_are() -> None:
    """They are sent as memory, and arrive in tensors that are contiguous."""
    unit = Unit()
    unit.wide.weight = nn.Parameter(torch.arange(256.0 * 256).view(256, 256).t())
    assert not unit.wide.weight.is_contiguous()

    given = UnitCodec(OPTIMIZERS[0], 1).give(holding(unit), BLOCK, CPU)

    assert all(part.is_contiguous() for part in given)
    assert any(torch.equal(part, unit.wide.weight) for part in given)


def test_a_unit_that_shares_a_parameter_with_one_that_trains_stays_on_the_device() -> None:
    shares, alone, trains = (nn.Linear(2, 2) for _ in range(3))
    state = WorkerState(1, Ties((Tie(((0, "weight"), (2, "weight"))),)), Control(boundary=1))
    state.units = {0: shares, 1: alone, 2: trains}
    state.apply_boundary()

    moved = state.keep_off_device([0, 1], CPU)

    assert [is_off(unit) for unit in state.units.values()] == [False, True, False]
    assert moved == sum(parameter.nbytes for parameter in alone.parameters())
    state.set_apart([0, 1])
    state.apply_boundary()
    assert set(state.copies) == {1}, "a copy of what changes would not change with it"


def test_a_parameter_with_two_names_stays_one() -> None:
    unit = travel(holding(Unit()), OPTIMIZERS[0]).units[BLOCK]

    assert unit.get_parameter("alias.weight") is unit.get_parameter("shared.weight")


def test_a_frozen_unit_travels_without_moments() -> None:
    state = stepped(holding(Unit()), OPTIMIZERS[0])
    state.control.boundary = 1
    state.apply_boundary()

    assert not [name for name in everything(travel(state, OPTIMIZERS[0])) if "@" in name]
    codec = UnitCodec(OPTIMIZERS[0], 1)
    assert codec.size(BLOCK, Unit(), 1) < codec.size(BLOCK, Unit(), 0) / 2


def test_a_control_state_that_says_more_than_is_known_here_is_read() -> None:
    written = Control(step=7, best={"accuracy": 0.5}).to_dict() | {"of_a_newer_trainer": [1, 2]}

    assert Control.from_dict(written) == Control(step=7, best={"accuracy": 0.5})


def test_state_that_lacks_a_parameter_is_refused() -> None:
    tensors = everything(holding(Unit()))
    del tensors["blocks.0.wide.weight"]

    with pytest.raises(ValueError, match=r"state of blocks\.0 has no wide\.weight"):
        WorkerState(1).put_unit(BLOCK, Unit(), tensors)


def test_only_the_count_of_steps_is_on_the_cpu_wherever_a_scalar_parameter_is() -> None:
    """Meta in place of an accelerator, which not every machine has."""
    state = WorkerState(1)
    optimizer = Optimizer(name=OptimizerName.ADAMW)
    stayed = everything(stepped(holding(Unit()), optimizer))

    state.put_unit(
        BLOCK,
        Unit().to("meta"),
        {name: tensor if name.endswith("@step") else tensor.to("meta") for name, tensor in stayed.items()},
    )

    assert {key: entry.device.type for key, entry in state.moments["blocks.0.gate"].items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


@pytest.mark.parametrize(
    ("goal", "value", "better"),
    [
        ("Highest", 0.6, True),
        ("Highest", 0.5, False),
        ("Highest", 0.4, False),
        ("Lowest", 0.4, True),
        ("Lowest", 0.5, False),
        ("Lowest", 0.6, False),
        ("Highest", math.nan, False),
        ("Lowest", -math.inf, False),
    ],
)
def test_an_evaluation_is_better_only_if_it_beats_the_best(goal: str, value: float, better: bool) -> None:
    spec = Evaluation.model_validate({"goal": goal})
    control = Control(step=8, best={"accuracy": 0.5}, best_step=4)

    assert control.is_better({"accuracy": value}, spec) == better
    assert Control().is_better({"accuracy": value}, spec) == math.isfinite(value)


def test_a_best_model_that_is_not_kept_is_replaced_by_any_other() -> None:
    spec = Evaluation.model_validate({"keepBest": True})
    kept = Control(step=8, best={"accuracy": 0.5}, best_step=4, kept_step=4)
    lost = Control(step=8, best={"accuracy": 0.5}, best_step=4, kept_step=6)

    assert [control.is_better({"accuracy": 0.3}, spec) for control in (kept, lost)] == [False, True]


def test_evaluations_are_counted_since_the_best_one() -> None:
    control, counted = Control(), []
    for step, better in enumerate([True, False, False, True, False], start=1):
        control.step = step
        control.note_evaluation({"accuracy": step / 10}, better=better)
        counted.append((control.evaluations_since_best, control.best_step, control.evaluated_step))

    assert counted == [(0, 1, 1), (1, 1, 2), (2, 1, 3), (0, 4, 4), (1, 4, 5)]
    assert (control.best, control.metrics) == ({"accuracy": 0.4}, {"accuracy": 0.5})


def test_a_checkpoints_marker_has_camel_case_alone_and_gives_the_state_back() -> None:
    last = {"step": 4, "gradient_norm": 0.5}
    control = Control(
        step=5,
        fell_step=2,
        best={"f1_score": 0.9},
        policy={"of_the_user": 1},
        last_step=last,
        earlier_steps=[last | {"step": 3}],
    )
    kept = control.to_file()
    assert (kept["fellStep"], kept["lastStep"]) == (2, {"step": 4, "gradientNorm": 0.5})
    assert kept["earlierSteps"] == [{"step": 3, "gradientNorm": 0.5}]
    assert not [name for name in (*kept, *kept["lastStep"]) if "_" in name]
    assert Control.from_file(kept) == control


def test_a_job_keeps_the_layout_in_which_it_began_until_another_job_resumes_it() -> None:
    control = Control()
    assert control.began_in is None
    control.begin_job("job", 0, Layout(4, 1))
    control.begin_job("job", 0, Layout(2, 2))
    resumed = Control.from_file(control.to_file())
    resumed.begin_job("job", 0, Layout(2, 1))
    assert resumed.began_in == Layout(4, 1)
    resumed.begin_job("another", 5, Layout(2, 4))
    assert (resumed.began_in, resumed.earlier_job) == (Layout(2, 4), "job")


@pytest.mark.parametrize(("step", "earlier"), [(0, "job"), (7, "")], ids=["from the beginning", "of an unknown job"])
def test_a_job_that_names_no_earlier_one_began_at_the_beginning(step: int, earlier: str) -> None:
    control = Control(step=step)
    control.begin_job("job", 3, Layout(1, 1))
    assert (control.earlier_job, control.lasting_generation(2)) == (earlier, 5)


def test_copies_are_kept_while_they_stay_frozen_and_a_unit_that_freezes_loses_its_moments() -> None:
    units = {index: nn.Linear(2, 2) for index in range(5)}
    state = WorkerState(3, units=dict(units))
    state.apply_boundary()
    names = {index: name for index in units for name, _ in state.named_parameters(index) if "weight" in name}
    state.moments = {name: {"exp_avg": torch.ones(2, 2)} for name in names.values()}

    later = Control(boundary=2)
    state.take_over(later)
    assert state.control is later
    assert set(state.moments) == {names[3], names[4]}, "the embedding freezes with the layers"
    state.set_apart([1, 2])
    assert (set(state.units), set(state.copies), set(state.held)) == ({0, 3, 4}, {1, 2}, set(units))
    assert {name for name, _ in state.trained_parameters()} == {
        name for index in (3, 4) for name, _ in state.named_parameters(index)
    }

    state.take_over(Control(boundary=1))
    assert set(state.copies) == {1}, "the other one trains"


def test_a_unit_travels_in_its_own_types() -> None:
    unit = Unit()
    unit.wide.to(torch.bfloat16)
    stayed = stepped(holding(unit), OPTIMIZERS[0])

    arrived = everything(travel(stayed, OPTIMIZERS[0]))

    kept = everything(stayed)
    assert {name: arrived[name].dtype for name in arrived} == {name: kept[name].dtype for name in kept}
    assert all(torch.equal(arrived[name], kept[name]) for name in kept)
