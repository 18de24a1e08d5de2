"""The operator as a program that ends, as if killed, before or after one of its writes.

The lease is renewed by the clock and a token's review changes nothing; neither counts.
"""

import os
from enum import StrEnum
from typing import Any

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.__main__ import main
from pipetransformer_operator.kube.client.api import Api

KILLED = 137


class Side(StrEnum):
    """Of the write."""

    BEFORE = "before"
    AFTER = "after"


def operate(write: int, side: Side) -> int:
    """Runs the operator; the `write`-th write, from 1, kills it."""
    request = Api.request
    writes = 0

    async def counted(self: Api, method: str, path: str, *arguments: Any, **options: Any) -> Object:
        nonlocal writes
        if method == "GET" or "/leases" in path or path.endswith("/tokenreviews"):
            return await request(self, method, path, *arguments, **options)
        writes += 1
        mine = writes == write
        if mine and side is Side.BEFORE:
            _die(method, path, side)
        try:
            return await request(self, method, path, *arguments, **options)
        finally:
            if mine:
                _die(method, path, side)

    Api.request = counted  # type: ignore[method-assign]
    return main()


def _die(method: str, path: str, side: Side) -> None:
    print(f"killed {side} {method} {path}", flush=True)
    os._exit(KILLED)
