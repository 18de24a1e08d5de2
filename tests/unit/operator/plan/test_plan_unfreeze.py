"""Blocks that train again: the layout grows as it shrank, on the workers at hand first, then on more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer_contract.api.status import ConditionType
from pipetransformer_contract.messages import ResizeReason
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.world import LAYERS, World

pytestmark = pytest.mark.timeout(180)


def packed(on_pack: str) -> World:
    """A job of four stages that has packed into two at boundary 8; leavers are gone, spares are warm."""
    world = World(make_job().stages(4).workers(4).checkpoint().on_pack(on_pack))
    world.start()
    freeze(world, 8)
    return world


def freeze(world: World, boundary: int) -> None:
    """Another boundary, and all that follows from it."""
    world.commit(boundary=boundary)
    for _ in range(4):
        world.part()
        world.commit(checkpoint=boundary)
        world.warm_up()


def test_pipelines_become_stages_again_on_the_same_workers() -> None:
    world = packed("Widen")
    assert world.shape == (2, 2)
    pods = set(world.workers)

    world.commit(boundary=2)

    assert world.shape == (4, 1)
    assert world.generation.reason is ResizeReason.DEEPEN
    assert set(world.workers) == pods
    assert world.generation.leavers == []


def test_released_workers_are_claimed_back_while_the_short_pipeline_trains_on() -> None:
    world = packed("Release")
    assert (world.shape, len(world.workers)) == ((2, 1), 2)

    world.commit(boundary=2)

    assert (world.shape, len(world.workers)) == ((2, 1), 4)
    assert world.status.is_true(ConditionType.RESIZING)
    world.warm_up()
    assert world.shape == (4, 1)
    assert world.generation.reason is ResizeReason.CLAIM


def test_held_workers_are_used_again() -> None:
    world = packed("Hold")
    assert (world.shape, len(world.workers)) == ((2, 1), 4)

    world.commit(boundary=2)

    assert world.shape == (4, 1)


def test_a_boundary_that_falls_while_leavers_wait_for_their_checkpoint_does_not_keep_them_for_ever() -> None:
    world = World(make_job().stages(4).workers(4).release())
    world.start()
    world.commit(boundary=8)
    world.commit(boundary=2)
    assert world.generation.leavers
    world.leave()

    world.commit(checkpoint=2)
    world.warm_up()

    assert world.shape == (4, 1)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["Widen", "Release", "Hold"]),
    st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=6),
)
def test_the_layout_follows_from_the_boundary_and_not_from_the_way_to_it(on_pack: str, boundaries: list[int]) -> None:
    wandering, straight = packed(on_pack), packed(on_pack)
    for boundary in boundaries:
        freeze(wandering, boundary)
    freeze(straight, boundaries[-1])
    assert wandering.shape == straight.shape
    assert len(wandering.workers) == len(straight.workers)
