"""Jobs that ask a queue for their workers."""

from pipetransformer_contract.api.labels import QUEUE_LABEL
from pipetransformer_contract.api.status import Condition, ConditionType
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.fake_queue import QUEUE, FakeQueue
from tests.testkit.operator.world import World


def queued(builder: JobBuilder, size: int = 8192) -> tuple[World, FakeQueue]:
    """A world of one queue with quota for so many workers; pods take their time to end."""
    world = World(builder.label(QUEUE_LABEL, QUEUE).checkpoint())
    world.queue = FakeQueue(size)
    world.lingering = True
    return world, world.queue


def releasing(size: int = 8192) -> tuple[World, FakeQueue]:
    return queued(make_job().stages(4).workers(4).release(), size)


def claiming(size: int = 8192) -> tuple[World, FakeQueue]:
    return queued(make_job().stages(2).workers(2, most=4), size)


def claimed() -> tuple[World, FakeQueue]:
    """Two pipelines of two, the second on quota of its own."""
    world, queue = claiming()
    world.start()
    world.warm_up()
    world.commit(checkpoint=0)
    assert world.shape == (2, 2)
    return world, queue


def admitted(world: World) -> Condition:
    condition = world.status.condition(ConditionType.ADMITTED)
    assert condition is not None
    return condition


def requests(world: World) -> list[tuple[str, int, list[int]]]:
    """(name, quota, workers on it) of each request."""
    return [(r.name, r.workers - r.returned, r.worker_ids) for r in world.status.quota_requests]


def members(world: World) -> set[str]:
    return {member.name for member in world.generation.members}
