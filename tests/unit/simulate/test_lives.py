"""Lives in simulated time: no rule is broken, the same seed gives the same trace, and a failing one shrinks."""

import gc
import json
from random import Random

import pytest

from tests.mutants.entries import ROOT, Mutant
from tests.simulate.__main__ import live_some, same_trace
from tests.simulate.api_server import ApiServer
from tests.simulate.bugs import all_bugs
from tests.simulate.draw import draw
from tests.simulate.life import live
from tests.simulate.loop import SeededLoop
from tests.simulate.scenario import Fault, JobPlan, Scenario
from tests.simulate.shrink import as_test, shrink

pytestmark = pytest.mark.timeout(120)


def test_some_lives_break_no_rule() -> None:
    assert live_some(range(20)) == []


def test_the_same_seeds_give_the_same_traces_in_two_processes() -> None:
    assert same_trace(100)


def test_another_seed_gives_another_trace() -> None:
    assert live(Scenario(1)).digest != live(Scenario(2)).digest
    gc.collect()


def test_a_job_freezes_releases_its_pods_and_finishes() -> None:
    job = JobPlan("a", stages=4, workers=4, most=4, on_pack="Release", steps=15, freezes=((3, 11),))

    result = live(Scenario(3, (job,), nodes=(4,)))

    deleted = [line for line in result.lines if " DELETE /api/v1/namespaces/default/pods/" in line]
    assert result.violations == [] and len(deleted) == 3


def test_the_events_of_a_watch_arrive_in_order() -> None:
    loop = SeededLoop(Random(1))
    server = ApiServer(lambda: 0.001, lambda: "now")

    async def watch() -> list[str]:
        stream = server.watch("/api/v1/nodes?resourceVersion=100", "client")
        for number in range(30):
            server.create(("api/v1", "nodes", "", f"node-{number}"), {"metadata": {}})
        chunks = stream.iter_any(60.0)
        return [json.loads(await anext(chunks))["object"]["metadata"]["name"] for _ in range(30)]

    assert loop.run_until_complete(watch()) == [f"node-{number}" for number in range(30)]


def test_a_life_shrinks_to_what_breaks_the_rule() -> None:
    culprit = Fault("hang", 5.0)
    scenario = Scenario(1, (JobPlan("a"), JobPlan("b")), (Fault("crash", 2.0), culprit, Fault("evict", 9.0)))

    small = shrink(scenario, lambda life: {"copies"} if culprit in life.faults and life.jobs else set())

    assert (len(small.jobs), small.faults) == (1, (culprit,))
    assert repr(small) in as_test(small)


@pytest.mark.parametrize(
    ("seed", "found"),
    [
        (291, "the death of a node used up the budget"),
        (5090, "a worker was preempted, and the operator deleted the pod just after the scheduler"),
        (50569, "a worker that ended with the training was evicted, and created again"),
        (51171, "pods that were on their way to the server when their job was deleted stayed"),
        (51557, "a worker that had left was drained while no worker was heard, and created again"),
        (52613, "a spare was evicted while the operator waited for an answer, and created again"),
        (102115, "a leaver was evicted before its release, and the oracle did not count the release"),
        (930611, "what workers trust was deleted twice, and the oracle looked just after the second time"),
        (1201003, "a worker was preempted while the API server was away, and only its silence was seen"),
    ],
)
def test_a_life_that_found_a_bug_breaks_no_rule(seed: int, found: str) -> None:
    assert live(draw(seed)).violations == [], found


@pytest.mark.parametrize("bug", all_bugs(), ids=lambda bug: bug.breaks)
def test_each_seeded_bug_changes_code_that_is_there(bug: Mutant) -> None:
    source = (ROOT / bug.file).read_text()

    assert bug.apply(source) != source
