"""Budgets that are given up: each by itself, and in one line what keeps one."""

import asyncio
from typing import Any

import pytest

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.__main__ import release
from pipetransformer_operator.controller.ports import Refused, Unavailable
from pipetransformer_operator.kube.client.api import Api
from pipetransformer_operator.kube.workers.protection import release_budgets
from tests.testkit.operator.scripted_api import Listed, ScriptedApi


class Budgets(ScriptedApi):
    """Budgets of jobs. The API server refuses to delete the one that is called `kept`."""

    def __init__(self, *names: str) -> None:
        budgets: list[Object] = [{"metadata": {"namespace": "team", "name": name, "uid": name}} for name in names]
        super().__init__(Listed(budgets), parts=2)
        self.deleted: list[str] = []

    async def request(self, method: str, path: str, *_: Any, **__: Any) -> Object:
        assert method == "DELETE"
        if path.endswith("/kept"):
            raise Refused("DELETE: 403 a policy forbids it")
        await asyncio.sleep(0)  # on its way
        self.deleted.append(path.rpartition("/")[2])
        return {}


async def test_a_budget_that_cannot_be_deleted_keeps_no_other() -> None:
    api = Budgets("kept", "one", "two")
    with pytest.raises(Refused, match="403 a policy forbids it"):
        await release_budgets(api, [])
    assert api.deleted == ["one", "two"]


def test_what_keeps_the_budgets_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def connect() -> Api:
        raise Unavailable("GET /apis/policy/v1/poddisruptionbudgets: no answer")

    monkeypatch.setattr(Api, "connect", connect)
    assert release() == 1
    assert capsys.readouterr().err == "error: GET /apis/policy/v1/poddisruptionbudgets: no answer\n"
