"""A user's request for a checkpoint: asked until it is durable, answered once, whatever happens meanwhile."""

from dataclasses import replace

import pytest

from pipetransformer_contract.api.status import CheckpointRequest
from pipetransformer_contract.messages import Outcome
from pipetransformer_operator.plan import Observed
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World

pytestmark = pytest.mark.timeout(60)


class Asked(World):
    """A job that trains in two pipelines, and whose annotation holds `token`."""

    def __init__(self, *, checkpoint: bool = True) -> None:
        job = make_job().stages(2).workers(4)
        super().__init__(job.checkpoint() if checkpoint else job)
        self.token = ""
        self.start()

    def observed(self) -> Observed:
        return replace(super().observed(), checkpoint_now=self.token)

    def ask(self, token: str) -> None:
        self.token = token
        self.settle()

    def make_durable(self, request: str) -> None:
        """The leader's newest checkpoint was begun for the request."""
        self.commit(checkpoint=0)
        assert self.report is not None and self.report.checkpoint is not None
        step = self.report.step + 1
        durable = self.report.checkpoint.model_copy(update={"request": request, "step": step})
        self.report = self.report.model_copy(update={"checkpoint": durable, "step": step})
        self.settle()

    @property
    def request(self) -> CheckpointRequest:
        assert self.status.checkpoint_request is not None
        return self.status.checkpoint_request

    @property
    def reasons(self) -> list[str]:
        return [event.reason.value for event in self.told if event.reason.value.startswith("Checkpoint")]


def test_members_are_asked_until_the_checkpoint_is_durable_and_the_status_says_of_which_step() -> None:
    world = Asked()
    assert (world.status.awaited_checkpoint, world.status.checkpoint_request) == ("", None)
    world.ask("before-upgrade")
    assert world.status.awaited_checkpoint == "before-upgrade"
    world.make_durable("")
    assert world.status.awaited_checkpoint == "before-upgrade", "it was begun before the request"
    world.make_durable("before-upgrade")
    assert world.status.awaited_checkpoint == ""
    assert world.status.checkpoint is not None
    assert (world.request.step, world.request.served_time) == (world.status.checkpoint.step, world.now)
    assert world.reasons == ["CheckpointMade"]


def test_the_same_token_asks_once_and_another_asks_again() -> None:
    world = Asked()
    world.ask("one")
    world.make_durable("one")
    served = world.request
    world.ask("")
    world.ask("one")
    assert (world.status.awaited_checkpoint, world.request) == ("", served), "the status still names it"
    world.ask("two")
    assert world.status.awaited_checkpoint == "two"


def test_a_request_that_is_taken_back_is_asked_no_more() -> None:
    world = Asked()
    world.ask("one")
    world.ask("")
    assert (world.status.awaited_checkpoint, world.status.checkpoint_request) == ("", None)


def test_a_request_outlives_the_leader_that_heard_it() -> None:
    world = Asked()
    world.ask("one")
    world.end(world.generation.leader, exit_code=1)
    world.settle()
    world.commit()
    assert world.status.awaited_checkpoint == "one"
    world.make_durable("one")
    assert world.request.step is not None


def test_what_an_earlier_generation_made_durable_answers_it_although_its_successor_does_not_know() -> None:
    world = Asked()
    world.ask("one")
    world.make_durable("one")
    step = world.request.step
    world.status = world.status.model_copy(
        update={"checkpoint_request": CheckpointRequest(token="one", time=world.now)}
    )
    assert world.report is not None and world.report.checkpoint is not None
    forgotten = world.report.checkpoint.model_copy(update={"request": ""})
    world.report = world.report.model_copy(update={"checkpoint": forgotten})
    world.settle()
    assert world.request.step == step


def test_a_job_without_a_checkpoint_says_why_there_is_none() -> None:
    world = Asked(checkpoint=False)
    world.ask("one")
    assert world.status.awaited_checkpoint == ""
    assert world.request.message.startswith("spec.checkpoint is missing")
    assert world.reasons == ["CheckpointRefused"]


def test_a_job_that_ends_before_says_so() -> None:
    world = Asked()
    world.ask("one")
    world.finish(Outcome.SUCCEEDED)
    world.settle()
    assert world.status.finished
    assert world.request.message == "the job ended before the checkpoint was durable"
