"""Process groups that belong to a generation instead of to the process.

`torch.distributed` has one default group, whose ranks never change. Here it has one rank, and stands for every group of
one worker. Each generation makes its other groups, under its own prefix of the store. The groups of the generation
before stay until the new one is committed. Only this file uses private names of `torch.distributed`;
`test_engine_groups.py` fails when torch changes them.
"""

import contextlib
import datetime
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from .connections import Connections, Opening
from .exchange import Exchange, open_exchange

__all__ = [
    "OPERATION_TIMEOUT",
    "GenerationGroups",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "Transport",
    "abort_together",
    "alone",
    "default_group_until_end",
    "drop_groups",
    "ensure_default_group",
    "make_group",
    "open_pairs",
    "wait_for",
]

#: Timeout of each operation. It ends waits that the watchdog does not watch. It is longer than the watchdog's usual
#: limits, so that the watchdog ends its own waits first. Only a move of more than 178 GB has a longer limit. A longer
#: timeout would cost more, because a group that is being made waits five timeouts for a peer that never connects.
OPERATION_TIMEOUT = datetime.timedelta(hours=1)
#: Offset of the global ranks of other workers. They may be any numbers except 0, this process's rank in the default
#: group.
_OTHERS = 1 << 20


def ensure_default_group() -> None:
    """Make the default group, of one rank, if there is none. c10d's functions look it up even if they are given another
    group."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


@contextlib.contextmanager
def default_group_until_end() -> Iterator[None]:
    """A context that destroys the default group at its end, so that the program can make its own. A group that was
    there before stays."""
    made_before = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not made_before:
            dist.destroy_process_group()


def alone() -> dist.ProcessGroup:
    """Return the default group, for a worker that is alone in a group. Only CPU tensors may be used in it."""
    ensure_default_group()
    group = dist.group.WORLD
    assert group is not None
    return group


@dataclass(frozen=True, slots=True)
class Transport:
    """How the groups of this process connect to other workers.

    Attributes:
        address: address of this process for other workers; gloo binds to it.
        timeout: timeout of each operation.
        device: where training runs.
    """

    address: str
    timeout: datetime.timedelta = OPERATION_TIMEOUT
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def make_group(store: Store, tag: str, rank: int, size: int, transport: Transport) -> dist.ProcessGroup:
    """Make a group of `size` ranks that meet under the prefix `tag` of `store`. CPU tensors use gloo, CUDA tensors
    NCCL.

    All `size` ranks must call this. The functions of `torch.distributed` take the result as their `group`; peers are
    given by their rank in it.

    Args:
        store: where the ranks meet.
        tag: the prefix of the group in the store.
        rank: this worker's rank in the group.
        size: number of ranks.
        transport: how this worker connects to the others.

    Raises:
        dist.DistError, RuntimeError: a rank did not come within the transport's timeout, or its connection broke.
    """
    ensure_default_group()
    # gloo, for tensors on the CPU.
    group = c10d.ProcessGroup(PrefixStore(tag, store), rank, size)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=transport.address)]
    options._timeout = transport.timeout
    gloo = dist.ProcessGroupGloo(PrefixStore(f"{tag}/gloo", store), rank, size, options)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    config = "cpu:gloo"
    # NCCL, for tensors on a GPU.
    if transport.device.type == "cuda":
        # Otherwise torch ends this process when a peer dies. torchrun may have set this variable to do so.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = transport.timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore(f"{tag}/nccl", store), rank, size, nccl_options)
        if size > 1:
            # torch makes NCCL's communicator in the first operation. All ranks must take part in it (documentation of
            # `batch_isend_irecv`). State moves only between some ranks, so this operation comes first.
            first = torch.zeros(1, dtype=torch.float32, device=transport.device)
            nccl.allreduce([first]).wait()  # type: ignore[attr-defined]
            wait_for(transport.device)
        group._register_backend(torch.device("cuda"), c10d.ProcessGroup.BackendType.NCCL, nccl)
        config += ",cuda:nccl"
    _register(group, c10d.GroupName(tag), rank, size, config, store)
    return group


class PointToPoint(Protocol):
    """The methods of a torch backend that `open_pairs` uses."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> dist.Work: ...


def open_pairs(backend: PointToPoint, rank: int, pairs: Collection[tuple[int, int]], device: torch.device) -> None:
    """Send one message between the two ranks of each pair, so that NCCL makes their communicators now.

    NCCL makes the communicator of a pair with the first message that is not part of a batch. In it both ranks wait for
    each other. Without this function, they would wait in the first round. gloo needs no such message, because it
    connects all ranks when it makes a group.

    Args:
        backend: sends the messages.
        rank: this worker's rank.
        pairs: the pairs of ranks; the same on all ranks.
        device: device of the messages.
    """
    # All ranks go through the pairs in one order, so they never wait for each other in a circle. Pairs whose lower rank
    # is even come first: (0, 1) and (2, 3), for example, can then open theirs at the same time.
    for first, second in sorted(map(sorted, pairs), key=lambda pair: (pair[0] % 2, pair)):
        message = torch.zeros(1, device=device)
        if rank == first:
            backend.send([message], second, 0).wait()
        elif rank == second:
            backend.recv([message], first, 0).wait()


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all work in its current stream.

    Call this before other workers are told that an NCCL operation is done. The operation's own `wait` does not wait for
    the device: it only orders the operation before later work in the stream.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _register(group: dist.ProcessGroup, name: c10d.GroupName, rank: int, size: int, config: str, store: Store) -> None:
    """Enter the group into c10d's maps. Its functions look up groups and ranks there."""
    group._set_group_name(name)
    world = c10d._world
    world.pg_map[group] = ("gloo", store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {(0 if r == rank else _OTHERS + r): r for r in range(size)}
    world.pg_backend_config[group] = config


class Abortable(Protocol):
    """A process group, or one of its backends."""

    def abort(self) -> None: ...


def abort_together(groups: Sequence[Abortable]) -> None:
    """Abort operations that wait in these groups, and return once all are aborted.

    Each group has a thread, because aborts may wait for each other. NCCL ends the waits of its own communicator, and
    then waits for the whole device. A kernel of another group may still wait there (NVIDIA/nccl issue 1013). NCCL
    recommends to abort all groups within one `ncclGroupStart`. That has no effect here, because it applies only to the
    calling thread, and torch aborts in another thread.
    """
    threads = [threading.Thread(target=_abort, args=(group,), name="abort", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort(group: Abortable) -> None:
    with contextlib.suppress(RuntimeError):  # the backend is broken, and has nothing left to abort
        group.abort()


def drop_groups(groups: list[dist.ProcessGroup]) -> None:
    """Abort operations that wait in these groups, remove the groups from c10d's maps, and empty the list.

    A group's sockets close with the last reference to it, so the caller must keep none.
    """
    abort_together(groups)
    world = c10d._world
    while groups:
        group = groups.pop()
        for entries in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            entries.pop(group, None)


@dataclass(frozen=True)
class _GroupOpening(Opening[dist.ProcessGroup]):
    """Makes a group. The attributes are the arguments of `make_group`."""

    store: Store
    tag: str
    rank: int
    size: int
    transport: Transport

    def make(self) -> dist.ProcessGroup:
        return make_group(self.store, self.tag, self.rank, self.size, self.transport)

    def drop(self, late: dist.ProcessGroup) -> None:
        drop_groups([late])


@dataclass(frozen=True)
class _PairsOpening(Opening[None]):
    """Opens the pairs of a group. The attributes are the arguments of `open_pairs`, except for the group."""

    group: dist.ProcessGroup
    pairs: Collection[tuple[int, int]]
    device: torch.device

    def make(self) -> None:
        backend = self.group._get_backend(self.device)
        open_pairs(backend, self.group.rank(), self.pairs, self.device)  # type: ignore[arg-type]
        wait_for(self.device)


@dataclass(frozen=True)
class _ExchangeOpening(Opening[Exchange]):
    """Opens an exchange. The attributes are as in `_GroupOpening`."""

    store: Store
    rank: int
    size: int
    transport: Transport

    def make(self) -> Exchange:
        return open_exchange(self.store, self.rank, self.size, self.transport.address, self.transport.timeout)

    def drop(self, late: Exchange) -> None:
        late.close()


@dataclass(slots=True)
class GenerationGroups:
    """The groups of one generation.

    Sets of the same workers share one group, because a group of NCCL takes about a second to make. Only the thread that
    trains uses groups. All workers run the same operations of a group in the same order, also those of different sets
    (`docs/decisions/0014`). A set of one worker has the default group, which needs no connection.

    Attributes:
        world: the members; None for a leaver.
        transfer: state moves in it. The same object as `world`, unless leavers send state: then the members, followed
            by the leavers. None for a leaver that sends nothing.
        pipeline: the workers of this worker's pipeline, in the order of stages. None before roles are given.
        data_parallel: the workers that hold this worker's stage, in the order of ranks. None before roles are given.
        tied: groups of the workers whose stages share a parameter, in the order of ranks. The key is these stages. Only
            sets that include this worker's stage.
        connections: the sockets of all groups and exchanges.
        exchange: where the members exchange a few numbers, such as ballots.
        participants: the same for the members, followed by the leavers. The same object as `exchange` without leavers.
    """

    world: dist.ProcessGroup | None = None
    transfer: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    data_parallel: dist.ProcessGroup | None = None
    tied: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    connections: Connections = field(default_factory=Connections)
    exchange: Exchange = field(default_factory=Exchange)
    participants: Exchange = field(default_factory=Exchange)

    def meet(self, store: Store, rank: int, num_members: int, num_leavers: int, transport: Transport) -> None:
        """Make the groups that do not depend on roles. All members and leavers call this. The ranks of leavers begin at
        `num_members`.

        Raises:
            RuntimeError, ConnectionAbortedError: a rank did not come in time, or the connections were shut meanwhile.
        """
        self._abort_when_shut(transport)
        if rank < num_members:
            self.world = self.transfer = self._make(store, "world", rank, num_members, transport)
            self.exchange = self._connect(store, "members", rank, num_members, transport)
        self.participants = self.exchange
        if num_leavers:
            self.participants = self._connect(store, "participants", rank, num_members + num_leavers, transport)

    def take_in_leavers(self, store: Store, rank: int, size: int, transport: Transport) -> None:
        """Make the group in which leavers send state. All members and leavers call this.

        A release of whole pipelines does without it, because the members hold the same state.

        Args:
            store: where the participants meet.
            rank: this worker's rank, as in `meet`.
            size: number of members and leavers.
            transport: how this worker connects to the others.

        Raises:
            RuntimeError, ConnectionAbortedError: as in `meet`.
        """
        self.transfer = self._make(store, "transfer", rank, size, transport)

    def assign(
        self,
        store: Store,
        roles: Sequence[tuple[int, int]],
        rank: int,
        transport: Transport,
        tied_stages: Sequence[tuple[int, ...]] = (),
        pairs: Collection[tuple[int, int]] = (),
    ) -> None:
        """Make the groups that depend on roles, unless `world` or another group has the same ranks in the same order.
        All members call this.

        Args:
            store: where the members meet.
            roles: (pipeline, stage) of each rank.
            rank: this worker's rank.
            transport: how this worker connects to the others.
            tied_stages: for each parameter that several units share, the stages that hold a copy.
            pairs: pairs of stages that send single messages to each other.

        Raises:
            RuntimeError, ConnectionAbortedError: as in `meet`.
        """
        assert self.world is not None
        self._abort_when_shut(transport)
        pipeline, stage = roles[rank]
        made = {tuple(range(len(roles))): self.world}

        def group_of(tag: str, ranks: Sequence[int]) -> dist.ProcessGroup:
            key = tuple(ranks)
            if key not in made:
                made[key] = self._make(store, tag, key.index(rank), len(key), transport)
            return made[key]

        stages = [r for _, r in sorted((s, r) for r, (p, s) in enumerate(roles) if p == pipeline)]
        self.pipeline = group_of(f"pipeline/{pipeline}", stages)
        if transport.device.type == "cuda" and pairs:
            self.connections.connect(_PairsOpening(self.pipeline, pairs, transport.device))
        replicas = [r for r, (_, s) in enumerate(roles) if s == stage]
        self.data_parallel = group_of(f"data-parallel/{stage}", replicas)
        for shared in sorted({shared for shared in tied_stages if stage in shared}):
            holders = [r for r, (_, s) in enumerate(roles) if s in shared]
            self.tied[shared] = group_of("tied/" + "-".join(map(str, shared)), holders)

    def _make(self, store: Store, tag: str, rank: int, size: int, transport: Transport) -> dist.ProcessGroup:
        if size == 1:
            return alone()
        return self.connections.connect(_GroupOpening(store, tag, rank, size, transport))

    def _connect(self, store: Store, tag: str, rank: int, size: int, transport: Transport) -> Exchange:
        if size == 1:
            return Exchange()
        return self.connections.connect(_ExchangeOpening(PrefixStore(tag, store), rank, size, transport))

    def _abort_when_shut(self, transport: Transport) -> None:
        """Let a shut of the connections also abort waits on the device."""
        if transport.device.type == "cuda":
            self.connections.after_shut = self._abort_on_device

    def with_new_roles(self) -> "GenerationGroups":
        """Return groups of the same members, with the same `world` and `exchange`. Next, all members call `assign`.

        These groups give the exchange away, so that their `release` does not close it.
        """
        exchange, self.exchange = self.exchange, Exchange()
        self.participants = self.exchange
        return GenerationGroups(
            self.world, self.world, connections=self.connections, exchange=exchange, participants=exchange
        )

    def undo_new_roles(self, made: "GenerationGroups") -> None:
        """Drop the groups that `with_new_roles` made, and take the exchange back. All members call this."""
        if self.connections.after_shut is not None:  # `assign` has set it to abort the groups of `made` only
            self.connections.after_shut = self._abort_on_device
        self.exchange, made.exchange = made.exchange, Exchange()
        self.participants, made.participants = self.exchange, made.exchange
        drop_groups([group for group in made.release() if group is not self.world])

    def _abort_on_device(self) -> None:
        """End waits on the device. Any thread may call this. Afterwards sums and received tensors on the device are not
        valid."""
        cuda = torch.device("cuda")
        abort_together([group._get_backend(cuda) for group in self._distinct()])

    def release_transfer(self) -> list[dist.ProcessGroup]:
        """Forget the leavers, once the generation is committed. Returns the group with them in a list for the caller to
        drop; the list is empty without one."""
        if self.participants is not self.exchange:
            self.participants.close()
            self.participants = self.exchange
        transfer, self.transfer = self.transfer, self.world
        return [transfer] if transfer is not None and transfer is not self.world else []

    def release(self) -> list[dist.ProcessGroup]:
        """Close the exchanges. Forget all groups, and return them for the caller to drop."""
        self.exchange.close()
        self.participants.close()
        groups = self._distinct()
        self.transfer = self.world = self.pipeline = self.data_parallel = None
        self.tied = {}
        return groups

    def _distinct(self) -> list[dist.ProcessGroup]:
        groups = (self.transfer, self.world, self.pipeline, self.data_parallel, *self.tied.values())
        return list({id(group): group for group in groups if group not in (None, dist.group.WORLD)}.values())

    def drop(self) -> None:
        """Close the exchanges. Forget all groups, and abort operations that wait in them."""
        drop_groups(self.release())
