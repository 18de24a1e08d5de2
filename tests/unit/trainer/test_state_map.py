"""A regroup may make another list of units from the present one: here the mean of each two blocks becomes one."""

import datetime
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.elastic.assemble import Assembly, StateSources
from pipetransformer.elastic.groups import GenerationGroups, TCPStore, Transport, ensure_default_group
from pipetransformer.elastic.mirror import Mirrors
from pipetransformer.elastic.plan import Inventory, Origin, RegroupPlan, make_plan
from pipetransformer.models import Ties, unit_name
from pipetransformer.optimizer import make_optimizer
from pipetransformer.partition import Cut
from pipetransformer.state import Control, UnitCodec, WorkerState
from pipetransformer_contract.spec import Optimizer

pytestmark = pytest.mark.timeout(60)

TRANSPORT = Transport("127.0.0.1", datetime.timedelta(seconds=30))
CPU = torch.device("cpu")
LAYERS = 8
WIDTH = 5
ADAMW = Optimizer()


def block() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


@dataclass
class Halve:
    """Blocks 2i and 2i+1 (from 0) become block i; the optimizer starts afresh and all blocks train again."""

    num_layers: int = LAYERS // 2
    ties: Ties = field(default_factory=Ties)

    def sources(self, unit: int) -> Sequence[int]:
        if unit in (0, self.num_layers + 1):
            return [0 if unit == 0 else LAYERS + 1]
        return [2 * unit - 1, 2 * unit]

    def blank(self, unit: int) -> nn.Module:
        return block().to("meta")

    def make(self, unit: int, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        prefixes = [unit_name(source, LAYERS) for source in self.sources(unit)]
        return {
            f"{unit_name(unit, self.num_layers)}.{name}": torch.stack(
                [old[f"{prefix}.{name}"] for prefix in prefixes]
            ).mean(0)
            for name in ("weight", "bias")
        }

    def control(self, old: Control) -> Control:
        return replace(old, boundary=0, costs=None)


def whole_model() -> WorkerState:
    """A model in the middle of its training, three blocks frozen."""
    torch.manual_seed(0)
    state = WorkerState(LAYERS, units={index: block() for index in range(LAYERS + 2)})
    state.control = Control(step=7, boundary=3, costs=None)
    state.apply_boundary()
    optimizer = make_optimizer(ADAMW, state.trained_parameters(), state.moments)
    assert optimizer is not None
    for _, parameter in state.trained_parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return state


def part(state: WorkerState, units: range) -> WorkerState:
    """What a worker holds that has these units."""
    held = WorkerState(LAYERS, control=state.control, units={index: state.units[index] for index in units})
    held.moments = {name: state.moments[name] for index in units for name, _ in held.named_parameters(index)
                    if name in state.moments}  # fmt: skip
    return held


def forward(units: Mapping[int, nn.Module], x: Tensor) -> Tensor:
    for index in sorted(units):
        x = torch.tanh(units[index](x))
    return x


def equal_parts(num_units: int, stages: int) -> list[range]:
    edges = [stage * num_units // stages for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def halving_plan(held: Sequence[WorkerState], stages: int, pipelines: int) -> RegroupPlan:
    inventories = [
        Inventory(units=sorted(state.units), step=state.control.step, control=state.control.to_dict()) for state in held
    ]

    def cut_at(boundary: int, costs: object) -> Cut:
        assert boundary == 0, "the new model's"
        return Cut(equal_parts(LAYERS // 2 + 2, stages), micro_batch_size=1)

    unit_bytes = [1] * (LAYERS + 2)
    return make_plan(
        inventories,
        stages * pipelines,
        cut_at,
        pipelines,
        unit_bytes,
        durable=lambda: None,
        map_of=lambda _: Halve(),
    )


def sources() -> StateSources:
    def never(*_: object) -> WorkerState:
        raise AssertionError("nothing comes from the seed or a checkpoint")

    return StateSources(
        codec=UnitCodec(ADAMW, LAYERS),
        shells=[block().to("meta") for _ in range(LAYERS + 2)],
        mirrors=Mirrors(None, never, never),  # type: ignore[arg-type]
        read_ahead={},
        build_units=never,  # type: ignore[arg-type]
        blank_unit=never,  # type: ignore[arg-type]
        load_unit=never,  # type: ignore[arg-type]
        load_control=never,  # type: ignore[arg-type]
    )


def in_threads(count: int, run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("stages", "pipelines", "leavers"),
    [
        pytest.param(2, 1, 0, id="same workers"),
        pytest.param(1, 2, 0, id="wider"),
        pytest.param(1, 1, 1, id="one leaves"),
    ],
)
def test_a_map_that_halves_the_layers_computes_what_it_does_in_one_place(
    stages: int, pipelines: int, leavers: int
) -> None:
    whole = whole_model()
    before = {name: tensor.clone() for index in whole.units for name, tensor in
              whole.unit_tensors(index, with_moments=True).items()}  # fmt: skip
    held = [part(whole, range(4)), part(whole, range(4, LAYERS + 2))]
    plan = halving_plan(held, stages, pipelines)
    assert plan.origin is Origin.PEERS
    ensure_default_group()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TRANSPORT.timeout)
    new: dict[int, WorkerState] = {}

    def worker(rank: int) -> None:
        groups = GenerationGroups()
        client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=TRANSPORT.timeout)
        groups.meet(client, rank, 2 - leavers, leavers, TRANSPORT)
        assert groups.transfer is not None
        new[rank] = Assembly(sources(), held[rank], plan, rank, groups.transfer, CPU, Halve()).assemble()

    in_threads(2, worker)

    pairs = {0: [0], **{unit: [2 * unit - 1, 2 * unit] for unit in range(1, 5)}, 5: [9]}
    expected: dict[int, nn.Module] = {}
    for unit, olds in pairs.items():
        expected[unit] = block()
        with torch.no_grad():
            for name in ("weight", "bias"):
                mean = torch.stack([whole.units[old].get_parameter(name) for old in olds]).mean(0)
                expected[unit].get_parameter(name).copy_(mean)
    x = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH)
    for pipeline in range(pipelines):
        spans = {rank: range(*plan.spans[stage]) for rank, (p, stage) in enumerate(plan.roles) if p == pipeline}
        assert all(sorted(new[rank].units) == list(span) for rank, span in spans.items())
        made = {index: unit for rank in spans for index, unit in new[rank].units.items()}
        torch.testing.assert_close(forward(made, x), forward(expected, x), rtol=1e-9, atol=0)
    for rank, (_, stage) in enumerate(plan.roles):
        state = new[rank]
        assert (state.control.step, state.control.boundary, state.num_layers) == (7, 0, LAYERS // 2)
        assert not any(state.moments.values()), "the optimizer starts afresh"
        names = {name for name, _ in state.trained_parameters()}
        assert len(names) == 2 * len(range(*plan.spans[stage])), "all train again"
    assert all(not new[rank].units for rank in range(len(plan.roles), 2)), "a leaver only gives"
    assert all(
        torch.equal(before[name], tensor)
        for index in whole.units
        for name, tensor in whole.unit_tensors(index, with_moments=True).items()
    ), "until the vote, the old model is whole"


def test_only_what_a_new_stage_is_made_of_moves() -> None:
    whole = whole_model()
    held = [part(whole, range(4)), part(whole, range(4, LAYERS + 2))]

    plan = halving_plan(held, 2, 1)

    # New units 0-2 are made of old 0-4, new units 3-5 of old 5-9: only old 4 is on the wrong side.
    assert plan.spans == [(0, 3), (3, 6)]
    assert [(move.unit, move.source, move.target) for move in plan.moves] == [(4, 1, 0)]
    assert plan.control["boundary"] == 3, "as it is before the map"
