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


def six_workers(starting_step_seconds: float | None, seconds: dict[tuple[int, int], float], most: int = 6) -> World:
    """A job of 3 stages x 2 pipelines with steps of a second at the start, after layers froze."""
    builder = make_job().stages(3).workers(6).release().set("pipeline.packing", "Measured")
    world = World(builder.set("elasticPolicy.releaseDownTo", "StartingStep"))
    world.start()
    world.builder = world.builder.set("elasticPolicy.maxWorkers", most)
    by_stages: dict[int, list[StepTime]] = {}
    for (stages, pipelines), taken in seconds.items():
        by_stages.setdefault(stages, []).append(StepTime(pipelines=pipelines, seconds=taken))
    found = [Offer(stages=stages, bytes_per_worker=1, step_seconds=times) for stages, times in by_stages.items()]
    world.commit(boundary=6, offered=found, step_seconds=seconds[3, 2], starting_step_seconds=starting_step_seconds)
    return world


#: (1, 2) is just too slow for a start of one second, and (2, 2) needs the fewest worker-seconds of the others.
UNEVEN = {(3, 2): 0.5, (3, 1): 1.0, (2, 2): 0.62, (2, 1): 1.2, (1, 2): 1.08, (1, 1): 2.1}


@pytest.mark.parametrize(
    ("starting", "most", "shape"),
    [(1.0, 6, (2, 2)), (1.1, 6, (1, 2)), (2.0, 6, (1, 1)), (1.0, 3, (3, 1)), (None, 6, (3, 2))],
    ids=["a second", "a little more", "twice", "at most 3 workers", "not measured yet"],
)
def test_the_cheapest_layout_as_fast_as_the_start_may_have_several_pipelines(
    starting: float | None, most: int, shape: tuple[int, int]
) -> None:
    assert six_workers(starting, UNEVEN, most).shape == shape
