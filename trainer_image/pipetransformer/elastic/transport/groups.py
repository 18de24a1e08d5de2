"""Process groups that belong to a generation instead of to the process.

`torch.distributed` knows one default group whose ranks and size are fixed for the life of the process, while a worker
here lives through many generations with other ranks and sizes. So the default group is a constant one-rank group that
nobody uses, and each generation owns standalone groups over its own store prefix, made beside those of the generation
before: nothing of the old is destroyed until the new has committed.

This is the only file that uses private names of `torch.distributed`; `test_engine_groups.py` fails when
torch changes one of them.
"""

import contextlib
import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from .connections import Connections

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
    "wait_for",
]

#: More than the watchdog grants, but to moves above 178 GB: it ends hangs, and this those that nobody watches. Not
#: longer, since a group that is being made waits five times as long for a peer that never connects (`connections`).
OPERATION_TIMEOUT = datetime.timedelta(hours=1)
#: Global ranks of the other members: any number that is not 0, the rank of this process in the default group.
_OTHERS = 1 << 20


def ensure_default_group() -> None:
    """Make the constant one-rank default group, which c10d's functions look up before they look at the group given."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


@dataclass(frozen=True, slots=True)
class Transport:
    """How the groups of this process reach the others.

    `address` is the one that the other workers use for this one; gloo binds to it. `timeout` bounds every operation.
    """

    address: str
    timeout: datetime.timedelta = OPERATION_TIMEOUT
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def make_group(store: Store, tag: str, rank: int, size: int, transport: Transport) -> dist.ProcessGroup:
    """A group of `size` ranks that meet under the prefix `tag` of `store`; tensors of the CPU go by gloo, of CUDA by
    NCCL.

    All `size` ranks must call this. `torch.distributed` functions take the result as their `group`, with ranks of the
    group.

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
        # Else torch ends this process when a peer dies; `torchrun` asks for that, so it may be set already.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = transport.timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore(f"{tag}/nccl", store), rank, size, nccl_options)
        if size > 1:
            # torch makes NCCL's communicator in the first operation, in which all ranks must take part (documentation
            # of `batch_isend_irecv`), while state moves between some of them only. Here all are, and can be given up.
            first = torch.zeros(1, dtype=torch.float32, device=transport.device)
            nccl.allreduce([first]).wait()  # type: ignore[attr-defined]
            wait_for(transport.device)
        group._register_backend(torch.device("cuda"), c10d.ProcessGroup.BackendType.NCCL, nccl)
        config += ",cuda:nccl"
    _register(group, c10d.GroupName(tag), rank, size, config, store)
    return group


def wait_for(device: torch.device) -> None:
    """Wait until what this worker has started on the device is done: `wait` of an operation of NCCL only keeps later
    work on the device from beginning before it, so what is said to others after `wait` alone may not be true yet."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _register(group: dist.ProcessGroup, name: c10d.GroupName, rank: int, size: int, config: str, store: Store) -> None:
    """Let c10d's functions, and `PipelineStage`, accept the group: they translate ranks through these maps."""
    group._set_group_name(name)
    world = c10d._world
    world.pg_map[group] = ("gloo", store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {(0 if r == rank else _OTHERS + r): r for r in range(size)}
    world.pg_backend_config[group] = config


def drop_group(group: dist.ProcessGroup) -> None:
    """Forget the group and abort what waits in it. Its sockets close once the caller's last reference is gone, too."""
    world = c10d._world
    for entries in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        entries.pop(group, None)
    with contextlib.suppress(RuntimeError):  # of a backend that is broken already: then there is nothing to abort
        group.abort()


class _NCCL(Protocol):
    """What is used here of torch's `ProcessGroupNCCL`."""

    def _group_start(self) -> None: ...
    def _group_end(self) -> None: ...
    def abort(self) -> None: ...


def abort_together(backends: Sequence[_NCCL]) -> None:
    """End what waits on the device, as `torch.distributed` ends all groups: aborts of several communicators may wait
    for each other unless they are one operation of NCCL."""
    if backends:
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()


@dataclass(slots=True)
class GenerationGroups:
    """The groups of one generation.

    Attributes:
        transfer: members, then leavers, so that a member's rank is the same here and in `world`; state moves through
        it.
        world: the members; the vote. The same object as `transfer` when nobody leaves; None for a leaver.
        pipeline: the stages of this worker's pipeline, in stage order. None before roles are given.
        data_parallel: the workers that hold this worker's stage, in pipeline order. None before roles are given.
        tied: for each set of stages that share a parameter and that this worker's stage belongs to, the workers that
            hold one of them, in the order of ranks.
        connections: what they talk through.
    """

    transfer: dist.ProcessGroup | None = None
    world: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    data_parallel: dist.ProcessGroup | None = None
    tied: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    connections: Connections = field(default_factory=Connections)

    def meet(self, store: Store, rank: int, num_members: int, num_leavers: int, transport: Transport) -> None:
        """Make the groups that do not depend on roles. Called by all members and leavers; a leaver's rank is not below
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
    ) -> None:
        """Make the groups that depend on roles.

        Args:
            roles: (pipeline, stage) by rank.
            tied_stages: the stages that hold a copy, for each parameter that several units share.
        """
        pipeline, stage = roles[rank]
        stages = [r for _, r in sorted((s, r) for r, (p, s) in enumerate(roles) if p == pipeline)]
        replicas = [r for _, r in sorted((p, r) for r, (p, s) in enumerate(roles) if s == stage)]
        self.pipeline = self._make(store, f"pipeline/{pipeline}", stages.index(rank), len(stages), transport)
        self.data_parallel = self._make(store, f"data-parallel/{stage}", replicas.index(rank), len(replicas), transport)
        for shared in sorted({shared for shared in tied_stages if stage in shared}):
            holders = [r for r, (_, s) in enumerate(roles) if s in shared]
            tag = "tied/" + "-".join(map(str, shared))
            self.tied[shared] = (
                self.data_parallel
                if shared == (stage,)
                else self._make(store, tag, holders.index(rank), len(holders), transport)
            )

    def _make(self, store: Store, tag: str, rank: int, size: int, transport: Transport) -> dist.ProcessGroup:
        group = self.connections.connect(lambda: make_group(store, tag, rank, size, transport), drop_group)
        if transport.device.type == "cuda":
            self.connections.after_shut = self._abort_on_device
        return group

    def _abort_on_device(self) -> None:
        """For any thread. What was summed or received on the device means nothing afterwards."""
        cuda = torch.device("cuda")
        abort_together([group._get_backend(cuda) for group in self._distinct()])  # type: ignore[misc]

    def release_transfer(self) -> list[dist.ProcessGroup]:
        """Let go of the leavers once the generation is committed; the caller drops what this returns."""
        transfer, self.transfer = self.transfer, self.world
        return [transfer] if transfer is not None and transfer is not self.world else []

    def release(self) -> list[dist.ProcessGroup]:
        """Forget all groups; the caller drops them."""
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
