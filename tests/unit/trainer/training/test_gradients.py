"""Gradients are summed over replicas while the last micro-batch's backward goes on, and nothing but when changes."""

import datetime
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.elastic.transport.groups import GenerationGroups, TCPStore, Transport, ensure_default_group
from pipetransformer.models import Tie, Ties
from pipetransformer.partition import Cut
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.gradients import GradientReducer, Gradients
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from tests.testkit.trainer.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

TRANSPORT = Transport("127.0.0.1", datetime.timedelta(seconds=30))
WIDTH = 400  # a unit fills a bucket
UNITS = 4


class Replica:
    """A whole model on one of two pipelines; a block has a parameter that only the first micro-batch uses."""

    def __init__(self, rank: int, groups: GenerationGroups) -> None:
        torch.manual_seed(3)
        self.rank, self.groups = rank, groups
        units = {index: nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for index in range(UNITS)}
        self.rare = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        units[2].register_parameter("rare", self.rare)
        self.state = WorkerState(UNITS - 2, units=dict(units))
        members = [Member(name=f"w{number}", uid="u", address="127.0.0.1:1") for number in range(2)]
        generation = Generation(
            job_uid="job", layout_generation=1, stages=1, pipelines=2, members=members, leader="w0", nonce="n",
            reason=ResizeReason.START,
        )  # fmt: skip
        self.layout = layout = StageLayout(generation, rank, [(0, 0), (1, 0)], Cut([range(UNITS)], 1))
        self.gradients_of = Gradients(self.state, layout)
        self.reducer = GradientReducer(self.gradients_of, self.state, layout, groups)

    def inputs(self) -> Tensor:
        return torch.arange(3 * WIDTH, dtype=torch.float64).view(3, WIDTH) / 10 + self.rank

    def backward(self, number: int) -> None:
        """Of one micro-batch."""
        x = self.inputs()[number]
        for index, unit in self.state.units.items():
            if x.requires_grad:
                x.register_hook(partial(self.passed, index))  # type: ignore[no-untyped-call]
            x = torch.tanh(unit(x))
            if index == 2 and number == 0:
                x = x * self.rare
        torch.autograd.backward(x.sum())

    def passed(self, index: int, _: Tensor) -> None:
        self.reducer.passed(index)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for _, parameter in self.state.trained_parameters() if parameter.grad is not None]


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    ensure_default_group()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TRANSPORT.timeout)
    both = [GenerationGroups(), GenerationGroups()]

    def meet(rank: int) -> None:
        client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=TRANSPORT.timeout)
        both[rank].meet(client, rank, 2, 0, TRANSPORT)
        both[rank].assign(client, [(0, 0), (1, 0)], rank, TRANSPORT)

    in_threads(meet)
    yield [Replica(rank, groups) for rank, groups in enumerate(both)]
    for groups in both:
        groups.drop()


def in_threads(run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_all_replicas_hold_the_sum_however_many_micro_batches_each_had(replicas: list[Replica]) -> None:
    expected: list[Tensor] = []
    for replica in replicas:
        for number in range(2 + replica.rank):
            replica.backward(number)
        own = [gradient.clone() for gradient in replica.gradients()]
        expected = [a + b for a, b in zip(expected, own, strict=True)] if expected else own
        for _, parameter in replica.state.trained_parameters():
            parameter.grad = None
    norms: dict[int, list[float]] = {}

    def round_of(rank: int) -> None:
        replicas[rank].reducer.begin(2 + rank)
        for number in range(2 + rank):
            replicas[rank].backward(number)
        norms[rank] = replicas[rank].reducer.finish()

    in_threads(round_of)

    for replica in replicas:
        assert all(torch.equal(a, b) for a, b in zip(replica.gradients(), expected, strict=True))
    assert sum(norms[0] + norms[1]) == pytest.approx(float(sum(gradient.square().sum() for gradient in expected)))
    assert [bool(norm) for norm in norms[0]] == [not norm for norm in norms[1]], "each unit counts once"


def test_a_round_begins_without_the_gradients_of_the_one_before(replicas: list[Replica]) -> None:
    norms: list[dict[int, list[float]]] = []
    for _ in range(2):
        found: dict[int, list[float]] = {}

        def round_of(rank: int, found: dict[int, list[float]] = found) -> None:
            replicas[rank].reducer.begin(1)
            replicas[rank].backward(0)
            found[rank] = replicas[rank].reducer.finish()

        in_threads(round_of)
        norms.append(found)

    assert norms[0] == norms[1] and any(norms[0][0])


def test_a_units_sum_starts_before_lower_units_have_gradients(replicas: list[Replica]) -> None:
    seen: dict[int, list[list[int]]] = {0: [], 1: []}

    def round_of(rank: int) -> None:
        reducer = replicas[rank].reducer
        first = replicas[rank].state.units[0].get_parameter("weight")
        first.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: seen[rank].append(reducer.under_way)
        )
        reducer.begin(1)
        replicas[rank].backward(0)
        reducer.finish()

    in_threads(round_of)

    assert [found[0][:2] for found in seen.values()] == [[3, 2], [3, 2]]


def gradients_of(units: dict[int, nn.Linear]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": parameter.grad
        for index, unit in units.items()
        for name, parameter in unit.named_parameters()
        if parameter.grad is not None
    }


def test_units_of_several_spans_are_summed_as_one_stage(replicas: list[Replica]) -> None:
    """Units 0 and 3 are on this stage, and share their weights."""
    tie = Tie(((0, "weight"), (3, "weight")))
    there_and_back = Cut([range(unit, unit + 1) for unit in range(UNITS)], 1, owners=(0, 1, 1, 0))
    norms: dict[int, list[float]] = {}
    held: dict[int, dict[int, nn.Linear]] = {}

    def round_of(rank: int) -> None:
        torch.manual_seed(3)
        held[rank] = {unit: nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for unit in (0, 3)}
        state = WorkerState(UNITS - 2, Ties((tie,)), units=dict(held[rank]))
        layout = replace(replicas[rank].layout, cut=there_and_back)
        groups = replicas[rank].groups
        assert groups.data_parallel is not None
        groups.tied = {tie.stages(there_and_back.units_by_stage): groups.data_parallel}
        reducer = GradientReducer(Gradients(state, layout), state, layout, groups)
        reducer.begin(1)
        x = replicas[rank].inputs()[0]
        held[rank][3](torch.tanh(held[rank][0](x))).sum().backward()
        for unit in (3, 0):
            reducer.passed(unit)
        norms[rank] = reducer.finish()

    in_threads(round_of)

    first, second = (gradients_of(held[rank]) for rank in (0, 1))
    assert all(torch.equal(gradient, second[name]) for name, gradient in first.items())
    assert torch.equal(first["0.weight"], first["3.weight"]), "one sum for all copies"
    squares = {name: float(gradient.square().sum()) for name, gradient in first.items()}
    assert [sum(of_unit) for of_unit in zip(norms[0], norms[1], strict=True)] == pytest.approx(
        [squares["0.bias"], 0.0, 0.0, squares["3.bias"] + squares["3.weight"]]
    )


def sums_at_the_end_of_a_backward(group: dist.ProcessGroup, port: int, folder: str) -> list[list[int]]:
    """Of a round of two pipelines of one stage: units whose sums are under way, without recomputation and with it."""
    from pipetransformer import Pipeline, Training, train
    from tests.testkit.trainer.script import NO_FREEZE, samples
    from tests.testkit.trainer.torchrun import set_rank

    seen, finish, wide = [], GradientReducer.finish, 600  # a block fills a bucket

    def note(reducer: GradientReducer) -> list[float]:
        seen.append(reducer.under_way)
        return finish(reducer)

    def model() -> list[nn.Module]:
        return [nn.Linear(4, wide), *(nn.Linear(wide, wide) for _ in range(3)), nn.Linear(wide, 2)]

    set_rank(group, port)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GradientReducer, "finish", note)
        for recompute in (False, True):
            train(
                model=model,
                data=(samples(64, 0), samples(20, 1)),
                training=Training(steps=1, global_batch_size=16, activation_checkpointing=recompute),
                freeze=NO_FREEZE,
                pipeline=Pipeline(stages=1, micro_batch_size=4),
                run_dir=f"{folder}/{recompute}",
            )
    return seen


def test_the_stage_of_a_job_tells_of_units_while_its_backward_goes_on(tmp_path: Path) -> None:
    """Also of the embedding, which has no input whose gradient would tell: the end of the backward does."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    assert run_ranks(2, sums_at_the_end_of_a_backward, store.port, str(tmp_path)) == [[[4, 3, 2, 1, 0]] * 2] * 2


def test_what_is_measured_between_rounds_is_not_summed(replicas: list[Replica]) -> None:
    replicas[0].backward(0)

    assert not replicas[0].reducer.under_way


def test_hooks_end_with_the_reducer(replicas: list[Replica]) -> None:
    replica = replicas[0]
    replica.reducer.begin(1)
    replica.reducer.close()

    replica.backward(0)

    assert not replica.reducer.under_way


def test_gradients_serve_until_what_trains_changes(replicas: list[Replica]) -> None:
    replica = replicas[0]
    layout = replica.layout
    assert replica.gradients_of.serve(replica.state, layout)

    replica.rare.requires_grad_(False)
    assert not replica.gradients_of.serve(replica.state, layout)

    replica.rare.requires_grad_(True)
    replica.state.units[1] = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    assert not replica.gradients_of.serve(replica.state, layout), "as many, but others"
