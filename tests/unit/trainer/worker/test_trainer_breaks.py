"""How one worker's trainer drops a generation that is broken, and what it leaves out of a pause."""

from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch

from pipetransformer.checkpoint.checkpointer import Checkpointer
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import Transport
from pipetransformer.errors import StorageError
from pipetransformer.job.load import load_job
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.commit import Committer
from pipetransformer.training.round import Rounds
from pipetransformer.training.vote import Vote
from pipetransformer.worker.trainer import Trainer
from pipetransformer.worker.visits import Visits
from tests.testkit.trainer.numerics import ADAMW, make_spec


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """The trainer of a member."""
    transport = Transport("127.0.0.1", cast(Any, None), torch.device("cpu"))
    made = Trainer(load_job(make_spec(ADAMW)), "w0", mock.Mock(), mock.Mock(), transport, mock.Mock(), tmp_path)
    made._member = mock.Mock()
    made._member.release.return_value = []
    return made


def test_groups_are_dropped_before_the_weights_go_back(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits on the device for a dead peer until its groups are dropped, and going back waits for the device."""
    is_member: list[bool] = []
    monkeypatch.setattr(Committer, "go_back", lambda _: is_member.append(trainer._member is not None))

    trainer._abandon("a peer has died")

    assert is_member == [False]


def test_a_member_that_cannot_write_the_checkpoint_of_a_leaver_drops_the_group(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leaver waits in the checkpoint for this member's part. It would take the next vote for that one."""
    refused = mock.Mock(side_effect=StorageError("spec.checkpoint.location: the disk is full"))
    passed = mock.Mock()
    monkeypatch.setattr(Checkpointer, "save_now", refused)
    monkeypatch.setattr(Barrier, "pass_after", passed)
    member = trainer._member
    assert member is not None

    assert trainer._leave(member) is None

    assert trainer._member is None
    refused.assert_called_once()
    passed.assert_not_called()


def test_a_job_without_checkpoints_says_of_no_step_that_it_is_saved(trainer: Trainer) -> None:
    trainer.control.step = 5

    assert trainer.is_saved
    assert trainer.saved_step == 0


def test_a_worker_in_no_group_names_the_stages_of_the_generation_that_it_tried_to_enter(trainer: Trainer) -> None:
    """It ran out of memory when it made its first stage."""
    trainer._member = None
    handler: Any = trainer._kit.handler

    for generation, stages in ((None, None), (mock.Mock(stages=3), 3)):
        handler.generation = generation
        assert trainer.stages_too_few == stages


def test_a_generation_that_is_whole_says_no_longer_why_one_broke(trainer: Trainer) -> None:
    trainer._abandon("a peer has died")
    assert trainer.why_broken == "a peer has died"
    whole = mock.Mock(state=WorkerState(6))

    trainer._take_over(whole)

    assert (trainer.why_broken, trainer._state) == ("", whole.state)


@pytest.mark.parametrize("stepped", [False, True])
def test_weights_of_the_next_level_are_not_read_in_the_step_that_ends_a_pause(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, *, stepped: bool
) -> None:
    """A short visit reads them from its first steps on. A thread that reads takes a processor from the step."""
    monkeypatch.setattr(Rounds, "num_steps", lambda *_: 1)
    monkeypatch.setattr(Rounds, "train", lambda *_: Vote())
    read = mock.Mock()
    monkeypatch.setattr(Visits, "read_ahead", read)
    member = trainer._member
    assert member is not None
    member.stepped, member.runner = stepped, mock.Mock(ahead_share=0.0)

    trainer._take_round(member)

    assert read.called is stepped
