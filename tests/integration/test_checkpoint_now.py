"""`checkpoint now` against a real API server, the real operator and real trainers."""

import asyncio
from pathlib import Path

import pytest

from pipetransformer.storage import latest
from pipetransformer_client import Client
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.fake_kubelet import FakeKubelet, real_trainer
from tests.testkit.operator.namespace import Namespace
from tests.testkit.operator.operating import Operator

pytestmark = pytest.mark.timeout(400)


def long_job() -> JobBuilder:
    """It trains for as long as it is looked at, on two workers."""
    return (
        make_job()
        .set("model", {"name": "vit", "numLayers": 4, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4})
        .set("training", {"steps": 1_000_000, "globalBatchSize": 100})
        .set("freeze", {"policy": "None"})
        .stages(2)
        .workers(2)
    )


async def test_a_checkpoint_that_is_asked_for_is_durable_and_also_through_the_death_of_a_worker(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, tmp_path: Path
) -> None:
    kubelet.program = real_trainer
    location = str(tmp_path / "checkpoints")
    await namespace.apply(long_job().checkpoint(location).set("checkpoint.everySteps", 1_000_000))
    assert await namespace.layout(1) == (2, 1)
    client = Client.connect(namespace=namespace.name)

    async def ask(token: str) -> int:
        assert await asyncio.to_thread(client.checkpoint_now, "digits", token) == token
        request = await asyncio.to_thread(client.wait_for_checkpoint, "digits", token, timeout=120)
        assert request.step is not None
        return request.step

    first = await ask("one")
    durable = latest(location)
    assert durable is not None and durable.step == first
    assert await ask("one") == first, "the same token asks once"

    asking = asyncio.create_task(ask("two"))
    for process in kubelet.processes.values():
        process.kill()
    second = await asking
    assert second > first
    await namespace.told("CheckpointMade")


async def test_a_job_without_a_checkpoint_answers_the_annotation_with_what_is_missing(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(make_job())
    annotations = {"training.pipetransformer.io/checkpoint-now": "one"}
    await namespace.api.request(
        "PATCH",
        f"{namespace.jobs}/digits",
        {"metadata": {"annotations": annotations}},
        content_type="application/merge-patch+json",
    )
    await namespace.told("CheckpointRefused")
    assert (await namespace.status())["checkpointRequest"]["message"].startswith("spec.checkpoint is missing")
