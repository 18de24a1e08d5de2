"""The rendezvous of a generation, as a `RendezvousHandler` of torch elastic.

A generation names its participants: members and leavers. So this handler, unlike those of torch, has no minimum number
of workers, and never waits for more of them. The rendezvous is complete when each participant has written its key into
the leader's store. `torchrun --rdzv-backend=pipetransformer` uses the same handler (entry point `torchrun.handlers`).
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

from .member_list import (
    CONNECT_TIMEOUT,
    RETRY_SECONDS,
    ClientOpening,
    forget_shared,
    generation_store,
    share_if_leader,
    split_address,
)

BACKEND = "pipetransformer"
#: Timeout of `take_leave`, because the leader may hang.
_LEAVE_SECONDS = 5.0
#: Values of a participant's key: it takes part in the rendezvous, or has left it.
_COMES, _LEFT = "1", "0"


class GenerationSource(Protocol):
    """Tells a worker of generations. Implemented by `ChannelSource`, and for runs without an operator by `Chooser` and
    `Follower`."""

    def next_generation(self, after: int) -> Generation:
        """Wait for a generation above `after` that names this worker, and return the newest one.

        Raises:
            RendezvousClosedError: the job has ended.
        """

    def newest(self) -> int:
        """Return the number of the newest generation known to be published, 0 for none. Does not wait for one."""

    def close(self) -> None:
        """End all waits: `next_generation` raises `RendezvousClosedError`."""


class LeaverError(RendezvousGracefulExitError):
    """This worker is a leaver of the generation. It may leave once it has sent the state that the members need of it.

    Attributes:
        generation: the generation.
        store: the part of the leader's store that only the generation uses.
        rank: rank among the participants: the members come first, then the leavers.
    """

    def __init__(self, generation: Generation, store: Store, rank: int) -> None:
        super().__init__(f"this worker leaves with generation {generation.layout_generation}")
        self.generation = generation
        self.store = store
        self.rank = rank


class GenerationRendezvousHandler(RendezvousHandler):
    """Rendezvous of exactly the members and leavers of a published generation.

    Args:
        worker: this worker's name.
        own_store: the store that this worker hosts. The participants meet in it if this worker is the leader.
        source: tells this worker of generations.
        timeout: how long to wait for the leader's store, and then for the other participants.

    Attributes:
        generation: the generation that was found last; None before the first.
        patient: whether the next rendezvous waits for participants longer than the timeout, because they may still be
            in a round or an evaluation.
        waiting_after: while this worker waits for a generation, the number of the generation before it. Otherwise None.
        connections: the sockets of the generation. Shut them to end a rendezvous that waits.
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
        """Note a generation that the present leader has passed on. The next rendezvous takes it without asking the
        source. If this worker is the new leader, put the list of members into this worker's store for joiners.
        """
        self._announced = generation
        share_if_leader(generation, self._worker, self._own_store)

    def await_next(self) -> None:
        """Wait until a generation after the current one names this worker. The next rendezvous takes it.

        Raises:
            RendezvousClosedError: the job has ended, or the handler is closed.
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
        """Wait for the next generation, and make it the current one. `next_rendezvous` then meets its participants.

        Raises:
            RendezvousClosedError: as `await_next`.
        """
        self.await_next()
        announced, self._announced = self._announced, None
        assert announced is not None
        self.generation = announced
        self.connections = Connections(self._own_store.port)
        self._found = True
        return announced

    def is_superseded(self) -> bool:
        """Whether a generation newer than the current one is published. Never blocks."""
        return self._source.newest() > self.current

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the participants of the generation that `find_next` found. If the caller has not called `find_next`, as
        torchrun never does, this method calls it.

        Returns:
            The generation's store, and this worker's rank among the members.

        Raises:
            LeaverError: this worker is a leaver of the generation. The error has the store and the rank.
            RendezvousClosedError: as `await_next`.
            RendezvousTimeoutError: a participant did not join in time.
            RendezvousConnectionError: the leader's store cannot be reached, or a participant has left the rendezvous.
            RendezvousStateError: the generation does not name this worker.
        """
        if not self._found:
            self.find_next()
        self._found = False
        generation = self.generation
        assert generation is not None
        # Find this worker's rank.
        participants = [*generation.members, *generation.leavers]
        names = [member.name for member in participants]
        if self._worker not in names:
            raise RendezvousStateError(f"generation {generation.layout_generation} does not name {self._worker!r}")
        rank = names.index(self._worker)
        # Write this worker's key, and wait for the keys of the other participants.
        leader = generation.leader_member()
        store = self._connect(generation, self.connections, self._timeout.total_seconds())
        keys = [_key(name) for name in names]
        try:
            store.set(keys[rank], _COMES)
            self._wait(store, keys)
            said = store.multi_get(keys)
            if leader.name == self._worker:
                forget_shared(store)
        except dist.DistNetworkError as error:
            message = f"cannot reach the store of leader {leader.name} at {leader.address}: {error}"
            raise RendezvousConnectionError(message) from error
        except dist.DistStoreError as error:
            # Name the participants that are missing.
            missing = [name for name, key in zip(names, keys, strict=True) if not _has(store, key)]
            raise RendezvousTimeoutError(
                f"generation {generation.layout_generation}: {', '.join(missing)} did not join "
                f"within {self._timeout.total_seconds():.0f} s"
            ) from error
        if left := [name for name, word in zip(names, said, strict=True) if word.decode() == _LEFT]:
            raise RendezvousConnectionError(f"{', '.join(left)} left the rendezvous, because the job has ended")
        if rank >= len(generation.members):
            raise LeaverError(generation, store, rank)
        host, port = split_address(leader.address)
        return RendezvousInfo(store, rank, len(generation.members), RendezvousStoreInfo(host, port))

    def take_leave(self) -> None:
        """Tell the other participants that this worker leaves the rendezvous, because the job has ended. Otherwise a
        patient one would wait forever, because no newer generation is published to end its wait."""
        generation = self.generation
        assert generation is not None
        connections = Connections(self._own_store.port)  # the rendezvous's own connections are shut
        with contextlib.suppress(RendezvousConnectionError, dist.DistError):
            self._connect(generation, connections, _LEAVE_SECONDS).set(_key(self._worker), _LEFT)

    @property
    def current(self) -> int:
        """Number of the current generation, the one that was found last; 0 before the first."""
        return 0 if self.generation is None else self.generation.layout_generation

    def _connect(self, generation: Generation, connections: Connections, seconds: float) -> Store:
        """Connect to the leader's store, and return the part of it that only this generation uses.

        The leader connects to its own store too. A wait in a client ends when its connection is shut. A wait in the
        hosted store itself would end only with the store.

        Raises:
            RendezvousConnectionError: the store cannot be reached within `seconds`, or a newer generation is published.
        """
        leader = generation.leader_member()
        limit = min(CONNECT_TIMEOUT, self._timeout)
        deadline = time.monotonic() + seconds
        while True:
            try:
                client = connections.connect(ClientOpening(leader.address, limit), deadline - time.monotonic())
                break
            except (dist.DistNetworkError, OSError) as error:
                if self.is_superseded() or connections.is_shut or time.monotonic() > deadline:
                    message = f"cannot reach the store of leader {leader.name} at {leader.address}: {error}"
                    raise RendezvousConnectionError(message) from error
                time.sleep(RETRY_SECONDS)
        client.set_timeout(self._timeout)
        return generation_store(generation, client)

    def _wait(self, store: Store, keys: list[str]) -> None:
        """Wait until all keys are set. If `patient`, wait again after each timeout, until the connection is shut."""
        while True:
            try:
                return store.wait(keys, self._timeout)
            except dist.DistStoreError:  # no DistNetworkError is one
                if not self.patient:
                    raise

    def is_closed(self) -> bool:
        return self._closed.is_set()

    def set_closed(self) -> None:
        self._closed.set()
        self._source.close()

    def num_nodes_waiting(self) -> int:
        """Return 1 if a newer generation is published, otherwise 0."""
        return int(self.is_superseded())

    @property
    def others(self) -> list[str]:
        """Names of the other participants of the current generation, in a circle from the one after this worker. Empty
        if the generation does not name this worker."""
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
    """Key in the generation's store. A worker sets it to say that it takes part in the rendezvous, or has left it."""
    return f"here/{worker}"


def host_store(address: str, timeout: datetime.timedelta) -> tuple[TCPStore, str]:
    """Host a store on a free port of `address`. Returns the store, and the host:port where other workers reach it.

    An IPv6 host is put in brackets.
    """
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    host = f"[{address}]" if ":" in address else address
    return store, f"{host}:{store.port}"


def _has(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except dist.DistError:
        return False
