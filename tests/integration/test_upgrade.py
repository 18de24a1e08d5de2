"""An operator beside a CRD of another version, as during an upgrade or after going back."""

import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml

from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.kube.client.api import Api
from tests.testkit.operator.crd import CRD
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import Operator

pytestmark = pytest.mark.timeout(180)
DEFINITION: Object = yaml.safe_load(CRD.read_text())
PATH = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{DEFINITION['metadata']['name']}"


def properties(versions: list[Object], part: str) -> Any:
    return versions[0]["schema"]["openAPIV3Schema"]["properties"][part]["properties"]


async def define(api: Api, versions: list[Object]) -> None:
    await api.request("PATCH", PATH, {"spec": {"versions": versions}}, content_type=MERGE_PATCH)


@pytest.fixture
async def versions(api: Api) -> AsyncIterator[list[Object]]:
    """The CRD's versions, to be changed; afterwards they are as they were."""
    own: list[Object] = DEFINITION["spec"]["versions"]
    yield copy.deepcopy(own)
    await define(api, own)


async def test_an_operator_looks_after_jobs_to_which_a_newer_crd_has_added_defaults(
    api: Api, namespace: Namespace, operator: Operator, kubelet: FakeKubelet, versions: list[Object]
) -> None:
    await namespace.apply(packing_job())
    assert await namespace.layout(1) == (4, 1)
    properties(versions, "spec")["runPolicy"]["properties"]["novelty"] = {"type": "string", "default": "Always"}
    properties(versions, "spec")["runPolicy"]["default"]["novelty"] = "Always"
    await define(api, versions)

    async def defaulted() -> bool:
        job = await api.get(f"{namespace.jobs}/digits")
        return bool(job["spec"]["runPolicy"].get("novelty") == "Always")

    await until("the new default is seen", defaulted)
    namespace.advance(15)
    assert await namespace.layout(2) == (2, 2)
    namespace.advance(30)
    await namespace.state("Complete")


async def test_an_operator_does_not_begin_under_a_crd_that_cannot_hold_what_it_remembers(
    api: Api, namespace: Namespace, operator: Operator, kubelet: FakeKubelet, versions: list[Object]
) -> None:
    await operator.kill()
    whole = copy.deepcopy(versions)
    del properties(versions, "status")["claimedIds"]
    await define(api, versions)

    async def published(known: bool) -> bool:
        group = await api.get("/openapi/v3/apis/training.pipetransformer.io/v1alpha1")
        schema = next(schema for name, schema in group["components"]["schemas"].items() if name.endswith("TrainingJob"))
        return ("claimedIds" in schema["properties"]["status"]["properties"]) == known

    await until("the older CRD is served", lambda: published(False))
    await operator.start()
    await namespace.apply(packing_job())

    async def said() -> bool:
        return "older than this operator and lacks status.claimedIds" in operator.log.read_text()

    await until("the operator says what is missing", said)
    assert await namespace.status() == {}
    await define(api, whole)
    await until("the CRD is whole again", lambda: published(True))
    assert await namespace.layout(1) == (4, 1)
