"""The operator's own failures against a real API server: two at once, a lost lease, a server that is away."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipetransformer_operator.kube.api import MERGE_PATCH, Api
from pipetransformer_operator.kube.lease import NAME

from .conftest import SYSTEM, FakeKubelet, Namespace, Operator, until
from .test_operator import packing_job

pytestmark = pytest.mark.timeout(180)
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{NAME}"


@pytest.fixture
async def second(operator: Operator, kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Operator]:
    """Another operator, started while the first runs."""
    running = Operator(kubeconfig, tmp_path / "second.log", identity="second")
    await running.start()
    yield running
    await running.kill()
    print((tmp_path / "second.log").read_text())


async def ready(operator: Operator) -> None:
    async def answers() -> bool:
        return await operator.asked("/readyz") == 200

    await until("the operator is ready", answers)


async def test_the_second_operator_waits_and_takes_over_where_the_first_was_killed(
    namespace: Namespace, operator: Operator, second: Operator, kubelet: FakeKubelet
) -> None:
    await ready(operator)
    await namespace.apply(packing_job())
    assert await namespace.layout(1) == (4, 1)
    assert await second.asked("/readyz") == 503
    assert await second.asked("/healthz") == 200
    pod = (await namespace.pods())["digits-w0"]
    authority = await namespace.api.get(f"{namespace.core}/configmaps/pipetransformer-channel-ca")
    token = await kubelet.token(pod)
    job = f"{namespace.name}/digits"
    assert await operator.generation(authority["data"]["ca.crt"], token, job) == 200
    assert await second.generation(authority["data"]["ca.crt"], token, job) == 503
    await operator.kill()
    await ready(second)

    async def served() -> bool:
        return await second.generation(authority["data"]["ca.crt"], token, job) == 200

    await until("the second operator serves the job", served)


async def test_an_operator_that_lost_its_lease_exits_and_one_that_is_told_to_stop_gives_it_back(
    api: Api, operator: Operator
) -> None:
    await ready(operator)
    await api.request("PATCH", LEASE, {"spec": {"holderIdentity": "somebody"}}, content_type=MERGE_PATCH)
    assert await operator.exit_code() == 1
    await operator.start()
    await ready(operator)  # somebody never renews
    await operator.signal(signal.SIGTERM)
    assert await operator.exit_code() == 0
    assert (await api.get(LEASE))["spec"]["holderIdentity"] == ""
