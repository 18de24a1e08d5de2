"""Resizes that the cluster decides: a claim without nodes, and a worker that is preempted."""

from typing import Any

import pytest

from pipetransformer_contract.api.requests import MERGE_PATCH
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import Operator

pytestmark = pytest.mark.timeout(180)


async def test_a_claim_that_gets_no_node_is_withdrawn_and_says_why(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    kubelet.room = 1
    await namespace.apply(packing_job().stages(1).workers(1, most=2))
    assert await namespace.layout(1) == (1, 1)

    async def resizing(*, snoozed: bool) -> dict[str, Any] | None:
        """What the job says of its resize, once that names the node that is missing."""
        status = await namespace.status()
        said = next((one for one in status.get("conditions", []) if one["type"] == "Resizing"), None)
        missed = said is not None and "digits-w1: Unschedulable: no node is left" in said["message"]
        return said if missed and ("nextResizeTime" in status) is snoozed else None

    await until("the claim waits for a node", lambda: resizing(snoozed=False))
    await namespace.patch("digits", {"runPolicy": {"claimTimeoutSeconds": 2}})
    said = await until("the claim is withdrawn", lambda: resizing(snoozed=True))
    assert (said["status"], said["reason"]) == ("False", "Unschedulable")
    await namespace.told("Unschedulable")
    namespace.advance(30)
    status = await namespace.state("Complete")
    assert status.get("failures", 0) == 0
    assert status["generation"]["layoutGeneration"] == 1


async def test_a_preempted_worker_makes_the_job_narrower_and_is_no_failure(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job().stages(1).workers(2).set("elasticPolicy.maxPipelines", 2))
    assert await namespace.layout(1) == (1, 2)
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    path = f"{namespace.core}/pods/digits-w1/status"
    await namespace.api.request("PATCH", path, {"status": {"conditions": [target]}}, content_type=MERGE_PATCH)
    assert await namespace.layout(2) == (1, 1)
    assert await namespace.layout(3) == (1, 2), "its starting size is taken back"
    status = await namespace.status()
    assert status.get("failures", 0) == 0
    assert {member["name"] for member in status["generation"]["members"]} == {"digits-w0", "digits-w2"}
    await namespace.told("WorkerDrained")
    namespace.advance(30)
    await namespace.state("Complete")
