"""The CRD in the repository is what the types say, and says what the API server can use."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipetransformer_contract.api.generate import PATHS, custom_resource_definition, render
from pipetransformer_contract.api.schema import missing_fields, root_schema
from tests.testkit import ROOT

pytestmark = pytest.mark.timeout(60)


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    children = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for child in children:
        if child:
            yield from nodes(child)


def version() -> dict[str, Any]:
    document: dict[str, Any] = custom_resource_definition()["spec"]["versions"][0]
    return document


@pytest.mark.parametrize("path", PATHS)
def test_the_file_is_what_make_generate_writes(path: Path) -> None:
    assert (ROOT / path).read_text() == render(), "run `make generate`"


def test_the_schema_is_structural() -> None:
    for node in nodes(version()["schema"]["openAPIV3Schema"]):
        assert not {"$ref", "anyOf", "allOf", "$defs", "title", "exclusiveMinimum"} & set(node) or (
            node.get("exclusiveMinimum") is True
        )
        assert "type" in node or node.get("x-kubernetes-int-or-string")


def test_every_list_and_every_map_is_bounded_where_users_write() -> None:
    spec = version()["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for node in nodes(spec):
        if node.get("type") == "array":
            assert "maxItems" in node
        if "additionalProperties" in node:
            assert "maxProperties" in node


def test_only_entries_of_the_statuss_lists_are_opaque_and_conditions_are_not() -> None:
    status = version()["schema"]["openAPIV3Schema"]["properties"]["status"]
    fields = status["properties"]
    assert fields["conditions"]["x-kubernetes-list-map-keys"] == ["type"]
    assert "lastTransitionTime" in fields["conditions"]["items"]["properties"]
    assert "leader" in fields["generation"]["properties"]
    members = fields["generation"]["properties"]["members"]
    assert members["items"] == {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    assert not [key for key in members if key.startswith("x-kubernetes-list")], "keys need a schema"
    assert missing_fields(root_schema()["properties"]["status"], status) == []


def test_a_crd_that_would_drop_a_field_of_a_list_is_noticed() -> None:
    status = root_schema()["properties"]["status"]
    older = copy.deepcopy(status)
    del older["properties"]["generation"]["properties"]["members"]["items"]["properties"]["node"]
    assert missing_fields(status, older, "status") == ["status.generation.members[].node"]


def test_descriptions_name_fields_as_they_are_written() -> None:
    described = [node.get("description", "") for node in nodes(version()["schema"]["openAPIV3Schema"])]
    assert sum("`confirmedGeneration`" in text for text in described) == 1
    in_python = {name for text in described for name in re.findall(r"`([a-z]+_\w+)`", text)}
    assert in_python <= {"model_type"}  # of transformers


def test_the_scale_subresource_is_in_pods() -> None:
    scale = version()["subresources"]["scale"]
    assert scale["specReplicasPath"] == ".spec.elasticPolicy.maxWorkers"
    assert scale["statusReplicasPath"] == ".status.workers"


def test_columns_are_those_that_a_researcher_watches() -> None:
    columns = [column["name"] for column in version()["additionalPrinterColumns"]]
    assert columns == ["State", "Stages", "Pipelines", "GPUs", "Frozen", "Age"]
    assert yaml.safe_load(render())["spec"]["names"]["shortNames"] == ["ptj"]
