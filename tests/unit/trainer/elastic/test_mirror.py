"""What a worker keeps of its neighbour's stage, and when it lets go of it."""

from typing import Any, cast
from unittest import mock

import pytest
import torch

from pipetransformer.elastic.regroup import mirrors as mirror_module
from pipetransformer.elastic.regroup.mirrors import Mirrors
from pipetransformer.elastic.regroup.transfer import Parts
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
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
    return StageLayout(generation, 0, roles, [range(2 * stage, 2 * stage + 2) for stage in range(stages)], 1)


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch) -> Mirrors:
    """Those of a worker whose neighbour's units always arrive."""

    def arrive(moves: object, rank: int, group: object, give: object, blank: Any) -> dict[int, Parts]:
        return {unit: blank(unit) for unit in (2, 3)}

    monkeypatch.setattr(mirror_module, "move_units", arrive)
    return Mirrors(5, lambda state, unit: [torch.ones(1)], lambda unit, boundary: [torch.zeros(1)])


def take(mirrors: Mirrors, *steps: int) -> None:
    for step in steps:
        mirrors.take(WorkerState(2, control=Control(step=step)), layout(), cast(Any, None))


def kept(mirrors: Mirrors) -> list[int]:
    return [mirrored.step for mirrored in mirrors.describe()]


def test_the_mirror_before_is_kept_until_all_have_voted_after_the_next(mirrors: Mirrors) -> None:
    take(mirrors, 5, 10)
    assert kept(mirrors) == [5, 10]

    mirrors.settle()
    assert kept(mirrors) == [10]


def test_a_round_whose_vote_fails_keeps_both_mirrors(mirrors: Mirrors) -> None:
    take(mirrors, 5, 10)
    others = {name: mock.MagicMock() for name in Rounds.__dataclass_fields__ if name != "mirrors"}
    others["watcher"].found.return_value = None
    member = mock.MagicMock()
    member.reducer.finish.return_value = [0.0]
    member.runner.train.return_value = mock.Mock(loss=1.0, weight=1.0)
    member.ballots.sum.side_effect = RuntimeError("a connection broke")
    policy = mock.Mock(needs_similarities=lambda step: False)

    with pytest.raises(RuntimeError, match="a connection broke"):
        Rounds(mirrors=mirrors, **others).train(WorkerState(2), policy, member)

    assert kept(mirrors) == [5, 10]


def test_mirrors_of_steps_that_did_not_happen_are_forgotten(mirrors: Mirrors) -> None:
    take(mirrors, 5, 10)

    mirrors.forget_after(9)

    assert kept(mirrors) == [5]


def test_a_mirror_holds_the_workers_own_units_and_its_neighbours(mirrors: Mirrors) -> None:
    take(mirrors, 5)

    assert mirrors.describe()[0].units == [0, 1, 2, 3]


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
def test_mirrors_are_taken_regularly_and_once_a_layout_where_no_other_worker_holds_the_stage(
    step: int, first_step: int, stages: int, pipelines: int, due: bool, mirrors: Mirrors
) -> None:
    assert mirrors.due(step, layout(stages, pipelines), first_step) == due
    assert not Mirrors(None, mirrors.give, mirrors.blank).due(step, layout(stages, pipelines), first_step)
