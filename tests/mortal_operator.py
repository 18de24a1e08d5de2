"""The operator as a process that ends, as if killed, before or after one of its writes.

It is started from a fork server that has imported it: a start takes no second. The lease is renewed by the clock and a
token's review changes nothing; neither counts.
"""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from pipetransformer_operator.__main__ import main
from pipetransformer_operator.kube.api import Api, Object

KILLED = 137


class Side(StrEnum):
    """Of the write."""

    BEFORE = "before"
    AFTER = "after"


def context() -> ForkServerContext:
    """The fork server; it is started by the first process."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    return server


def start(environment: Mapping[str, str], log: Path, *, write: int = 0, side: Side = Side.BEFORE) -> ForkServerProcess:
    """Starts the operator; the `write`-th write, from 1, kills it."""
    process = context().Process(target=_run, args=(dict(environment), str(log), write, side), daemon=True)
    process.start()
    return process


def _run(environment: dict[str, str], log: str, write: int, side: Side) -> None:
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
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
    sys.exit(main())


def _die(method: str, path: str, side: Side) -> None:
    print(f"killed {side} {method} {path}", flush=True)
    os._exit(KILLED)
