"""The command that gives budgets up."""

import pytest

from pipetransformer_operator.__main__ import release
from pipetransformer_operator.controller.ports import Unavailable
from pipetransformer_operator.kube.client.api import Api


def test_what_keeps_the_budgets_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def connect() -> Api:
        raise Unavailable("GET /apis/policy/v1/poddisruptionbudgets: no answer")

    monkeypatch.setattr(Api, "connect", connect)
    assert release() == 1
    assert capsys.readouterr().err == "error: GET /apis/policy/v1/poddisruptionbudgets: no answer\n"
