"""The API server refuses by the CRD what `validate_manifest` refuses: each rule, each bound, each forbidden change."""

import pytest

from pipetransformer_contract.api.field_error import FieldError
from pipetransformer_contract.api.requests import Object
from pipetransformer_contract.api.validate import validate_manifest, validate_update
from pipetransformer_operator.controller.ports import Refused
from tests.testkit.operator.bounds import violations
from tests.testkit.operator.manifests import CHANGED, REFUSED, VALID
from tests.testkit.operator.namespace import Namespace

pytestmark = pytest.mark.timeout(180)


async def refusal(namespace: Namespace, manifest: Object) -> str:
    """What the API server says against the manifest; empty when it takes it."""
    manifest["metadata"]["namespace"] = namespace.name
    try:
        await namespace.api.request("POST", namespace.jobs, manifest, strict=True)
    except Refused as error:
        return str(error)
    return ""


def missing(errors: list[FieldError], text: str) -> list[str]:
    """Errors that the text does not tell. Labels are seen by the operator alone, an unknown field by its name."""
    told = [error for error in errors if not error.path.startswith("metadata.labels")]
    return [str(error) for error in told if error.path.removeprefix("metadata.") not in text]


async def test_valid_jobs_are_taken(namespace: Namespace) -> None:
    for number, job in enumerate(VALID):
        manifest = job.manifest()
        manifest["metadata"]["name"] = f"job-{number}"
        assert await refusal(namespace, manifest) == ""


async def test_each_rule_is_kept_by_the_server(namespace: Namespace) -> None:
    for job, path in REFUSED:
        errors = validate_manifest(job.manifest())
        if not path.startswith("metadata.labels"):
            text = await refusal(namespace, job.manifest())
            assert text
            assert missing(errors, text) == [], text


async def test_each_bound_is_kept_by_the_server(namespace: Namespace) -> None:
    for violation in violations():
        text = await refusal(namespace, violation.manifest)
        assert violation.path in text, f"{violation}: {text or 'taken'}"


async def test_each_forbidden_change_is_refused_by_the_server(namespace: Namespace) -> None:
    created: set[str] = set()
    for old, job, _ in CHANGED:
        text, name = "", old.manifest()["metadata"]["name"]
        if name not in created:
            assert await refusal(namespace, old.manifest()) == ""
            created.add(name)
        try:
            await namespace.patch(name, job.manifest()["spec"])
        except Refused as error:
            text = str(error)
        messages = [error.message for error in validate_update(old.manifest(), job.manifest())]
        assert [message for message in messages if message not in text] == [], text or "taken"
