"""Measuring what units cost on one worker, without leaving a trace."""

import datetime
from collections.abc import Iterator, Sequence
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional

from pipetransformer.data import DataInfo
from pipetransformer.elastic.transport.groups import GenerationGroups, Transport, drop_groups, make_group
from pipetransformer.errors import ModelError
from pipetransformer.models import PipelineModel
from pipetransformer.partition import Cut, UnitCost
from pipetransformer.pipeline import Chunk, Executor, SpanProbes, StageRunner, StageSpec, Target
from pipetransformer.schedules import GPipe, Operation, RoundShape
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.training.cost_measurement import _seconds_per_action, measure_costs, measurement_due
from pipetransformer.training.slice_measurement import slices_due
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from tests.testkit.trainer import stages
from tests.testkit.trainer.ranks import run_ranks

WIDTH = 8


class Clock:
    """Time that only the slow blocks spend."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now / 2


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipetransformer.pipeline.probe.time", CLOCK)


class Samples:
    """Rows of ones of three classes."""

    info = DataInfo((WIDTH,), 3)

    def __len__(self) -> int:
        return 5

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.ones(len(ids), WIDTH), torch.tensor([index % 3 for index in ids])


class Slow(torch.autograd.Function):
    """The identity, which takes its time forward and back."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, seconds: tuple[float, float]) -> Tensor:
        ctx.backward_seconds = seconds[1]  # type: ignore[attr-defined]
        CLOCK.now += seconds[0]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        CLOCK.now += ctx.backward_seconds  # type: ignore[attr-defined]
        return gradients[0], None


class SlowBlock(nn.Module):
    """A layer behind `Slow` that counts its forwards in a buffer and draws a random number."""

    forwards: Tensor

    def __init__(self, seconds: tuple[float, float]) -> None:
        super().__init__()
        self.seconds = seconds
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        torch.rand(1)
        return self.inner(Slow.apply(x, self.seconds))  # type: ignore[no-any-return, no-untyped-call]


@pytest.fixture
def model() -> PipelineModel:
    """Two blocks of 1 and 2 s forward, and twice that in a backward that reaches their input."""
    blocks: list[nn.Module] = [SlowBlock((1, 2)), SlowBlock((2, 4))]
    return PipelineModel(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 3), (WIDTH,))


@pytest.fixture
def groups() -> Iterator[GenerationGroups]:
    transport = Transport("127.0.0.1", datetime.timedelta(seconds=10))
    group = make_group(HashStore(), "world", 0, 1, transport)
    yield GenerationGroups(group, group, group, group)
    drop_groups([group])


def make_runner(model: PipelineModel, groups: GenerationGroups, boundary: int) -> StageRunner:
    assert groups.pipeline is not None
    for unit in model.units[: boundary + 1 if boundary else 0]:
        unit.requires_grad_(False)
    spec = StageSpec(0, [range(4)], (0,), boundary, GPipe(), groups.pipeline, torch.device("cpu"), torch.float32)
    return StageRunner(spec, model, model.units)


def make_probes(model: PipelineModel, groups: GenerationGroups, boundary: int) -> SpanProbes:
    return SpanProbes(make_runner(model, groups, boundary), Samples())


def make_layout(micro_batch_size: int = 8) -> StageLayout:
    member = Member(name="w0", uid="u0", address="localhost:1")
    generation = Generation(
        job_uid="job", layout_generation=1, stages=1, pipelines=1, members=[member], leader="w0", nonce="n",
        reason=ResizeReason.START,
    )  # fmt: skip
    return StageLayout(generation, 0, [(0, 0)], Cut([range(4)], micro_batch_size))


def test_each_unit_is_timed_by_itself(model: PipelineModel, groups: GenerationGroups) -> None:
    embedding, first, second, head = make_probes(model, groups, 0).measure(4)

    assert embedding == UnitCost(0, 0, 0, saved_bytes=128)
    assert head.saved_bytes > 128, "the loss keeps something, too"
    assert first == UnitCost(1, 2, 0, saved_bytes=128)
    assert second == UnitCost(2, 4, 0, saved_bytes=128)


def test_frozen_units_have_no_backward_to_measure(model: PipelineModel, groups: GenerationGroups) -> None:
    _, first, second, _ = make_probes(model, groups, 1).measure(4)

    assert first == UnitCost(1, 0, 0, saved_bytes=0)
    assert second == UnitCost(2, 4, 0, saved_bytes=128)


def test_a_disturbed_backward_of_the_weights_alone_does_not_count(
    model: PipelineModel, groups: GenerationGroups
) -> None:
    """A backward takes a second for the weight and two for the input. After the fourth, one is disturbed."""

    class SlowWeight(nn.Linear):
        forwards = 0

        def forward(self, x: Tensor) -> Tensor:
            self.forwards += 1
            weight = Slow.apply(self.weight, (0, 11 if self.forwards == 5 else 1))  # type: ignore[no-untyped-call]
            return functional.linear(Slow.apply(x, (0, 2)), weight, self.bias)  # type: ignore[no-untyped-call]

    model.blocks[0] = SlowWeight(WIDTH, WIDTH)

    first = make_probes(model, groups, 0).measure(4)[1]

    assert (first.backward, first.weights_backward) == (3, 1)


def test_the_input_of_a_unit_counts_although_its_backward_needs_only_its_output(
    model: PipelineModel, groups: GenerationGroups
) -> None:
    """The span keeps it until the backward."""
    model.blocks[0] = nn.Tanh()

    assert make_probes(model, groups, 0).measure(4)[1].saved_bytes == 2 * 128


def test_measuring_leaves_no_trace(model: PipelineModel, groups: GenerationGroups) -> None:
    weights = [parameter.clone() for unit in model.units for parameter in unit.parameters()]
    state = torch.get_rng_state()

    make_probes(model, groups, 0).measure(4)

    assert torch.equal(torch.get_rng_state(), state)
    assert all(buffer == 0 for block in model.blocks for buffer in block.buffers())
    after = [parameter for unit in model.units for parameter in unit.parameters()]
    assert all(parameter.grad is None for parameter in after)
    assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True))


def test_in_place_changes_of_inputs_do_not_add_up_between_measurements(
    model: PipelineModel, groups: GenerationGroups
) -> None:
    class Shifting(nn.Linear):
        seen: ClassVar[list[float]] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x.sum().item())
            return super().forward(x.add_(1))

    model.embedding = Shifting(WIDTH, WIDTH)
    make_probes(model, groups, 1).measure(4)

    assert Shifting.seen == [4 * WIDTH] * 7


def test_a_model_that_cannot_be_measured_says_so(model: PipelineModel, groups: GenerationGroups) -> None:
    model.blocks[0] = nn.Linear(WIDTH + 1, WIDTH)

    with pytest.raises(ModelError, match="shapes cannot be multiplied"):
        make_probes(model, groups, 0).measure(4)


def test_a_later_measurement_keeps_what_frozen_units_cost_before(
    model: PipelineModel, groups: GenerationGroups
) -> None:
    control = Control(step=2)
    before = measure_costs(make_runner(model, groups, 0), make_layout(), groups, Samples(), control, 1.0)
    control = Control(step=102, boundary=1, costs=before.model_dump())
    after = measure_costs(make_runner(model, groups, 1), make_layout(), groups, Samples(), control, 1.0)

    assert before.micro_batch_sizes == after.micro_batch_sizes == (2, 8)
    assert after.large[1] == before.large[1]
    assert (after.step, after.boundary, after.worker_bytes, after.seconds_per_byte) == (102, 1, None, 0.0)


@pytest.mark.parametrize(
    ("runs", "sizes"), [(1, (1, 2)), (2, (1, 2)), (3, (1, 3)), (4, (2, 4)), (7, (2, 7)), (16, (4, 16))]
)
def test_no_more_samples_are_measured_than_a_layout_of_several_runs(
    model: PipelineModel, groups: GenerationGroups, runs: int, sizes: tuple[int, int]
) -> None:
    class Counted(Samples):
        asked: ClassVar[set[int]] = set()

        def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
            self.asked.add(len(ids))
            return super().batch(ids)

    Counted.asked = set()
    layout = make_layout(runs)
    costs = measure_costs(make_runner(model, groups, 0), layout, groups, Counted(), Control(step=2), 1.0)

    assert costs.micro_batch_sizes == sizes and Counted.asked == set(sizes)
    assert costs.at(4)[1].saved_bytes == 128, "as measured at this size"
    assert costs.at(4)[1].forward == 1, "whatever the number of samples, as the block takes it"


def test_a_workers_memory_bounds_the_cuts_that_follow(model: PipelineModel, groups: GenerationGroups) -> None:
    runner = make_runner(model, groups, 0)
    costs = measure_costs(runner, make_layout(), groups, Samples(), Control(step=2), 1.0, usable=3e6)

    assert costs.worker_bytes == 3_000_000 and costs.step_seconds == 1.0


def test_a_measurement_takes_a_hundredth_of_the_time_until_the_next(
    model: PipelineModel, groups: GenerationGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipetransformer.training.cost_measurement.time", CLOCK)
    before = CLOCK.now
    costs = measure_costs(make_runner(model, groups, 0), make_layout(), groups, Samples(), Control(step=2), 3.0)

    assert costs.not_before == pytest.approx(2 + 100 * (CLOCK.now - before) / 3.0, abs=1)


def test_an_action_costs_what_a_round_without_units_takes_for_each_on_its_longest_way(
    model: PipelineModel, groups: GenerationGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Executor.run

    def slow(
        self: Executor, operations: Sequence[Operation], shape: RoundShape, chunks: Sequence[Chunk], target: Target
    ) -> None:
        run(self, operations, shape, chunks, target)
        CLOCK.now += 0.25 * len(operations)

    monkeypatch.setattr("pipetransformer.training.cost_measurement.time", CLOCK)
    monkeypatch.setattr(Executor, "run", slow)
    assert _seconds_per_action(groups.pipeline, torch.device("cpu")) == pytest.approx((0.25, 0.125))
    costs = measure_costs(make_runner(model, groups, 0), make_layout(), groups, Samples(), Control(step=2), 3.0)
    assert (costs.seconds_per_action, costs.processor_per_action) == pytest.approx((0.25, 0.125))


def test_actions_of_several_workers_are_measured_over_their_own_messages() -> None:
    assert all(0 < seconds < 1 for seconds in run_ranks(3, action_seconds))


def test_two_workers_agree_on_the_least_memory_and_on_what_a_byte_takes_in_a_ring() -> None:
    found = run_ranks(2, measure_two)

    assert found[0] == found[1] == (3_000_000, False, 4.0, pytest.approx(0.5 / (1 << 20)))


def measure_two(group: dist.ProcessGroup) -> tuple[int | None, bool, float | None, float]:
    """What both measure of one unit each; the first has more memory, and keeps its host's apart. An all-reduce, which
    sends each byte once, takes half a second."""
    rank, groups = group.rank(), GenerationGroups(group, group, group, group)
    model = PipelineModel(nn.Linear(WIDTH, WIDTH), [nn.Linear(WIDTH, WIDTH)] * 2, nn.Linear(WIDTH, 3), (WIDTH,))
    reduce = dist.all_reduce

    def slow(*given: object, **named: object) -> object:
        CLOCK.now += 0.5
        return reduce(*given, **named)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipetransformer.training.cost_measurement.time", CLOCK)
        patched.setattr("pipetransformer.training.cost_measurement.dist.all_reduce", slow)
        costs = measure_costs(
            make_runner(model, groups, 0), make_layout(), groups, Samples(), Control(step=2), (4.0, 3.0)[rank],
            usable=(5e6, 3e6)[rank], host_apart=rank == 0,
        )  # fmt: skip
    return costs.worker_bytes, costs.host_apart, costs.step_seconds, costs.seconds_per_byte


class ByValues(nn.Module):
    """Computes only for values that the layers before it give."""

    def forward(self, x: Tensor) -> Tensor:
        if not (x == 1).all():
            raise ValueError("no such token")
        return x.add_(0)


def measure_by_values(group: dist.ProcessGroup) -> int:
    """For how many units of a stage there are costs."""
    model = PipelineModel(nn.Identity(), [ByValues(), ByValues()], nn.Linear(WIDTH, 3), (WIDTH,))
    return len(SpanProbes(stages.make_runner(group, model), Samples()).measure(4))


def test_a_stage_is_measured_with_what_the_stage_before_it_gives() -> None:
    assert run_ranks(2, measure_by_values) == [2, 2]


def action_seconds(group: dist.ProcessGroup) -> float:
    return _seconds_per_action(group, torch.device("cpu"))[0]


@pytest.mark.parametrize(
    ("step", "boundary", "measured_at", "due"),
    [
        (1, 0, None, False),
        (2, 0, None, True),
        (500, 0, 0, False),
        (101, 3, 0, False),
        (102, 3, 0, True),
        (102, 0, 3, True),
        (900, 3, 0, True),
        (901, 3, 0, False),
    ],
)
def test_measurements_are_due_early_and_after_changes_of_the_boundary_but_not_near_the_end(
    step: int, boundary: int, measured_at: int | None, due: bool
) -> None:
    """Of 1,000 steps. The last measurement came after step 2 and took as long as one step."""
    costs = None if measured_at is None else {"boundary": measured_at, "step": 2, "not_before": 102}
    assert measurement_due(Control(step=step, boundary=boundary, costs=costs), 1000) == due


@pytest.mark.parametrize(
    ("step", "boundary", "measured_at", "due"),
    [(1, 0, None, False), (2, 0, None, True), (9, 2, 2, False), (9, 3, 2, False), (9, 1, 2, True)],
)
def test_slices_of_tokens_are_measured_early_and_after_layers_have_thawed(
    step: int, boundary: int, measured_at: int | None, due: bool
) -> None:
    costs = None if measured_at is None else {"boundary": measured_at}
    control = Control(step=step, boundary=boundary, slice_costs=costs)
    plans, counts = (Mock(**{"layouts.plans_slices": each}) for each in (True, False))

    assert slices_due(plans, control, Mock(stages=2)) == due
    assert not slices_due(plans, control, Mock(stages=1)), "a lone stage has no slices"
    assert not slices_due(counts, control, Mock(stages=2)), "the spec says how many there are"
