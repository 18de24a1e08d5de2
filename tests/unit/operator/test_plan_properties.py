"""Rules that hold whatever happens, in whatever order: random events, each followed by turns until all is done."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer_contract.messages import ResizeReason
from pipetransformer_operator.api.status import ResizePhase
from tests.builders import JobBuilder, make_job
from tests.unit.operator.world import LAYERS, World

pytestmark = pytest.mark.timeout(60)

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["warm", "commit", "freeze", "thaw", "checkpoint", "leave", "kill", "crash", "wait", "scale"]),
        st.integers(0, 7),
    ),
    max_size=25,
)


def jobs() -> st.SearchStrategy[JobBuilder]:
    def build(stages: int, pipelines: int, spare: int, on_pack: str) -> JobBuilder:
        workers = stages * pipelines
        job = make_job().stages(stages).workers(workers, most=workers + spare).checkpoint().on_pack(on_pack)
        return job.set("runPolicy.backoffLimit", 6)

    policies = st.sampled_from(["Widen", "Release", "Hold"])
    return st.builds(build, st.sampled_from([1, 2, 4]), st.integers(1, 2), st.integers(0, 4), policies)


def happen(world: World, event: str, number: int) -> None:
    """One event; those that cannot happen now do nothing."""
    names = sorted(world.workers)
    plan = world.status.plan
    trains = plan is not None and all(member.name in world.workers for member in plan.members)
    boundary = world.report.boundary if world.report else 0
    if event == "warm":
        world.warm_up()
    elif event == "kill" and names:
        world.kill(names[number % len(names)])
    elif event == "crash" and names:
        world.end(names[number % len(names)], exit_code=1)
    elif event == "wait":
        world.wait(200 * number)
    elif event == "scale":
        world.builder.set("elasticPolicy.maxWorkers", world.spec.elastic_policy.workers + number)
    elif trains and event == "commit":
        world.commit()
    elif trains and event == "freeze":
        world.commit(boundary=min(LAYERS - 1, boundary + number))
    elif trains and event == "thaw":
        world.commit(boundary=max(0, boundary - number))
    elif trains and event == "checkpoint":
        world.commit(checkpoint=boundary)
    elif trains and plan is not None and plan.confirmed and event == "leave":
        world.leave()
    world.settle()


@settings(max_examples=60, deadline=None)
@given(jobs(), EVENTS)
def test_whatever_happens_sizes_are_legal_and_plans_converge(job: JobBuilder, events: list[tuple[str, int]]) -> None:
    world = World(job)
    for event, number in events:
        before = world.status
        deleted = len(world.deleted_alive)
        happen(world, event, number)
        check_plan(world, before_generation=before.layout_generation)
        given_back = set(world.deleted_alive[deleted:])
        if before.plan and world.status.plan and not world.status.finished:
            holders = {member.name for member in world.status.plan.members}
            assert not given_back & holders, "a member was deleted"


def check_plan(world: World, before_generation: int) -> None:
    """Rules 3, 5 and 8 on what is published."""
    status = world.status
    assert status.layout_generation >= before_generation
    if status.plan is None:
        return
    names = [member.name for member in status.plan.members]
    assert len(names) == len(set(names)) == status.plan.stages * status.plan.pipelines
    assert len(names) <= world.spec.elastic_policy.workers + 7
    assert status.plan.leader in names
    assert not set(names) & {member.name for member in status.plan.leavers}
    if status.resize is not None and status.resize.phase is ResizePhase.PREPARE and not status.leaving_ids:
        assert status.plan.confirmed or status.resize.reason is ResizeReason.FAILURE, "two resizes at a time"


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 4]), st.integers(0, LAYERS - 1), st.integers(0, LAYERS - 1))
def test_no_leaver_is_deleted_before_a_checkpoint_at_the_new_boundary(stages: int, boundary: int, durable: int) -> None:
    world = World(make_job().stages(stages).workers(2 * stages).release())
    world.start()
    world.commit(boundary=boundary)
    leavers = {member.name for member in world.plan.leavers}
    world.commit(checkpoint=durable)
    world.leave()
    assert bool(leavers & set(world.deleted)) == bool(leavers and durable >= boundary)


@settings(max_examples=30, deadline=None)
@given(jobs(), EVENTS)
def test_nothing_is_done_when_nothing_happened(job: JobBuilder, events: list[tuple[str, int]]) -> None:
    world = World(job)
    for event, number in events:
        happen(world, event, number)
    world.settle()
    before = world.status
    again = world.turn()
    assert (again.status, again.create, again.delete, again.events) == (before, (), (), ())
