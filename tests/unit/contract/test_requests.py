"""What clients of the API server share."""

import pytest

from pipetransformer_contract.api.requests import failure_message, jobs_path


def test_jobs_have_one_path_in_a_namespace_and_one_in_all() -> None:
    group = "/apis/training.pipetransformer.io/v1alpha1"
    assert jobs_path("default") == f"{group}/namespaces/default/pipetrainingjobs"
    assert jobs_path(None) == f"{group}/pipetrainingjobs"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b"\xff"])
def test_an_answer_without_an_explanation_has_an_empty_message(body: bytes) -> None:
    assert failure_message(body) == ""


def test_the_message_of_a_status_explains_the_failure() -> None:
    assert failure_message(b'{"kind": "Status", "message": "no right"}') == "no right"
