"""A job whose model becomes smaller for a while: workers go, come back before it grows, and nothing is trained without
them."""

from datetime import timedelta

import pytest

from pipetransformer_contract.api.status import ConditionStatus, ConditionType
from pipetransformer_contract.messages import Offer, ResizeReason, Upcoming
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import BLOCK_BYTES, World, offers

pytestmark = pytest.mark.timeout(60)

#: Of a model of a quarter of the bytes.
SMALL = [Offer(stages=stages, bytes_per_worker=3 * BLOCK_BYTES // stages) for stages in (4, 2, 1)]
#: Only the pipelines that hold the large model.
LARGE = [offer for offer in offers(0) if offer.stages == 4]


def small(on_pack: str = "Release") -> World:
    """A job of four stages that trains its small level on as few workers as it needs."""
    world = World(make_job().stages(4).workers(4).checkpoint().on_pack(on_pack))
    world.start()
    world.commit(offered=SMALL)
    for _ in range(4):
        world.part()
        world.commit(offered=SMALL, checkpoint=0)
        world.warm_up()
    return world


def test_the_small_model_packs_and_its_workers_are_released() -> None:
    world = small()

    assert (world.shape, len(world.workers)) == ((1, 1), 1)


def test_the_small_model_packs_into_more_pipelines() -> None:
    assert small("Widen").shape == (1, 4)


def test_workers_are_claimed_before_the_model_grows_while_the_small_one_trains() -> None:
    world = small()

    world.commit(offered=LARGE, upcoming=Upcoming(step=500, level=0))

    assert (world.shape, len(world.workers)) == ((1, 1), 4)
    assert world.condition(ConditionType.RESIZING).reason == "Preparing"
    world.warm_up()
    assert world.shape == (4, 1)
    assert world.generation.reason is ResizeReason.CLAIM


def test_without_room_the_job_waits_says_so_and_is_not_stalled() -> None:
    world = small()
    world.room = world.reach = 0
    waits = Upcoming(step=500, level=0, waits=True)

    world.commit(offered=LARGE, upcoming=waits, steps=0)
    world.wait(timedelta(days=1).total_seconds())

    resizing = world.condition(ConditionType.RESIZING)
    assert (resizing.status, resizing.reason) == (ConditionStatus.TRUE, "WaitingForLevel")
    assert "level 0 begins before step 500, and its model does not fit in 1 pipeline of 1 stage" in resizing.message
    assert world.status.reason(ConditionType.STALLED) != "NoProgress"


@pytest.mark.parametrize(
    ("offered", "ending"),
    [
        pytest.param(LARGE, "more workers; spec.elasticPolicy.maxWorkers allows 1, and the model needs 4", id="why"),
        pytest.param([], "more workers", id="unknown"),
    ],
)
def test_a_job_below_its_starting_size_says_why_it_waits_if_that_is_known(offered: list[Offer], ending: str) -> None:
    world = small()
    world.builder.set("elasticPolicy.maxWorkers", 1)

    world.commit(offered=offered, upcoming=Upcoming(step=500, level=0, waits=True), steps=0)

    assert world.condition(ConditionType.RESIZING).message.endswith(ending)


def test_with_room_again_a_job_that_waits_grows() -> None:
    world = small()
    world.commit(offered=LARGE, upcoming=Upcoming(step=500, level=0, waits=True), steps=0)
    world.warm_up()

    assert world.shape == (4, 1)

    world.commit(offered=LARGE)
    assert world.condition(ConditionType.RESIZING).reason == "Settled"
