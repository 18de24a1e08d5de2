"""The operator is killed before and after each of its writes: whatever it left behind, the next one finishes.

Each run is a whole job: workers, a layout, a freeze or an edit, the next layout, the end. By default a few writes are
drawn; the seed is printed, and PIPETRANSFORMER_SEED repeats it.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipetransformer_operator.__main__ import main
from pipetransformer_operator.kube.client.api import Api
from tests.testkit.forked import Forked
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.mortal_operator import KILLED, Side, operate
from tests.testkit.operator.namespace import Namespace, new_namespace
from tests.testkit.operator.operating import Operator

RUN_SECONDS = 90
#: Each run has at least so many writes.
FEWEST_WRITES = 16
Scenario = Callable[[Namespace], Awaitable[None]]


def job() -> JobBuilder:
    freeze = {"policy": "Explicit", "boundaries": [{"step": 10, "boundary": 8}]}
    trained = make_job().drop("training.epochs").set("training.steps", 20).set("freeze", freeze)
    return trained.set("elasticPolicy.claimFrom", "Autoscaler")  # there are no nodes here


async def widen(namespace: Namespace) -> None:
    await namespace.apply(job().stages(4).workers(4))
    assert await namespace.layout(1) == (4, 1)
    namespace.advance(15)
    assert await namespace.layout(2) == (2, 2)
    await finish(namespace, workers=4, released=0)


async def release(namespace: Namespace) -> None:
    await namespace.apply(job().stages(4).workers(4).release())
    assert await namespace.layout(1) == (4, 1)
    namespace.advance(15)
    assert await namespace.layout(2) == (2, 1)
    await finish(namespace, workers=4, released=2)


async def claim(namespace: Namespace) -> None:
    await namespace.apply(job().stages(1).workers(1, most=1).set("elasticPolicy.maxPipelines", 2))
    assert await namespace.layout(1) == (1, 1)
    await namespace.patch("digits", {"elasticPolicy": {"maxWorkers": 2}})
    assert await namespace.layout(2) == (1, 2)
    await finish(namespace, workers=2, released=0)


async def finish(namespace: Namespace, *, workers: int, released: int) -> None:
    """Lets the job end; nothing was done twice and nothing was left."""
    namespace.advance(20)
    status = await namespace.state("Complete")
    assert status["layoutGeneration"] == 2
    assert status["nextWorkerId"] == workers, "a worker was created that nobody needed"
    assert status["gpus"]["released"] == released
    assert status.get("failures", 0) == 0
    assert status.get("resizeFailures", 0) == 0
    pods = await namespace.pods()
    assert set(pods) <= {f"digits-w{number}" for number in range(workers)}
    assert {pod["metadata"]["ownerReferences"][0]["name"] for pod in pods.values()} <= {"digits"}


@asynccontextmanager
async def mortal(operator: Operator, write: int, side: Side) -> AsyncIterator[Callable[[], bool]]:
    """An operator that is killed at that write, and then runs on; yields whether it was killed."""
    killed = False

    async def live() -> None:
        nonlocal killed
        process = Forked(operate, operator.environment, operator.log, write, side)
        try:
            code = await process.wait()
            assert code == KILLED, f"the operator ended by itself: {code}"
            killed = True
            process = Forked(main, operator.environment, operator.log)
            code = await process.wait()
            raise AssertionError(f"the next operator ended by itself: {code}")
        finally:
            process.kill()
            await process.wait()

    life = asyncio.create_task(live())
    try:
        yield lambda: killed
    finally:
        life.cancel()
        await asyncio.wait({life})
        if not life.cancelled() and life.exception():
            raise life.exception() or AssertionError


async def survives(api: Api, kubeconfig: Path, folder: Path, scenario: Scenario, write: int, side: Side) -> bool:
    """Runs the scenario once; whether its operator was killed."""
    namespace = await new_namespace(api, folder / "output")
    kubelet = FakeKubelet(namespace, folder / "pods")
    running = asyncio.create_task(kubelet.run())
    log = folder.with_suffix(".log")
    try:
        operator = Operator(kubeconfig, log, namespace=namespace.name)  # no other job's writes count
        async with mortal(operator, write, side) as killed, asyncio.timeout(RUN_SECONDS):
            await scenario(namespace)
        return killed()
    except BaseException:
        print(f"{scenario.__name__}, {side} write {write}:\n{log.read_text()}")
        raise
    finally:
        running.cancel()
        await asyncio.wait({running})
        await kubelet.stop()
        await namespace.clear()


@pytest.mark.timeout(4 * RUN_SECONDS)
async def test_a_killed_operator_is_succeeded_by_one_that_finishes(api: Api, kubeconfig: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("PIPETRANSFORMER_SEED") or random.randrange(2**31))
    print(f"PIPETRANSFORMER_SEED={seed}")
    draw = random.Random(seed)
    for scenario in (widen, release, claim):
        write, side = draw.randint(1, FEWEST_WRITES), draw.choice(list(Side))
        folder = tmp_path / scenario.__name__
        assert await survives(api, kubeconfig, folder, scenario, write, side), (
            f"no write {write} in {scenario.__name__}"
        )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", [widen, release, claim], ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("side", list(Side))
async def test_there_is_no_write_at_which_an_operator_may_not_be_killed(
    api: Api, kubeconfig: Path, tmp_path: Path, scenario: Scenario, side: Side
) -> None:
    write = 1
    while await survives(api, kubeconfig, tmp_path / f"run-{write}", scenario, write, side):
        write += 1
    assert write > FEWEST_WRITES
