"""A generation's groups live beside those of another, and the private names they need still mean what we think."""

import datetime
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pipetransformer.elastic.transport.exchange import Exchange, open_exchange
from pipetransformer.elastic.transport.groups import (
    GenerationGroups,
    PrefixStore,
    TCPStore,
    Transport,
    abort_together,
    alone,
    drop_groups,
    ensure_default_group,
    make_group,
    open_pairs,
)
from pipetransformer.training.vote import Vote

pytestmark = pytest.mark.timeout(120)

TRANSPORT = Transport("127.0.0.1", datetime.timedelta(seconds=60))


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TRANSPORT.timeout)


@pytest.fixture(autouse=True)
def forget_groups() -> Iterator[None]:
    ensure_default_group()
    before = set(c10d._world.pg_map)
    yield
    for group in set(c10d._world.pg_map) - before:
        drop_groups([group])


def client(store: TCPStore) -> TCPStore:
    """A connection of a rank's own: a blocking wait on one would block the others."""
    return TCPStore("127.0.0.1", store.port, is_master=False, timeout=TRANSPORT.timeout)


def in_ranks(size: int, function: Callable[[int], Any]) -> list[Any]:
    """Run `function(rank)` in a thread each and return the results by rank. The first error is raised."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(function, range(size)))


def test_torch_still_has_the_private_names_that_we_use() -> None:
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"):
        assert isinstance(getattr(c10d._world, name), dict)
    assert hasattr(c10d.ProcessGroup, "_register_backend")
    assert hasattr(c10d.ProcessGroup, "_set_default_backend")
    assert hasattr(c10d.ProcessGroup, "_set_group_name")
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    assert hasattr(options, "_devices") and hasattr(options, "_timeout")
    assert hasattr(c10d.ProcessGroup, "_get_backend")


class Communicator:
    """Of NCCL's: its abort returns once all are asked, as if each had a kernel on the device."""

    def __init__(self, asked: threading.Barrier, *, is_broken: bool = False) -> None:
        self.asked, self.is_broken, self.is_aborted = asked, is_broken, False

    def abort(self) -> None:
        self.asked.wait(timeout=30)
        self.is_aborted = True
        if self.is_broken:
            raise RuntimeError("the backend is broken")


def test_aborts_that_wait_for_each_other_end() -> None:
    asked = threading.Barrier(3)
    groups = [Communicator(asked), Communicator(asked, is_broken=True), Communicator(asked)]

    abort_together(groups)
    abort_together([])

    assert all(group.is_aborted for group in groups)


def test_a_group_of_our_own_reduces_and_sends_by_its_own_ranks(store: TCPStore) -> None:
    groups = in_ranks(2, lambda rank: make_group(PrefixStore("g", client(store)), "world", rank, 2, TRANSPORT))

    def work(rank: int) -> tuple[float, float]:
        total = torch.full((1,), rank + 1.0)
        dist.all_reduce(total, group=groups[rank])
        box = torch.full((1,), 7.0 if rank == 0 else 0.0)
        operation = dist.isend if rank == 0 else dist.irecv
        for pending in dist.batch_isend_irecv([dist.P2POp(operation, box, group=groups[rank], group_peer=1 - rank)]):
            pending.wait()
        return total.item(), box.item()

    assert in_ranks(2, work) == [(3.0, 7.0), (3.0, 7.0)]


def test_a_group_is_bound_to_no_device(store: TCPStore) -> None:
    """NCCL would send all messages of a worker in one stream."""
    group = make_group(store, "alone", 0, 1, TRANSPORT)
    assert group.bound_device_id is None
    drop_groups([group])


@dataclass
class Meetings:
    """Where both ranks of a pair wait for each other, as they do when NCCL makes the pair's communicator."""

    met: Counter[tuple[int, int]] = field(default_factory=Counter)
    _rooms: dict[tuple[int, int], threading.Barrier] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def meet(self, sender: int, receiver: int) -> None:
        with self._lock:
            room = self._rooms.setdefault((sender, receiver), threading.Barrier(2, timeout=10))
        if room.wait() == 0:
            self.met[sender, receiver] += 1


@dataclass
class Meeting:
    """One rank's backend."""

    rank: int
    meetings: Meetings

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Any:
        self.meetings.meet(self.rank, peer)
        return mock.Mock(spec=dist.Work)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Any:
        self.meetings.meet(peer, self.rank)
        return mock.Mock(spec=dist.Work)


@pytest.mark.parametrize(
    "pairs",
    [
        set(),
        {(0, 1)},
        {(0, 1), (1, 2), (2, 3), (3, 4)},
        {(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)},
        set(combinations(range(5), 2)),
    ],
    ids=["none", "one", "a row", "a ring", "all"],
)
def test_each_pair_passes_one_message_and_no_rank_waits_in_a_circle(pairs: set[tuple[int, int]]) -> None:
    meetings = Meetings()

    def work(rank: int) -> str:
        open_pairs(Meeting(rank, meetings), rank, pairs, torch.device("cpu"))
        return "opened"

    assert in_ranks(5, work) == ["opened"] * 5
    assert meetings.met == Counter(pairs)


def exchanges(store: TCPStore, size: int) -> list[Exchange]:
    """An exchange for each rank."""
    return in_ranks(size, lambda rank: open_exchange(client(store), rank, size, TRANSPORT.address, TRANSPORT.timeout))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_all_ranks_have_the_rows_of_all(size: int, store: TCPStore) -> None:
    rows = [[rank + 0.1, -float(rank), float("nan") if rank == 1 else 1e300] for rank in range(size)]

    opened = exchanges(store, size)
    found = in_ranks(size, lambda rank: [opened[rank].gather(rows[rank]) for _ in range(3)])

    for each in found:
        assert repr(each) == repr([rows] * 3)  # unlike nan, its text equals itself


def test_a_stranger_takes_no_ranks_place(store: TCPStore) -> None:
    strangers: list[socket.socket] = []

    def open_among_strangers(rank: int) -> Exchange:
        watched = mock.Mock(wraps=client(store))

        def get(key: str) -> bytes:
            said = client(store).get(key)
            host, port, _ = said.decode().split()
            for words in (b"", b"GET / HTTP/1.1"):
                stranger = socket.create_connection((host, int(port)))
                strangers.append(stranger)
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
            return said

        watched.get.side_effect = get
        return open_exchange(watched, rank, 3, TRANSPORT.address, TRANSPORT.timeout)

    opened = in_ranks(3, open_among_strangers)

    assert strangers
    assert in_ranks(3, lambda rank: opened[rank].sum([1.0])) == [[3.0]] * 3


def test_ranks_exchange_more_than_their_connections_hold(store: TCPStore) -> None:
    values = [0.5] * 2_000_000  # 16 MB

    opened = exchanges(store, 2)
    sums = in_ranks(2, lambda rank: opened[rank].sum(values))

    assert sums == [[1.0] * 2_000_000] * 2


def test_a_vote_sums_ballots_in_the_order_of_ranks_on_all_of_them(store: TCPStore) -> None:
    losses = [1e16, 1.0, -1e16, 1.0]  # another order gives another sum
    ballots = [Vote(loss_sum=loss, weight=2.0, square_norms=[float(rank)]) for rank, loss in enumerate(losses)]

    opened = exchanges(store, 4)
    votes = in_ranks(4, lambda rank: ballots[rank].reduce(opened[rank]))

    assert votes == [Vote(loss_sum=1.0, weight=8.0, square_norms=[6.0])] * 4


def test_nobody_votes_without_a_rank_that_is_gone(store: TCPStore) -> None:
    opened = exchanges(store, 3)

    def vote(rank: int) -> str:
        try:
            if rank != 2:
                Vote(weight=1.0).reduce(opened[rank])
        except RuntimeError:
            return "broken"
        finally:
            opened[rank].close()
        return "done"

    assert in_ranks(3, vote) == ["broken", "broken", "done"]


def test_a_vote_ends_when_its_connections_are_shut(store: TCPStore) -> None:
    groups = [GenerationGroups() for _ in range(2)]
    in_ranks(2, lambda rank: groups[rank].meet(client(store), rank, 2, 0, TRANSPORT))

    def vote_or_shut(rank: int) -> str:
        if rank == 1:
            groups[0].connections.shut()
            return "shut"
        with pytest.raises(RuntimeError, match="broke"):
            Vote(weight=1.0).reduce(groups[0].exchange)
        return "ended"

    assert in_ranks(2, vote_or_shut) == ["ended", "shut"]


def test_the_next_generation_meets_while_the_present_one_works(store: TCPStore) -> None:
    old = in_ranks(2, lambda rank: make_group(PrefixStore("g1", client(store)), "world", rank, 2, TRANSPORT))

    def both(rank: int) -> float:
        new = make_group(PrefixStore("g2", client(store)), "world", 2 - rank, 3, TRANSPORT)
        total = torch.ones(1)
        dist.all_reduce(total, group=new)
        if rank < 2:
            dist.all_reduce(total, group=old[rank])
        return total.item()

    assert in_ranks(3, both) == [6.0, 6.0, 3.0]


def test_leavers_agree_with_the_members_without_a_group(store: TCPStore) -> None:
    each = [GenerationGroups() for _ in range(3)]

    def meet(rank: int) -> list[list[float]]:
        each[rank].meet(client(store), rank, 2, 1, TRANSPORT)
        return each[rank].participants.gather([float(rank)])

    assert in_ranks(3, meet) == [[[0.0], [1.0], [2.0]]] * 3
    assert [None if groups.world is None else place(groups.world) for groups in each] == [(0, 2), (1, 2), None]
    assert [groups.transfer for groups in each] == [groups.world for groups in each]
    assert in_ranks(2, lambda rank: each[rank].exchange.sum([1.0])) == [[2.0], [2.0]]


def test_members_keep_their_rank_in_the_group_with_leavers(store: TCPStore) -> None:
    def meet(rank: int) -> GenerationGroups:
        own = client(store)
        groups = GenerationGroups()
        groups.meet(own, rank, 2, 1, TRANSPORT)
        groups.take_in_leavers(own, rank, 3, TRANSPORT)
        return groups

    each = in_ranks(3, meet)

    assert [place(groups.transfer) for groups in each] == [(0, 3), (1, 3), (2, 3)]
    for groups in each[:2]:
        assert len(groups.release_transfer()) == 1
        assert groups.transfer is groups.world and groups.participants is groups.exchange
    assert in_ranks(2, lambda rank: each[rank].exchange.sum([1.0])) == [[2.0], [2.0]]


def assigned(
    store: TCPStore, roles: list[tuple[int, int]], tied_stages: Sequence[tuple[int, ...]] = ()
) -> list[GenerationGroups]:
    """The groups of each rank with these roles."""

    def meet(rank: int) -> GenerationGroups:
        own = client(store)
        groups = GenerationGroups()
        groups.meet(own, rank, len(roles), 0, TRANSPORT)
        groups.assign(own, roles, rank, TRANSPORT, tied_stages)
        return groups

    return in_ranks(len(roles), meet)


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This worker's rank in the group, and the group's size."""
    assert group is not None
    return group.rank(), group.size()


def test_roles_order_pipelines_by_stage_and_replicas_by_rank(store: TCPStore) -> None:
    each = assigned(store, [(1, 1), (0, 1), (1, 0), (0, 0)])

    assert [place(groups.pipeline) for groups in each] == [(1, 2), (1, 2), (0, 2), (0, 2)]
    assert [place(groups.data_parallel) for groups in each] == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_one_pipeline_is_the_world_if_its_stages_are_in_the_order_of_ranks(store: TCPStore) -> None:
    for groups in assigned(store, [(0, 0), (0, 1), (0, 2)], [(0, 2), (0, 1, 2)]):
        assert groups.pipeline is groups.world
        assert groups.tied.get((0, 1, 2)) is groups.world
        assert groups.tied.get((0, 2)) is not groups.world


def test_a_pipeline_in_another_order_has_a_group_that_sends_by_stage(store: TCPStore) -> None:
    each = assigned(store, [(0, 1), (0, 0)], [(0, 1)])

    assert [place(groups.pipeline) for groups in each] == [(1, 2), (0, 2)]
    assert all(groups.pipeline is not groups.world for groups in each)
    assert all(groups.tied[0, 1] is groups.world for groups in each)


def test_the_replicas_of_a_whole_model_are_the_world_in_any_order(store: TCPStore) -> None:
    for groups in assigned(store, [(1, 0), (2, 0), (0, 0)], [(0,)]):
        assert groups.data_parallel is groups.world
        assert groups.tied == {(0,): groups.world}
        assert place(groups.pipeline) == (0, 1)


def test_a_worker_alone_in_all_its_groups_opens_no_connection() -> None:
    before = len(c10d._world.pg_map)
    groups = GenerationGroups()
    store = mock.Mock(spec=TCPStore)

    groups.meet(store, 0, 1, 0, TRANSPORT)
    groups.assign(store, [(0, 0)], 0, TRANSPORT, [(0,)])

    assert store.mock_calls == []
    assert {groups.transfer, groups.world, groups.pipeline, groups.data_parallel, *groups.tied.values()} == {alone()}
    assert groups.release() == []
    assert len(c10d._world.pg_map) == before


def test_new_roles_of_the_same_members_share_their_world(store: TCPStore) -> None:
    before = assigned(store, [(0, 0), (0, 1)])

    def give_new_roles(rank: int) -> GenerationGroups:
        groups = before[rank].with_new_roles()
        groups.assign(PrefixStore("again", client(store)), [(0, 1), (0, 0)], rank, TRANSPORT)
        return groups

    after = in_ranks(2, give_new_roles)

    for old, new in zip(before, after, strict=True):
        assert new.transfer is new.world is old.world
        assert new.pipeline is not old.pipeline
        assert new.connections is old.connections
        old.release()
    sums = in_ranks(2, lambda rank: after[rank].exchange.sum([1.0]))

    assert sums == [[2.0], [2.0]]


def test_roles_that_are_undone_leave_the_members_as_they_were(store: TCPStore) -> None:
    before = assigned(store, [(0, 0), (0, 1)])
    maps = len(c10d._world.pg_map)

    def try_new_roles(rank: int) -> list[float]:
        groups = before[rank].with_new_roles()
        groups.assign(PrefixStore("again", client(store)), [(0, 1), (0, 0)], rank, TRANSPORT)
        before[rank].undo_new_roles(groups)
        return before[rank].exchange.sum([1.0])

    assert in_ranks(2, try_new_roles) == [[2.0], [2.0]]
    assert len(c10d._world.pg_map) == maps
    assert all(groups.world is not None for groups in before)


def test_after_roles_are_undone_a_shut_again_aborts_the_old_groups_on_the_device() -> None:
    before = GenerationGroups()
    made = before.with_new_roles()
    before.connections.after_shut = made._abort_on_device  # as `assign` sets it for an accelerator

    before.undo_new_roles(made)

    assert before.connections.after_shut == before._abort_on_device


def test_dropping_groups_leaves_nothing_in_the_maps_of_c10d(store: TCPStore) -> None:
    before = len(c10d._world.pg_map)

    for groups in assigned(store, [(0, 0), (0, 1), (1, 0), (1, 1)]):
        groups.drop()
        assert groups.world is None

    assert len(c10d._world.pg_map) == before
