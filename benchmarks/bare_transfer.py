"""The least that a move of state can take: the same bytes between the same pairs, and nothing else.

Fresh processes that are warm otherwise make a group, allocate what they receive in, and send. What a regroup does
besides (rendezvous, plan, vote, optimizer, the first step) is not in it.
"""

import datetime
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

_TIMEOUT = datetime.timedelta(seconds=300)

#: (source, target, bytes)
Transfer = tuple[int, int, int]


def _rank(rank: int, size: int, transfers: Sequence[Transfer], pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from pipetransformer.elastic.transport.groups import PrefixStore, TCPStore, Transport, make_group

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT) if rank == 0 else None
    pipe.send(store.port if store is not None else None)
    client = TCPStore("127.0.0.1", pipe.recv(), is_master=False, timeout=_TIMEOUT)
    transport = Transport("127.0.0.1", _TIMEOUT)
    # Its own state is not fresh: it has been trained.
    given = [torch.ones(count, dtype=torch.uint8) for source, _, count in transfers if source == rank]
    before = make_group(PrefixStore("before", client), "group", rank, size, transport)
    dist.all_reduce(torch.ones(1), group=before)

    begun = time.perf_counter()
    group = make_group(PrefixStore("fresh", client), "group", rank, size, transport)
    operations = []
    for number, (source, target, count) in enumerate(transfers):
        if source == rank:
            operations.append(dist.P2POp(dist.isend, given.pop(0), group=group, group_peer=target, tag=number))
        if target == rank:
            buffer = torch.empty(count, dtype=torch.uint8)
            operations.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=source, tag=number))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    dist.all_reduce(torch.ones(1), group=group)
    pipe.send(time.perf_counter() - begun)
    pipe.recv()


def bare_seconds(size: int, transfers: Sequence[Transfer]) -> float:
    """Seconds until the last of `size` processes has all that `transfers` say, from when they began to make a group."""
    context = multiprocessing.get_context("forkserver")
    pipes: list[Connection] = []
    processes = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        process = context.Process(target=_rank, args=(rank, size, transfers, theirs))
        process.start()
        processes.append(process)
    try:
        port = next(port for port in [pipe.recv() for pipe in pipes] if port is not None)
        for pipe in pipes:
            pipe.send(port)
        seconds = max(pipe.recv() for pipe in pipes)
        for pipe in pipes:
            pipe.send(None)
        return float(seconds)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
