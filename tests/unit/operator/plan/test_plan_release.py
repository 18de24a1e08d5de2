"""How many workers a job with `onPack: Release` gives back, by `releaseDownTo`."""

import pytest

from pipetransformer_contract.messages import Offer, StepTime
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import World

#: Nine of twelve layers are frozen: four stages are fast, and one is still as fast as the job began.
FROZEN = {4: 0.4, 2: 0.6, 1: 0.98}


def offers(seconds: dict[int, float]) -> list[Offer]:
    return [
        Offer(stages=stages, bytes_per_worker=1, step_seconds=[StepTime(pipelines=1, seconds=taken)])
        for stages, taken in seconds.items()
    ]


def packed(release_down_to: str) -> World:
    """A job that began with steps of a second, after nine layers froze."""
    builder = make_job().stages(4).workers(4).release().set("pipeline.packing", "Measured")
    world = World(builder.set("elasticPolicy.releaseDownTo", release_down_to))
    world.start()
    world.commit(boundary=9, offered=offers(FROZEN), step_seconds=0.4, starting_step_seconds=1.0)
    return world


@pytest.mark.parametrize(("release_down_to", "shape"), [("PresentStep", (4, 1)), ("StartingStep", (1, 1))])
def test_the_step_to_compare_with_says_how_far_a_release_goes(release_down_to: str, shape: tuple[int, int]) -> None:
    assert packed(release_down_to).shape == shape


def test_thawed_layers_claim_back_what_the_starting_step_needs() -> None:
    world = packed("StartingStep")
    world.commit(checkpoint=9, offered=offers(FROZEN), step_seconds=0.98, starting_step_seconds=1.0)
    world.part()
    assert len(world.workers) == 1
    thawed = offers({4: 1.0, 2: 1.7, 1: 3.3})
    world.commit(boundary=0, offered=thawed, step_seconds=3.3, starting_step_seconds=1.0)
    world.warm_up()
    assert world.shape == (4, 1)
