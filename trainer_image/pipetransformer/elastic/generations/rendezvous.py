"""Workers meet in a generation through torch elastic's `RendezvousHandler`.

A generation is published with its exact members. So unlike torch's own handlers this one has no minimum, and does not
wait for more to come. The rendezvous is complete when every member and every leaver has written its key into the
leader's store. The same handler serves `torchrun --rdzv-backend=pipetransformer` (entry point `torchrun.handlers`).
"""

import contextlib
import datetime
import threading
import time
from typing import Protocol

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from pipetransformer.elastic.transport.connections import Connections
from pipetransformer.elastic.transport.groups import Store, TCPStore
from pipetransformer_contract.messages import Generation

from .member_list import ClientOpening, forget, hand_on, place_of, split_address

BACKEND = "pipetransformer"
_CONNECT_TIMEOUT = datetime.timedelta(seconds=0.5)
_RETRY_SECONDS = 0.02
#: For telling a leader, which may hang, that this worker leaves.
_LEAVE_SECONDS = 5.0
_COMES, _LEFT = "1", "0"


class GenerationSource(Protocol):
    """Gives generations: the operator's channel, or a script in tests."""

    def next_generation(self, after: int) -> Generation:
        """Block until a generation above `after` names this worker, and return the newest such generation.

        Raises:
            RendezvousClosedError: the job has ended.
        """

    def newest(self) -> int:
        """Return the number of the newest generation known to be published, 0 for none. Never blocks."""

    def close(self) -> None:
        """Stop waiting; a blocked `next_generation` raises `RendezvousClosedError`."""


class LeaverError(RendezvousGracefulExitError):
    """This worker leaves with the generation, once it has sent what only it holds.

    Attributes:
        store: the generation's store.
        rank: rank in the transfer group, which has the members first, then the leavers.
    """

    def __init__(self, generation: Generation, store: Store, rank: int) -> None:
        super().__init__(f"worker leaves with generation {generation.layout_generation}")
        self.generation = generation
        self.store = store
        self.rank = rank


class GenerationRendezvousHandler(RendezvousHandler):
    """Rendezvous of exactly the members and leavers of a published generation.

    Args:
        worker: this worker's name.
        own_store: the TCPStore that this worker hosts, used when it leads.
        source: gives generations.
        timeout: how long the participants of a published generation may take to come.

    Attributes:
        generation: the generation of the last rendezvous, or of the next one once it is found; None before the first.
        patient: whether the next rendezvous waits until something newer is published, because the others may still be
            training or evaluating.
        waiting_after: the number above which this worker waits for a generation; None if it does not wait.
        connections: sockets of the generation. Shut them to end a rendezvous that waits.
    """

    def __init__(
        self, worker: str, own_store: TCPStore, source: GenerationSource, *, timeout: datetime.timedelta
    ) -> None:
        self._worker = worker
        self._own_store = own_store
        self._source = source
        self._timeout = timeout
        self._announced: Generation | None = None
        self._found = False
        self._closed = threading.Event()
        self.generation: Generation | None = None
        self.patient = False
        self.waiting_after: int | None = None
        self.connections = Connections()

    def get_backend(self) -> str:
        return BACKEND

    def announce(self, generation: Generation) -> None:
        """Take a generation that the leader passed on, so that the next rendezvous need not ask the source. If this
        worker leads it, joiners find the list of members in this worker's store."""
        self._announced = generation
        hand_on(generation, self._worker, self._own_store)

    def await_next(self) -> None:
        """Wait until a generation after the current one names this worker. The next rendezvous takes it.

        Raises:
            RendezvousClosedError: the job has ended.
        """
        announced = self._announced
        if announced is None or announced.layout_generation <= self.current:
            if self._closed.is_set():
                raise RendezvousClosedError
            self.waiting_after = self.current
            try:
                self._announced = self._source.next_generation(self.current)
            finally:
                self.waiting_after = None

    def find_next(self) -> Generation:
        """Wait for the generation that the next rendezvous will meet, and make it the current one.

        Raises:
            RendezvousClosedError: the job has ended.
        """
        self.await_next()
        announced, self._announced = self._announced, None
        assert announced is not None
        self.generation = announced
        self.connections = Connections(self._own_store.port)
        self._found = True
        return announced

    def given_up(self) -> bool:
        """Whether a generation newer than the current one is published. Never blocks."""
        return self._source.newest() > self.current

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the members of the generation that `find_next` found, or find one first; see `RendezvousHandler`.

        Raises:
            LeaverError: this worker is a leaver of the generation. The error carries the store and the rank.
            RendezvousClosedError: the job has ended.
            RendezvousTimeoutError: a participant did not come in time.
            RendezvousConnectionError: the leader's store cannot be reached, or a participant came and left.
            RendezvousStateError: the generation does not name this worker.
        """
        if not self._found:
            self.find_next()
        self._found = False
        generation = self.generation
        assert generation is not None
        participants = [*generation.members, *generation.leavers]
        names = [member.name for member in participants]
        if self._worker not in names:
            raise RendezvousStateError(f"generation {generation.layout_generation} does not name {self._worker!r}")
        rank = names.index(self._worker)
        leader = generation.leader_member()
        store = self._connect(generation, self.connections, self._timeout.total_seconds())
        keys = [_key(name) for name in names]
        try:
            store.set(keys[rank], _COMES)
            self._wait(store, keys)
            said = store.multi_get(keys)
            if leader.name == self._worker:
                forget(store)
        except dist.DistNetworkError as error:
            message = f"cannot reach the store of leader {leader.name} at {leader.address}: {error}"
            raise RendezvousConnectionError(message) from error
        except dist.DistStoreError as error:
            missing = [name for name, key in zip(names, keys, strict=True) if not _has(store, key)]
            raise RendezvousTimeoutError(
                f"generation {generation.layout_generation}: {', '.join(missing)} did not come "
                f"within {self._timeout.total_seconds():.0f} s"
            ) from error
        if left := [name for name, word in zip(names, said, strict=True) if word.decode() == _LEFT]:
            raise RendezvousConnectionError(f"{', '.join(left)} came and left, because the job has ended")
        if rank >= len(generation.members):
            raise LeaverError(generation, store, rank)
        host, port = split_address(leader.address)
        return RendezvousInfo(store, rank, len(generation.members), RendezvousStoreInfo(host, port))

    def take_leave(self) -> None:
        """Tell the other participants that this worker leaves the rendezvous. They would wait for it forever, because
        no further generation is published once the job has ended."""
        generation = self.generation
        assert generation is not None
        connections = Connections(self._own_store.port)  # those of the rendezvous are shut
        with contextlib.suppress(RendezvousConnectionError, dist.DistError):
            self._connect(generation, connections, _LEAVE_SECONDS).set(_key(self._worker), _LEFT)

    @property
    def current(self) -> int:
        """Number of the generation that was found last, 0 before the first."""
        return 0 if self.generation is None else self.generation.layout_generation

    def _connect(self, generation: Generation, connections: Connections, seconds: float) -> Store:
        """Return a client of the leader's store. The leader uses a client too, because a wait on the store that it
        hosts can only be ended with the store itself."""
        leader = generation.leader_member()
        limit = min(_CONNECT_TIMEOUT, self._timeout)
        deadline = time.monotonic() + seconds
        while True:
            try:
                client = connections.connect(ClientOpening(leader.address, limit), deadline - time.monotonic())
                break
            except (dist.DistNetworkError, OSError) as error:
                if self.given_up() or connections.is_shut or time.monotonic() > deadline:
                    message = f"cannot reach the store of leader {leader.name} at {leader.address}: {error}"
                    raise RendezvousConnectionError(message) from error
                time.sleep(_RETRY_SECONDS)
        client.set_timeout(self._timeout)
        return place_of(generation, client)

    def _wait(self, store: Store, keys: list[str]) -> None:
        while True:
            try:
                return store.wait(keys, self._timeout)
            except dist.DistStoreError as error:
                if not self.patient or isinstance(error, dist.DistNetworkError):
                    raise

    def is_closed(self) -> bool:
        return self._closed.is_set()

    def set_closed(self) -> None:
        self._closed.set()
        self._source.close()

    def num_nodes_waiting(self) -> int:
        """Return 1 if a newer generation is known, otherwise 0."""
        return int(self.given_up())

    @property
    def others(self) -> list[str]:
        """The other members and leavers of the present generation, starting with the one that follows this worker."""
        generation = self.generation
        names = [] if generation is None else [member.name for member in [*generation.members, *generation.leavers]]
        if self._worker not in names:
            return []
        own = names.index(self._worker)
        return names[own + 1 :] + names[:own]

    def get_run_id(self) -> str:
        return "" if self.generation is None else self.generation.job_uid

    def shutdown(self) -> bool:
        self.set_closed()
        return True


def _key(worker: str) -> str:
    """Key in the generation's store that says whether a worker comes."""
    return f"here/{worker}"


def host_store(address: str, timeout: datetime.timedelta) -> tuple[TCPStore, str]:
    """Host a store on a free port. Returns the store and the `address:port` where the other workers find it."""
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    host = f"[{address}]" if ":" in address else address
    return store, f"{host}:{store.port}"


def _has(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except dist.DistError:
        return False
