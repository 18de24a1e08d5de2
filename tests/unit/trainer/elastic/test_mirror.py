"""What a worker keeps of its neighbour's stage, and when it lets go of it."""

from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

from pipetransformer.elastic.regroup import mirrors as mirror_module
from pipetransformer.elastic.regroup.mirrors import Mirrors
from pipetransformer.elastic.regroup.transfer import Cargo, Parts
from pipetransformer.elastic.regroup.transfer_plan import Move
from pipetransformer.hooks import HookPoint
from pipetransformer.models.off_device import bring_back, move_off
from pipetransformer.partition import Cut
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.between_rounds import BetweenRounds
from pipetransformer.training.round import Rounds
from pipetransformer_contract.messages import Generation, Member, ResizeReason


def layout(stages: int = 2, pipelines: int = 1) -> StageLayout:
    """The first worker's, with two units a stage."""
    members = [Member(name=f"w{rank}", uid="u", address="127.0.0.1:1") for rank in range(stages * pipelines)]
    generation = Generation(
        job_uid="job", layout_generation=1, stages=stages, pipelines=pipelines, members=members, leader="w0",
        nonce="n", reason=ResizeReason.START,
    )  # fmt: skip
    roles = [(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages)]
    return StageLayout(generation, 0, roles, Cut([range(2 * stage, 2 * stage + 2) for stage in range(stages)], 1))


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch) -> Mirrors:
    """Those of a worker whose neighbour's units always arrive."""

    def arrive(moves: object, rank: int, group: object, cargo: Cargo) -> dict[int, Parts]:
        return {unit: cargo.blank(unit) for unit in (2, 3)}

    monkeypatch.setattr(mirror_module, "move_units", arrive)
    codec = mock.Mock(give=lambda *_: [torch.ones(1)], blank=lambda *_: [torch.zeros(1)])
    return Mirrors(5, codec, [mock.Mock()] * 4, torch.device("cpu"))


def take(mirrors: Mirrors, *steps: int) -> None:
    for step in steps:
        mirrors.take(held(step), layout(), cast(Any, None))


def held(step: int) -> WorkerState:
    return WorkerState(2, control=Control(step=step), units={unit: nn.Linear(1, 1) for unit in range(4)})


def test_a_mirror_holds_all_spans_of_the_worker_before(mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int, int]] = []

    def send(moves: list[Move], *_: object) -> dict[int, Parts]:
        sent.extend((move.unit, move.source, move.target) for move in moves)
        return {move.unit: [torch.zeros(1)] for move in moves if move.target == 0}

    monkeypatch.setattr(mirror_module, "move_units", send)
    there_and_back = Cut([range(1), range(1, 2), range(2, 3), range(3, 4)], 1, owners=(0, 1, 1, 0))

    mirrors.take(held(5), replace(layout(), cut=there_and_back), cast(Any, None))

    assert sorted(sent) == [(0, 0, 1), (1, 1, 0), (2, 1, 0), (3, 0, 1)]
    assert mirrors.describe()[0].units == [0, 1, 2, 3]


def kept(mirrors: Mirrors) -> list[int]:
    return [mirrored.step for mirrored in mirrors.describe()]


def test_the_mirror_before_is_kept_until_all_have_the_next(mirrors: Mirrors) -> None:
    """The group of step 10 breaks before all members have its mirror. Votes of later groups tell nothing about it."""
    member: Any = mock.Mock(layout=layout(), first_step=0)
    kit: Any = mock.MagicMock(mirrors=mirrors)
    between = BetweenRounds(kit)
    between.mirror(held(5), member)
    kit.barrier.pass_after.side_effect = RuntimeError("a connection broke")
    with pytest.raises(RuntimeError, match="a connection broke"):
        between.mirror(held(10), member)
    assert kept(mirrors) == [5, 10]

    vote_again(kit)
    assert kept(mirrors) == [5, 10]

    kit.barrier.pass_after.side_effect = None
    between.mirror(held(15), member)
    assert kept(mirrors) == [15]


def vote_again(kit: Any) -> None:
    """Take a round of a later group up to its vote, which passes."""

    def end_behind_the_vote(point: HookPoint, step: int) -> None:
        if point is HookPoint.VOTED:
            raise InterruptedError

    kit.watcher.found.return_value = None
    kit.hooks.on_point = end_behind_the_vote
    member = mock.MagicMock()
    member.reducer.finish.return_value = [0.0]
    member.runner.train.return_value = mock.Mock(loss=1.0, weight=1.0)
    member.runner.take_computing_seconds.return_value = 0.0
    member.groups.exchange.sum = list
    policy = mock.Mock(needs_similarities=lambda step: False)
    with pytest.raises(InterruptedError):
        Rounds(kit).train(WorkerState(2), policy, member)


def test_mirrors_of_steps_that_did_not_happen_are_forgotten(mirrors: Mirrors) -> None:
    take(mirrors, 5, 10)

    mirrors.forget_after(9)

    assert kept(mirrors) == [5]


def test_a_mirror_holds_the_workers_own_units_and_its_neighbours(mirrors: Mirrors) -> None:
    take(mirrors, 5)

    assert mirrors.describe()[0].units == [0, 1, 2, 3]


def test_a_unit_that_is_off_the_device_is_mirrored_without_a_copy(
    mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = held(5)
    for unit in (0, 1):
        state.units[unit].requires_grad_(requires_grad=False)
    move_off(state.units[0], torch.device("cpu"))

    def give(state: WorkerState, unit: int, device: torch.device) -> Parts:
        return [parameter.detach() for parameter in state.units[unit].parameters()]

    mirrors.codec = cast(Any, mock.Mock(give=give))

    mirrors.take(state, layout(), cast(Any, None))

    parts = mirrors.kept[0].units
    shared = [parts[unit][0].data_ptr() == next(state.units[unit].parameters()).data_ptr() for unit in (0, 1)]
    assert shared == [True, False]
    before = parts[0][0].clone()
    bring_back(state.units[0], torch.device("cpu"))
    next(state.units[0].parameters()).data.add_(1)
    assert torch.equal(parts[0][0], before)


@pytest.mark.parametrize(
    ("step", "first_step", "stages", "pipelines", "due"),
    [
        (10, 0, 2, 1, True),
        (11, 0, 2, 1, False),
        (13, 12, 2, 1, True),  # the first of its layout
        (10, 0, 2, 2, False),  # the other pipeline holds the same
        (10, 0, 1, 1, False),  # there is no neighbour
    ],
)
def test_mirrors_are_taken_regularly_and_once_for_each_new_layout(
    step: int, first_step: int, stages: int, pipelines: int, due: bool, mirrors: Mirrors
) -> None:
    assert mirrors.due(step, layout(stages, pipelines), first_step) == due
    assert not replace(mirrors, every_steps=None).due(step, layout(stages, pipelines), first_step)
