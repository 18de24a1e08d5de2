"""A real API server, the real operator as a process, and scripted trainers where a cluster would have nodes.

Whole local runs need none of these: there the command line, the operator's parts and real trainers work together.

The control plane comes from `tools.devcluster`, beside any other that runs.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from pipetransformer_contract.api import GROUP, PLURAL, VERSION
from pipetransformer_contract.api.requests import APPLY_PATCH
from pipetransformer_operator.controller.ports import Conflict
from pipetransformer_operator.kube.client.api import Api, NotFound
from tests.testkit.operator.crd import CRD
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.namespace import Namespace, new_namespace, until
from tests.testkit.operator.operating import PROCESS, SYSTEM, Operator, Wire
from tools.devcluster import cluster
from tools.devcluster.layout import Layout


@pytest.fixture(scope="session")
def kubeconfig() -> Iterator[Path]:
    """The kubeconfig of an API server with our CRD, one for each process of pytest-xdist.

    Another PIPETRANSFORMER_TEST_PORT, the first of 20 a process, is another API server. It is an empty one, whatever
    a run left that was killed; PIPETRANSFORMER_KEEP_CLUSTER=1 takes what is there and leaves it. Another run that uses
    the API server now is an error.
    """
    port = int(os.environ.get("PIPETRANSFORMER_TEST_PORT", "17443")) + 20 * PROCESS
    layout = Layout(name=f"integration-{port}", port=port)
    keep = os.environ.get("PIPETRANSFORMER_KEEP_CLUSTER") == "1"
    with cluster.held(layout):
        if not keep:
            cluster.down(layout)
        try:
            cluster.up_control_plane(layout, controllers=False)
            yield layout.kubeconfig
        finally:
            if not keep:
                cluster.down(layout)


@pytest.fixture
async def api(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """A client with all rights."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    client = await Api.connect()
    definition = yaml.safe_load(CRD.read_text())
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition['metadata']['name']}"
    await client.request("PATCH", path, definition, content_type=APPLY_PATCH)
    with contextlib.suppress(Conflict):
        await client.request("POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})

    async def served() -> bool:
        with contextlib.suppress(NotFound):
            await client.get(f"/apis/{GROUP}/{VERSION}/{PLURAL}")
            return True
        return False

    await until("the CRD is served", served)
    yield client
    await client.close()


@pytest.fixture
async def namespace(api: Api, tmp_path: Path) -> AsyncIterator[Namespace]:
    own = await new_namespace(api, tmp_path / "output")
    yield own
    await own.clear()


@pytest.fixture
async def node(namespace: Namespace) -> str:
    """A node of the test's own, by name."""
    name = f"node-{namespace.name}"
    await namespace.api.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
    return name


@pytest.fixture
async def operator(api: Api, kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Operator]:
    running = Operator(kubeconfig, tmp_path / "operator.log")
    await running.start()
    yield running
    await running.kill()
    print((tmp_path / "operator.log").read_text())


@pytest.fixture
async def wire(kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Wire]:
    way = Wire(kubeconfig, tmp_path)
    await way.mend()
    yield way
    await way.cut()


@pytest.fixture
async def kubelet(namespace: Namespace, tmp_path: Path) -> AsyncIterator[FakeKubelet]:
    fake = FakeKubelet(namespace, tmp_path / "pods")
    running = asyncio.create_task(fake.run())
    yield fake
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await fake.stop()
