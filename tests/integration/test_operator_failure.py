"""The operator's own failures against a real API server: two at once, a lost lease, a server that is away."""

import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pipetransformer_contract.api.requests import MERGE_PATCH
from pipetransformer_operator.__main__ import main
from pipetransformer_operator.kube.client.api import Api
from pipetransformer_operator.kube.client.lease import NAME
from pipetransformer_operator.settings import EVERY_CLUSTERS_NAMESPACE
from tests.testkit.forked import Forked
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import SYSTEM, Operator, Wire

pytestmark = pytest.mark.timeout(180)
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{EVERY_CLUSTERS_NAMESPACE}/leases/{NAME}"


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


async def test_of_two_releases_that_serve_all_namespaces_one_acts_and_the_other_says_whom_it_waits_for(
    namespace: Namespace, operator: Operator, kubeconfig: Path, kubelet: FakeKubelet, tmp_path: Path
) -> None:
    await ready(operator)
    log = tmp_path / "other.log"
    other = Operator(kubeconfig, log)
    other.environment["POD_NAMESPACE"] = namespace.name
    try:
        await other.start()

        async def says_so() -> bool:
            return f"{SYSTEM}/operator holds the lease {LEASE}: waiting" in log.read_text()

        await until("the other release waits", says_so)
        await namespace.apply(packing_job())
        assert await namespace.layout(1) == (4, 1)
        assert await other.asked("/readyz") == 503
        assert await other.figure("pipetransformer_leader") == 0
        await operator.signal(signal.SIGTERM)
        await ready(other)
    finally:
        await other.kill()


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


@pytest.fixture
async def cut_off(api: Api, wire: Wire, tmp_path: Path) -> AsyncIterator[Operator]:
    """An operator whose way to the API server can be cut."""
    running = Operator(wire.kubeconfig, tmp_path / "operator.log")
    await running.start()
    yield running
    await running.kill()
    print((tmp_path / "operator.log").read_text())


async def test_an_operator_that_starts_while_the_api_server_is_away_says_so_in_one_line(
    wire: Wire, tmp_path: Path
) -> None:
    await wire.cut()
    log = tmp_path / "operator.log"
    process = Forked(main, Operator(wire.kubeconfig, log).environment, log)
    assert await process.wait() == 1
    (line,) = log.read_text().splitlines()
    assert line.startswith(f"error: GET /api/v1/namespaces/{SYSTEM}/secrets/")


async def test_an_operator_outlives_an_outage_of_the_api_server_and_its_job_trains_through_it(
    namespace: Namespace, cut_off: Operator, wire: Wire, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job())
    assert await namespace.layout(1) == (4, 1)
    pod = (await namespace.pods())["digits-w0"]
    authority = await namespace.api.get(f"{namespace.core}/configmaps/pipetransformer-channel-ca")
    certificate, job = authority["data"]["ca.crt"], f"{namespace.name}/digits"
    known, unknown = await kubelet.token(pod), await kubelet.token(pod)
    assert await cut_off.generation(certificate, known, job) == 200

    await wire.cut()

    async def stopped_writing() -> bool:
        return await cut_off.figure("pipetransformer_leader") == 0

    await until("the operator stops writing", stopped_writing)
    namespace.advance(15)  # a freeze that it hears of and cannot write down
    assert await cut_off.generation(certificate, known, job) == 200
    assert await cut_off.generation(certificate, unknown, job) == 503
    assert await cut_off.asked("/healthz") == 200
    assert (await namespace.status())["layoutGeneration"] == 1

    await wire.mend()

    assert await namespace.layout(2) == (2, 2)
    namespace.advance(30)
    assert (await namespace.state("Complete")).get("failures", 0) == 0
    assert cut_off.running


async def test_a_worker_that_died_while_no_operator_was_there_is_replaced_by_the_next(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job().stages(2).workers(4, least=2))
    assert await namespace.layout(1) == (2, 2)
    pod = (await namespace.pods())["digits-w3"]
    await operator.kill()
    kubelet.processes[pod["metadata"]["uid"]].kill()

    async def failed() -> bool:
        return bool((await namespace.pods())["digits-w3"]["status"]["phase"] == "Failed")

    await until("the worker is dead", failed)
    await operator.start()
    assert await namespace.layout(2) == (2, 1)
    assert await namespace.layout(3) == (2, 2)
    namespace.advance(30)
    assert (await namespace.state("Complete"))["failures"] == 1


@pytest.mark.slow
async def test_a_watch_that_dies_without_a_word_is_opened_again(
    namespace: Namespace, cut_off: Operator, wire: Wire, kubelet: FakeKubelet
) -> None:
    await ready(cut_off)
    wire.stall()
    await namespace.apply(packing_job())

    async def seen() -> bool:
        return bool((await namespace.status()).get("generation"))

    await until("the job is seen", seen, timeout=120)  # the API server sends bookmarks each minute
    assert cut_off.running


async def test_a_job_that_is_nested_as_deep_as_the_server_takes_it_keeps_no_other_from_training(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(40_000)
    try:
        options: dict[str, Any] = {}
        for _ in range(9_900):
            options = {"a": options}
        await namespace.apply(packing_job("deep").set("model", {"name": "models:net", "options": options}))
        await namespace.apply(packing_job())
        assert await namespace.layout(1) == (4, 1)
        await operator.kill()
        await operator.start()
        namespace.advance(30)
        assert (await namespace.state("Complete")).get("failures", 0) == 0
        assert "nested more than 100 deep" in operator.log.read_text()
        assert await namespace.status("deep") == {}
        await namespace.api.request("DELETE", f"{namespace.jobs}/deep")
    finally:
        sys.setrecursionlimit(limit)
