"""The operator against a real API server, with scripted trainers that authenticate by real tokens."""

import signal
from typing import Any

import pytest

from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import Operator

pytestmark = pytest.mark.timeout(180)


async def test_a_job_widens_as_it_freezes_on_the_same_pods_and_completes(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job())
    assert await namespace.layout(1) == (4, 1)
    before = {pod["metadata"]["uid"] for pod in (await namespace.pods()).values()}
    namespace.advance(15)
    assert await namespace.layout(2) == (2, 2)
    namespace.advance(25)
    assert await namespace.layout(3) == (1, 4)
    assert {pod["metadata"]["uid"] for pod in (await namespace.pods()).values()} == before
    namespace.advance(30)
    status = await namespace.state("Complete")
    assert status.get("failures", 0) == 0
    await namespace.told("GenerationPublished", "LayersFrozen", "TrainingSucceeded")


async def test_a_releasing_job_gives_its_pods_back_while_it_trains(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job().release())
    assert await namespace.layout(1) == (4, 1)
    namespace.advance(15)
    assert await namespace.layout(2) == (2, 1)

    async def released() -> bool:
        return bool((await namespace.status())["gpus"] == {"held": 2, "released": 2, "saved": 2})

    await until("two workers are gone", released)
    assert len(await namespace.pods()) == 2
    figures = (
        f'pipetransformer_job_gpus_released_total{{job_name="digits",namespace="{namespace.name}"}} 2.0',
        'pipetransformer_generations_total{reason="Release"} 1.0',
        'pipetransformer_resizes_total{direction="Shrink",result="Committed"} 1.0',
    )

    async def counted() -> bool:
        text = await operator.figures()
        return all(figure in text for figure in figures)

    await until("the figures show the release", counted)
    namespace.advance(30)
    assert (await namespace.state("Complete"))["gpus"]["released"] == 3


async def test_a_job_claims_workers_when_its_ceiling_rises(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job().stages(1).workers(1, most=1).set("elasticPolicy.maxPipelines", 2))
    assert await namespace.layout(1) == (1, 1)
    await namespace.patch("digits", {"elasticPolicy": {"maxWorkers": 2}})
    assert await namespace.layout(2) == (1, 2)
    namespace.advance(30)
    await namespace.state("Complete")


async def test_a_killed_worker_is_replaced_by_a_new_pod(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job().stages(2).workers(4, least=2))
    assert await namespace.layout(1) == (2, 2)
    victim = (await namespace.pods())["digits-w3"]["metadata"]["uid"]
    kubelet.processes[victim].send_signal(signal.SIGKILL)

    async def regrown() -> bool:
        generation = (await namespace.status())["generation"]
        names = {member["name"] for member in generation["members"]}
        return (
            generation["confirmedGeneration"] == generation["layoutGeneration"]
            and len(names) == 4
            and "digits-w4" in names
        )

    await until("a new worker took the place", regrown)
    assert (await namespace.status())["failures"] == 1
    refused = [line for line in (await operator.figures()).splitlines() if 'refusals_total{reason="Foreign' in line]
    assert not refused, "a worker that had just been created was taken for a stranger"
    namespace.advance(30)
    await namespace.state("Complete")


async def test_an_operator_that_is_killed_goes_on_where_it_was(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job())
    assert await namespace.layout(1) == (4, 1)
    before = {pod["metadata"]["uid"] for pod in (await namespace.pods()).values()}
    await operator.kill()
    namespace.advance(15)  # a freeze that nobody hears of yet
    await operator.start()
    assert await namespace.layout(2) == (2, 2)
    namespace.advance(30)
    status = await namespace.state("Complete")
    assert {pod["metadata"]["uid"] for pod in (await namespace.pods()).values()} == before
    assert status.get("failures", 0) == 0


async def test_a_foreign_pod_with_a_workers_name_shows_in_the_jobs_conditions(
    namespace: Namespace, operator: Operator
) -> None:
    container: dict[str, Any] = {"name": "main", "image": "x"}
    pod = {"metadata": {"name": "digits-w0"}, "spec": {"containers": [container]}}
    await namespace.api.request("POST", f"{namespace.core}/pods", pod)
    await namespace.apply(packing_job())

    async def conflict() -> bool:
        return "NameConflict" in {condition["reason"] for condition in (await namespace.status()).get("conditions", [])}

    await until("the conflict shows", conflict)


async def test_a_pod_template_that_the_cluster_refuses_is_said_and_can_be_mended(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    job = packing_job().stages(1).workers(1).checkpoint()
    right = job.manifest()["spec"]["podTemplate"]
    wrong = {**right, "spec": {**right["spec"], "restartPolicee": "Never"}}
    await namespace.apply(job.set("podTemplate", wrong))

    async def said() -> str:
        conditions = (await namespace.status()).get("conditions", [])
        return next((c["message"] for c in conditions if c["reason"] == "CreationRefused"), "")

    message = await until("the refusal shows", said)
    assert "spec.podTemplate" in message
    assert 'unknown field "spec.restartPolicee"' in message
    assert await namespace.pods() == {}
    await namespace.told("CreationRefused")
    await namespace.patch("digits", {"suspend": True})
    await namespace.patch("digits", {"podTemplate": {"spec": {"restartPolicee": None}}, "suspend": False})
    assert await namespace.layout(1) == (1, 1)
