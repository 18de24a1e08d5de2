"""A regroup may make another list of units from the present one: here the mean of each two blocks becomes one."""

import datetime
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, host_store
from pipetransformer.elastic.regroup.mirrors import Mirrors
from pipetransformer.elastic.regroup.tools import RegroupTools
from pipetransformer.elastic.regroup.transaction import Regrouped, regroup
from pipetransformer.elastic.regroup.transfer_plan import Inventory, TransferPlan, make_plan
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import TCPStore, Transport
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer.hooks import Hooks
from pipetransformer.models import Ties, unit_name
from pipetransformer.models.ties import Tie
from pipetransformer.partition import Cut
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.optimizer import make_optimizer
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from pipetransformer_contract.spec import Optimizer

pytestmark = pytest.mark.timeout(60)

TRANSPORT = Transport("127.0.0.1", datetime.timedelta(seconds=30))
CPU = torch.device("cpu")
LAYERS = 8
WIDTH = 5
ADAMW = Optimizer()
#: Of the new model only.
TIE = Tie(((0, "weight"), (LAYERS // 2 + 1, "weight")))


def block() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


@dataclass
class Halve:
    """Blocks 2i and 2i+1 (from 0) become block i; the optimizer starts afresh and all blocks train again."""

    num_layers: int = LAYERS // 2
    ties: Ties = field(default_factory=lambda: Ties((TIE,)))
    takes_moments: bool = False

    def sources(self, unit: int) -> Sequence[int]:
        if unit in (0, self.num_layers + 1):
            return [0 if unit == 0 else LAYERS + 1]
        return [2 * unit - 1, 2 * unit]

    def prepare(self, units: Collection[int]) -> None:
        """The old units are all that the new ones are made of."""

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
    """A model in the middle of its training, three layers frozen."""
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


def cut_halved(boundary: int, stages: int, *_: object) -> Cut:
    assert boundary == 0, "the new model's"
    return Cut(equal_parts(LAYERS // 2 + 2, stages), micro_batch_size=1)


def halving_plan(held: Sequence[WorkerState], stages: int, pipelines: int) -> TransferPlan:
    inventories = [
        Inventory(units=sorted(state.units), step=state.control.step, control=state.control.to_dict()) for state in held
    ]
    sources = mock.Mock(
        cut=lambda control: cut_halved(control.boundary, stages),
        unit_bytes=lambda _: [1] * (LAYERS + 2),
        durable=lambda: None,
        map_of=lambda _: Halve(),
    )
    return make_plan(inventories, sources, num_members=stages * pipelines, pipelines=pipelines)


class Published:
    """The source of the one generation, of the given shape, that two workers meet."""

    def __init__(self, addresses: Sequence[str], stages: int, pipelines: int) -> None:
        names = [Member(name=f"w{rank}", uid="u", address=address) for rank, address in enumerate(addresses)]
        count = stages * pipelines
        self._generation = Generation(
            job_uid="job", layout_generation=2, stages=stages, pipelines=pipelines, members=names[:count],
            leavers=names[count:], leader="w0", nonce="n", reason=ResizeReason.PACK,
        )  # fmt: skip

    def next_generation(self, after: int) -> Generation:
        return self._generation

    def newest(self) -> int:
        return self._generation.layout_generation

    @property
    def stages(self) -> int:
        return self._generation.stages

    def close(self) -> None:
        pass


def tools(worker: str, own_store: TCPStore, source: Published) -> RegroupTools:
    watchdog, codec = Watchdog(), UnitCodec(ADAMW, LAYERS)
    job = mock.Mock(
        spec_set=["at", "layouts", "codec", "data_digest", "first_sums", "inputs_change", "shells"]
    )  # nothing comes from the seed
    job.layouts, job.codec, job.data_digest, job.first_sums = mock.Mock(cut=cut_halved), codec, "", []
    job.inputs_change = False
    job.shells = [block().to("meta") for _ in range(LAYERS + 2)]
    job.at = lambda visit: job
    return RegroupTools(
        handler=GenerationRendezvousHandler(worker, own_store, source, timeout=TRANSPORT.timeout),
        transport=TRANSPORT,
        job=job,
        checkpoints=mock.Mock(spec_set=[]),
        run_dir=Path("no-record"),
        mirrors=Mirrors(None, codec, [], CPU),
        read_ahead=mock.Mock(units={}),
        barrier=Barrier(watchdog),
        watchdog=watchdog,
        hooks=Hooks(),
        map_of=lambda _, stages: Halve() if stages == source.stages else None,
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
    hosted = [host_store("127.0.0.1", TRANSPORT.timeout) for _ in held]
    source = Published([address for _, address in hosted], stages, pipelines)
    found: dict[int, Regrouped] = {}

    def worker(rank: int) -> None:
        own, settled = (
            tools(f"w{rank}", hosted[rank][0], source),
            mock.Mock(pending=None, pending_steps=1, in_doubt=None),
        )
        found[rank] = regroup(own, held[rank], settled, in_group=True)

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
    layouts = {rank: result.layout for rank, result in found.items() if result.layout is not None}
    assert len(layouts) == stages * pipelines, "a leaver has none"
    for pipeline in range(pipelines):
        units_of = {rank: layout.units for rank, layout in layouts.items() if layout.pipeline == pipeline}
        assert all(sorted(found[rank].state.units) == units for rank, units in units_of.items())
        made = {index: unit for rank in units_of for index, unit in found[rank].state.units.items()}
        torch.testing.assert_close(forward(made, x), forward(expected, x), rtol=1e-9, atol=0)
    for rank, layout in layouts.items():
        state, groups = found[rank].state, found[rank].groups
        assert (state.control.step, state.control.boundary, state.num_layers) == (7, 0, LAYERS // 2)
        assert not any(state.moments.values()), "the optimizer starts afresh"
        moved = sum(count for _, _, count in found[rank].transfers)
        moves = halving_plan(held, stages, pipelines).moves
        assert moved == len(moves) * UnitCodec(None, LAYERS).size(1, block(), 0), "no moments move"
        names = {name for name, _ in state.trained_parameters()}
        assert len(names) == 2 * len(layout.units), "all train again"
        assert state.ties.all == (TIE,) and groups.tied[TIE.stages(layout.cut.units_by_stage)].size() == len(layouts), (
            "the new model's"
        )
    assert all(not found[rank].state.units for rank in found.keys() - layouts.keys()), "a leaver only gives"
    assert all(
        torch.equal(before[name], tensor)
        for index in whole.units
        for name, tensor in whole.unit_tensors(index, with_moments=True).items()
    ), "until it is dropped, the old model is whole"
    for result in found.values():
        result.groups.drop()


def test_only_what_a_new_stage_is_made_of_moves() -> None:
    whole = whole_model()
    held = [part(whole, range(4)), part(whole, range(4, LAYERS + 2))]

    plan = halving_plan(held, 2, 1)

    # New units 0-2 are made of old 0-4, new units 3-5 of old 5-9: only old 4 is on the wrong side.
    assert plan.cut.spans == [range(3), range(3, 6)]
    assert [(move.unit, move.source, move.target) for move in plan.moves] == [(4, 1, 0)]
    assert plan.control["boundary"] == 3, "as it is before the map"
