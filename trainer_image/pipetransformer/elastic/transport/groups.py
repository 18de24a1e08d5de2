"""Process groups that belong to a generation instead of to the process.

`torch.distributed` has one default group, whose ranks and size stay fixed. Here it is a constant group of one rank that
is never used. Each generation makes groups of its own under its own store prefix, beside those of the generation
before, which stay until the new generation has committed.

Only this file uses private names of `torch.distributed`; `test_engine_groups.py` fails when torch changes them.
"""

import contextlib
import datetime
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from .connections import Connections, Opening

__all__ = [
    "OPERATION_TIMEOUT",
    "GenerationGroups",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "Transport",
    "abort_together",
    "drop_group",
    "ensure_default_group",
    "make_group",
    "open_pairs",
    "wait_for",
]

#: Ends hangs that the watchdog does not watch. It is longer than the watchdog's limits, except for moves above 178 GB,
#: and no longer, because a group in the making waits five times as long for a peer that never connects.
OPERATION_TIMEOUT = datetime.timedelta(hours=1)
#: Global ranks of the other members: any numbers except 0, the rank of this process in the default group.
_OTHERS = 1 << 20


def ensure_default_group() -> None:
    """Make the constant default group of one rank, which c10d's functions look up before the group that they are
    given."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


@dataclass(frozen=True, slots=True)
class Transport:
    """How the groups of this process reach the others.

    Attributes:
        address: where the other workers reach this one; gloo binds to it.
        timeout: bounds every operation.
        device: where training runs.
    """

    address: str
    timeout: datetime.timedelta = OPERATION_TIMEOUT
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def make_group(
    store: Store, tag: str, rank: int, size: int, transport: Transport, pairs: Collection[tuple[int, int]] = ()
) -> dist.ProcessGroup:
    """Make a group of `size` ranks that meet under the prefix `tag` of `store`. CPU tensors use gloo, CUDA tensors
    NCCL.

    All `size` ranks must call this. `torch.distributed` functions take the result as their `group`, with ranks of the
    group.

    Args:
        store: where the ranks meet.
        tag: the prefix of the group in the store.
        rank: of this worker in the group.
        size: number of ranks.
        transport: how this worker reaches the others.
        pairs: ranks that will send to each other one by one; the same on all ranks.

    Raises:
        dist.DistError, RuntimeError: a rank did not come within the transport's timeout, or its connection broke.
    """
    ensure_default_group()
    group = c10d.ProcessGroup(PrefixStore(tag, store), rank, size)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=transport.address)]
    options._timeout = transport.timeout
    gloo = dist.ProcessGroupGloo(PrefixStore(f"{tag}/gloo", store), rank, size, options)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    config = "cpu:gloo"
    if transport.device.type == "cuda":
        # Otherwise torch ends this process when a peer dies. `torchrun` asks for that, so it may be set already.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = transport.timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore(f"{tag}/nccl", store), rank, size, nccl_options)
        if size > 1:
            # torch makes NCCL's communicator in the first operation, which must include all ranks (documentation of
            # `batch_isend_irecv`). State moves only between some ranks, so all take part in this operation first.
            first = torch.zeros(1, dtype=torch.float32, device=transport.device)
            nccl.allreduce([first]).wait()  # type: ignore[attr-defined]
            open_pairs(nccl, rank, pairs, transport.device)  # type: ignore[arg-type]
            wait_for(transport.device)
        group._register_backend(torch.device("cuda"), c10d.ProcessGroup.BackendType.NCCL, nccl)
        config += ",cuda:nccl"
    _register(group, c10d.GroupName(tag), rank, size, config, store)
    return group


class PointToPoint(Protocol):
    """The methods of a backend of torch that `open_pairs` uses."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> dist.Work: ...


def open_pairs(backend: PointToPoint, rank: int, pairs: Collection[tuple[int, int]], device: torch.device) -> None:
    """Pass one message between the two ranks of each pair.

    NCCL makes a communicator of a pair in the first message that is not part of a batch, and both ranks wait for each
    other in that. Here it belongs to the making of the group, and not to the first round. gloo connects all ranks when
    it makes a group, so it needs no such message.

    Args:
        backend: sends the messages.
        rank: of this worker.
        pairs: the same on all ranks.
        device: where messages are.
    """
    # All ranks follow one order of the pairs, so none waits in a circle. Pairs that begin at an even rank come first,
    # because neighbours can then open theirs at the same time.
    for first, second in sorted(map(sorted, pairs), key=lambda pair: (pair[0] % 2, pair)):
        message = torch.zeros(1, device=device)
        if rank == first:
            backend.send([message], second, 0).wait()
        elif rank == second:
            backend.recv([message], first, 0).wait()


def wait_for(device: torch.device) -> None:
    """Wait until all work that this worker has started on the device is done. An NCCL operation's own `wait` only
    orders it before later work on the device, so a worker must not report the result to others after that alone."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _register(group: dist.ProcessGroup, name: c10d.GroupName, rank: int, size: int, config: str, store: Store) -> None:
    """Enter the group into the maps through which c10d's functions translate ranks."""
    group._set_group_name(name)
    world = c10d._world
    world.pg_map[group] = ("gloo", store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {(0 if r == rank else _OTHERS + r): r for r in range(size)}
    world.pg_backend_config[group] = config


def drop_group(group: dist.ProcessGroup) -> None:
    """Forget the group and abort what waits in it. Its sockets close with the caller's last reference."""
    world = c10d._world
    for entries in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        entries.pop(group, None)
    with contextlib.suppress(RuntimeError):  # the backend is broken already, and has nothing to abort
        group.abort()


class _NCCL(Protocol):
    """The methods of torch's `ProcessGroupNCCL` that are used here."""

    def _group_start(self) -> None: ...
    def _group_end(self) -> None: ...
    def abort(self) -> None: ...


def abort_together(backends: Sequence[_NCCL]) -> None:
    """End what waits on the device. Several communicators are aborted in one NCCL operation, as `torch.distributed`
    does, because separate aborts may wait for each other."""
    if backends:
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()


@dataclass(frozen=True)
class _GroupOpening(Opening[dist.ProcessGroup]):
    """A group in the making: the arguments of `make_group`."""

    store: Store
    tag: str
    rank: int
    size: int
    transport: Transport
    pairs: Collection[tuple[int, int]] = ()

    def make(self) -> dist.ProcessGroup:
        return make_group(self.store, self.tag, self.rank, self.size, self.transport, self.pairs)

    def drop(self, late: dist.ProcessGroup) -> None:
        drop_group(late)


@dataclass(slots=True)
class GenerationGroups:
    """The groups of one generation.

    Attributes:
        transfer: members, then leavers; state moves through it. A member has the same rank here and in `world`.
        world: the members, which vote. The same object as `transfer` if there are no leavers; None for a leaver.
        pipeline: the stages of this worker's pipeline, in stage order. None before roles are given.
        data_parallel: the workers that hold this worker's stage, in pipeline order. None before roles are given.
        tied: groups of the workers whose stages share a parameter, in the order of ranks, by these stages. Only for
            sets that include this worker's stage.
        connections: the sockets of all groups.
    """

    transfer: dist.ProcessGroup | None = None
    world: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    data_parallel: dist.ProcessGroup | None = None
    tied: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    connections: Connections = field(default_factory=Connections)

    def meet(self, store: Store, rank: int, num_members: int, num_leavers: int, transport: Transport) -> None:
        """Make the groups that do not depend on roles. All members and leavers call this; leavers have the ranks from
        `num_members`."""
        self.transfer = self._make(store, "transfer", rank, num_members + num_leavers, transport)
        if num_leavers == 0:
            self.world = self.transfer
        elif rank < num_members:
            self.world = self._make(store, "world", rank, num_members, transport)

    def assign(
        self,
        store: Store,
        roles: Sequence[tuple[int, int]],
        rank: int,
        transport: Transport,
        tied_stages: Sequence[tuple[int, ...]] = (),
        pairs: Collection[tuple[int, int]] = (),
    ) -> None:
        """Make the groups that depend on roles.

        Args:
            roles: (pipeline, stage) by rank.
            tied_stages: for each parameter that several units share, the stages that hold a copy.
            pairs: the stages that send to each other.
        """
        pipeline, stage = roles[rank]
        stages = [r for _, r in sorted((s, r) for r, (p, s) in enumerate(roles) if p == pipeline)]
        replicas = [r for _, r in sorted((p, r) for r, (p, s) in enumerate(roles) if s == stage)]
        self.pipeline = self._make(store, f"pipeline/{pipeline}", stages.index(rank), len(stages), transport, pairs)
        self.data_parallel = self._make(store, f"data-parallel/{stage}", replicas.index(rank), len(replicas), transport)
        for shared in sorted({shared for shared in tied_stages if stage in shared}):
            holders = [r for r, (_, s) in enumerate(roles) if s in shared]
            tag = "tied/" + "-".join(map(str, shared))
            self.tied[shared] = (
                self.data_parallel
                if shared == (stage,)
                else self._make(store, tag, holders.index(rank), len(holders), transport)
            )

    def _make(
        self,
        store: Store,
        tag: str,
        rank: int,
        size: int,
        transport: Transport,
        pairs: Collection[tuple[int, int]] = (),
    ) -> dist.ProcessGroup:
        group = self.connections.connect(_GroupOpening(store, tag, rank, size, transport, pairs))
        if transport.device.type == "cuda":
            self.connections.after_shut = self._abort_on_device
        return group

    def _abort_on_device(self) -> None:
        """Abort from any thread. Sums and received tensors on the device are not valid afterwards."""
        cuda = torch.device("cuda")
        abort_together([group._get_backend(cuda) for group in self._distinct()])  # type: ignore[misc]

    def release_transfer(self) -> list[dist.ProcessGroup]:
        """Forget the group with the leavers once the generation is committed. The caller drops what this returns."""
        transfer, self.transfer = self.transfer, self.world
        return [transfer] if transfer is not None and transfer is not self.world else []

    def release(self) -> list[dist.ProcessGroup]:
        """Forget all groups. The caller drops them."""
        groups = self._distinct()
        self.transfer = self.world = self.pipeline = self.data_parallel = None
        self.tied = {}
        return groups

    def _distinct(self) -> list[dist.ProcessGroup]:
        groups = (self.transfer, self.world, self.pipeline, self.data_parallel, *self.tied.values())
        return list({id(group): group for group in groups if group is not None}.values())

    def drop(self) -> None:
        """Forget all groups and abort what waits in them."""
        for group in self.release():
            drop_group(group)
