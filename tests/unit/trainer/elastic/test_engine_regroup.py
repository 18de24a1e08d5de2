"""A worker in a regroup: whom it waits for, and of what it makes the state of its new role."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from pipetransformer.elastic.regroup import assemble, transaction
from pipetransformer.elastic.regroup.agreement import Agreement, RegroupError
from pipetransformer.elastic.regroup.assemble import Assembly, StateSources
from pipetransformer.elastic.regroup.mirrors import Mirror, Mirrors
from pipetransformer.elastic.regroup.tools import RegroupTools
from pipetransformer.elastic.regroup.transaction import regroup
from pipetransformer.elastic.regroup.transfer import Transfer, TransferListener
from pipetransformer.elastic.regroup.transfer_plan import Inventory, Move, Origin, TransferPlan, make_plan
from pipetransformer.elastic.transport.connections import Connections
from pipetransformer.elastic.transport.groups import HashStore
from pipetransformer.elastic.transport.watchdog import Deadline, Watchdog
from pipetransformer.errors import WorkersDifferError
from pipetransformer.hooks import Hooks
from pipetransformer.models import unit_name
from pipetransformer.partition import Cut
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.read_ahead import ReadUnit
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.messages import Member, ResizeReason
from pipetransformer_contract.spec import Optimizer

CPU = torch.device("cpu")
LAYERS = 2
UNITS = range(LAYERS + 2)
CODEC = UnitCodec(Optimizer(name="SGD", momentum=0.0), LAYERS)


def unit(value: float) -> nn.Linear:
    made = nn.Linear(2, 2, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def never(*_: object) -> Any:
    raise AssertionError("nothing comes from there")


def sources(read_ahead: dict[int, ReadUnit]) -> StateSources:
    return StateSources(
        job=mock.Mock(
            codec=CODEC,
            shells=[unit(0.0).to("meta") for _ in UNITS],
            build_units=never,
            blank_unit=lambda _: unit(0.0).to("meta"),
        ),
        checkpoints=mock.Mock(load_unit=never, load_control=never),
        mirrors=Mirrors(None, CODEC, [], CPU),
        read_ahead=mock.Mock(units=read_ahead),
    )


@pytest.mark.parametrize("behind", [Control(step=5), Control(step=9, last_generation=1)], ids=["step", "generation"])
def test_a_joiner_with_state_in_doubt_takes_the_frozen_units_it_has_read(
    behind: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has assembled units of an earlier step, or of the same one as another generation did it."""
    member = WorkerState(LAYERS, units={index: unit(9.0 if index > 1 else 6.0) for index in UNITS})
    member.control = Control(step=9, last_generation=2, boundary=1, boundary_step=6)
    member.apply_boundary()
    in_doubt = WorkerState(LAYERS, control=behind, units={index: unit(5.0) for index in UNITS})
    joiner = WorkerState(LAYERS).joined(in_doubt)
    read = {index: ReadUnit(0, {f"{unit_name(index, LAYERS)}.weight": torch.full((2, 2), 6.0)}) for index in range(2)}
    inventories = [
        Inventory(units=list(member.units), step=9, control=member.control.to_dict()),
        Inventory(
            units=list(joiner.units),
            step=behind.step,
            control=behind.to_dict(),
            read_ahead={index: each.fell_step for index, each in read.items()},
        ),
    ]
    count = len(UNITS)
    leader = mock.Mock(
        cut=lambda *_: Cut([range(count)], 1), unit_bytes=lambda _: [1] * count, durable=never, map_of=lambda _: None
    )
    plan = make_plan(inventories, leader, num_members=2, pipelines=2)
    assert [move.unit for move in plan.moves] == [2, 3]

    def arrived(*_: object) -> Transfer:
        given = {move.unit: CODEC.give(member, move.unit, CPU) for move in plan.moves}
        return Transfer({}, given, [], [], TransferListener())

    monkeypatch.setattr(assemble, "start_moves", arrived)
    new = Assembly(sources(read), joiner, plan, 1, cast(Any, None), CPU).assemble()

    for index in UNITS:
        assert torch.equal(*[state.units[index].get_parameter("weight") for state in (new, member)]), index


def test_state_in_doubt_joins_only_the_same_step_of_the_same_generation() -> None:
    held = WorkerState(LAYERS, control=Control(step=9, last_generation=2), units={1: unit(1.0)})
    for point, joined in (((9, 2), {1, 2}), ((9, 1), {1}), ((8, 2), {1})):
        control = Control(step=point[0], last_generation=point[1])
        assert set(held.joined(WorkerState(LAYERS, control=control, units={2: unit(2.0)})).units) == joined


def test_a_mirror_is_of_a_step_as_one_generation_did_it() -> None:
    old, new = (Mirror(6, Control(step=6, last_generation=number).to_dict(), {}) for number in (1, 2))
    mirrors = Mirrors(1, CODEC, [], CPU, [old, new])

    assert (mirrors.at((6, 1, 0)), mirrors.at((6, 2, 0)), mirrors.at((6, 3, 0))) == (old, new, None)


class Handler:
    """Finds one generation, and meets its participants if they come."""

    def __init__(self, reason: ResizeReason, *, they_come: bool) -> None:
        self.patient = False
        self.connections = Connections()
        self._reason, self._they_come = reason, they_come

    def find_next(self) -> Any:
        return SimpleNamespace(layout_generation=3, reason=self._reason)

    def next_rendezvous(self) -> Any:
        if not self._they_come:
            raise RendezvousTimeoutError
        return SimpleNamespace(rank=0, store=None)

    def is_superseded(self) -> bool:
        return False

    is_closed = is_superseded


@pytest.mark.parametrize(
    ("trained", "in_doubt", "reason", "patient"),
    [
        (False, False, ResizeReason.CLAIM, True),
        (False, True, ResizeReason.CLAIM, True),
        (True, False, ResizeReason.CLAIM, False),
        (True, True, ResizeReason.CLAIM, False),
        (False, False, ResizeReason.START, False),
    ],
)
def test_a_joiner_waits_for_an_evaluation_even_with_state_in_doubt(
    trained: bool, in_doubt: bool, reason: ResizeReason, patient: bool
) -> None:
    """At a start nobody evaluates."""
    handler = Handler(reason, they_come=False)
    tools = SimpleNamespace(handler=handler, hooks=Hooks(), watchdog=Watchdog())
    some = WorkerState(LAYERS, units={0: unit(1.0)})

    with pytest.raises(RegroupError, match="rendezvous failed"):
        regroup(
            cast(RegroupTools, tools),
            some if trained else WorkerState(LAYERS),
            mock.Mock(in_doubt=some if in_doubt else None, pending=None),
            in_group=False,
        )

    assert handler.patient == patient


def test_a_joiner_waits_no_longer_than_others_once_all_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    past: list[bool] = []
    monkeypatch.setattr(transaction._Attempt, "enter", lambda attempt: past.append(bool(attempt.deadline.why_past())))
    for seconds in (-1.0, 60.0):
        watchdog = Watchdog(floor_seconds=seconds, first_seconds=seconds)
        handler = Handler(ResizeReason.CLAIM, they_come=True)
        tools = SimpleNamespace(handler=handler, hooks=Hooks(), watchdog=watchdog)
        regroup(cast(RegroupTools, tools), WorkerState(LAYERS), mock.Mock(), in_group=False)

    assert past == [True, False]


def test_a_leader_hears_which_units_only_a_state_in_doubt_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose vote broke after a step may break in the vote of the next generation, too."""
    reach = mock.Mock(side_effect=RuntimeError)
    monkeypatch.setattr(Agreement, "reach", reach)
    control = Control(step=7, last_generation=1)
    own = WorkerState(LAYERS, control=control, units={1: unit(1.0)})
    in_doubt = WorkerState(LAYERS, control=replace(control), units={1: unit(1.0), 2: unit(2.0)})
    attempt = transaction._Attempt(
        mock.Mock(), own, mock.Mock(in_doubt=in_doubt), mock.Mock(members=[0], leavers=[]), 0, mock.Mock(),
        mock.Mock(), mock.Mock(), Deadline("regroup", 60.0),
    )  # fmt: skip

    with pytest.raises(RuntimeError):
        attempt._run()

    ((state, _, only_in_doubt, _), _) = reach.call_args
    assert (set(state.units), set(only_in_doubt)) == ({1, 2}, {2})


def test_a_move_may_take_as_long_as_its_bytes_on_a_slow_network() -> None:
    """Both workers allow the time of all moves, because each waits for the other."""
    plan = TransferPlan(
        origin=Origin.PEERS, step=9, control={"boundary": 0}, roles=[(0, 0), (0, 1)], cut=Cut([range(4)], 1),
        moves=[Move(unit=unit, source=unit % 2, target=1 - unit % 2) for unit in range(3)],
    )  # fmt: skip
    watchdog = mock.Mock(limit_to_move=mock.Mock(return_value=60.0))
    tools = mock.Mock(codec_for=lambda _: CODEC, shells=[unit(0.0)] * 4, watchdog=watchdog)
    attempt = transaction._Attempt(
        tools, WorkerState(LAYERS), mock.Mock(), mock.Mock(), 0, mock.Mock(), mock.Mock(), mock.Mock(),
        Deadline("regroup", -1.0),
    )  # fmt: skip

    attempt._expect(plan, None)

    size = CODEC.size(0, unit(0.0), 0)
    watchdog.limit_to_move.assert_called_once_with(3 * size)
    assert attempt.transfers == [(0, 1, 2 * size), (1, 0, size)]
    assert not attempt.deadline.why_past()


@pytest.mark.parametrize(
    ("held", "error", "told"),
    [
        ([[0], [1], []], RegroupError, True),
        ([[0], [1], [2]], WorkersDifferError, False),
        ([[], [], []], WorkersDifferError, False),
    ],
    ids=["a-joiner", "a-worker-with-state", "before-the-start"],
)
def test_other_data_end_a_job_unless_only_a_joiner_sees_them(
    held: list[list[int]], error: type[Exception], told: bool
) -> None:
    """The workers that train return to their layout. But a start would fail in the same way again and again."""
    members = [Member(name=name, uid=name, address="127.0.0.1:1") for name in ("a", "b", "c")]
    store, generation = HashStore(), mock.Mock(members=members)
    agreement = Agreement(mock.Mock(), generation, 0, store, mock.Mock(), Deadline("regroup", 60.0))
    data = zip(held, ("here", "here", "elsewhere"), strict=True)

    with pytest.raises(error, match="differ between workers"):
        agreement._compare_data([Inventory(units=units, step=9, control={}, data=seen) for units, seen in data])

    assert store.check(["plan"]) is told
    assert not told or store.get("plan").startswith(b"none: c would train on other data")
