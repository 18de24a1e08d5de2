"""Runs a function on the ranks of a group, each in a process of its own that a forkserver with torch starts quickly."""

import datetime
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.testkit import forked

_TIMEOUT = datetime.timedelta(seconds=60)


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, within: float = 120) -> list[Any]:
    """`function(group, *arguments)` on each rank of a gloo group; what it returned, by rank. All must be picklable.

    Raises:
        TimeoutError: a rank did not return within `within` seconds.
    """
    from pipetransformer.elastic.transport.groups import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    context = forked.context(*forked.TRAINER)
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, store.port, rank, size, function, arguments))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return [_receive(pipe, within) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(pipe: Connection, port: int, rank: int, size: int, function: Callable[..., Any], arguments: Any) -> None:
    forked.begin()
    import torch

    from pipetransformer.elastic.transport.groups import TCPStore, Transport, make_group

    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
        group = make_group(store, "ranks", rank, size, Transport("127.0.0.1", _TIMEOUT))
        pipe.send((function(group, *arguments), None))
        pipe.recv()  # the others may still need this rank's connections
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        raise


def _receive(pipe: Connection, within: float) -> Any:
    if not pipe.poll(within):
        raise TimeoutError(f"a rank said nothing for {within:.0f} s")
    result, error = pipe.recv()
    if error:
        raise AssertionError(f"a rank failed:\n{error}")
    return result
