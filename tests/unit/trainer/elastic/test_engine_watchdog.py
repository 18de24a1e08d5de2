"""A wait that nothing else would end is ended by shutting the connections that it waits on."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.connections import Connections, Opening
from pipetransformer.elastic.transport.groups import OPERATION_TIMEOUT, TCPStore, Transport
from pipetransformer.elastic.transport.watchdog import MULTIPLE, ROUND, Deadline, Watchdog
from pipetransformer.errors import StorageError
from pipetransformer.hooks import HookPoint
from tests.testkit.trainer.harness import Faults, Scripted, run_job
from tests.testkit.trainer.ledger_checker import check
from tests.testkit.trainer.numerics import ADAMW, EPOCHS, TRAINING_SAMPLES, make_spec
from tests.testkit.trainer.storing import until
from tests.testkit.trainer.watched import TRANSPORT, Clock, pair

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TRANSPORT.timeout)


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    started = Watchdog(floor_seconds=0.1, first_seconds=0.2)
    started.start()
    yield started
    started.stop()


def test_a_collective_with_a_silent_peer_fails_once_it_is_overdue(store: TCPStore, watchdog: Watchdog) -> None:
    groups, silent = pair(store)

    with pytest.raises(RuntimeError), watchdog.timing("round", groups.connections):
        dist.all_reduce(torch.ones(1), group=groups.world)

    groups.drop()
    silent.drop()


def test_a_barrier_waits_for_work_longer_than_any_collective_may(store: TCPStore) -> None:
    ours, theirs = pair(store)
    for exchange in (ours.exchange, theirs.exchange):  # they have met, however long that took
        for connection in (*exchange._sending, *exchange._receiving):
            connection.settimeout(1)
    passed: SimpleQueue[object] = SimpleQueue()
    waiting = threading.Thread(target=lambda: passed.put(Barrier(Watchdog()).pass_after(None, theirs)))
    waiting.start()

    def work() -> str:
        waiting.join(2)
        return "waits" if waiting.is_alive() else "has gone"

    assert Barrier(Watchdog()).pass_after(work, ours) == "waits"
    assert passed.get(timeout=30) is None
    ours.drop()
    theirs.drop()


def test_a_barrier_within_a_limit_waits_for_work(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 0.2
    ours, theirs = pair(store)
    clock, watchdog = Clock(monkeypatch, limit), Watchdog(first_seconds=limit)
    watchdog.start()

    def work() -> str:
        for _ in range(6):
            clock.go_on(0.9 * limit)
        return "done"

    other = threading.Thread(
        target=lambda: Barrier(Watchdog()).pass_within(None, theirs.exchange, Deadline("wait", 60))
    )
    other.start()
    deadline = Deadline("wait", limit)
    with watchdog.watching(ours.connections, deadline):
        assert Barrier(watchdog).pass_within(work, ours.exchange, deadline) == "done"
    other.join(30)
    watchdog.stop()
    ours.drop()
    theirs.drop()


def test_a_barrier_within_a_limit_does_not_wait_for_a_hang(store: TCPStore, watchdog: Watchdog) -> None:
    ours, hung = pair(store)
    deadline = Deadline("wait", watchdog.limit(ROUND))
    with watchdog.watching(ours.connections, deadline), pytest.raises(RuntimeError):
        Barrier(watchdog).pass_within(lambda: threading.Event().wait(1), ours.exchange, deadline)
    ours.drop()
    hung.drop()


def test_a_barrier_sums_the_numbers_of_the_last_vote(store: TCPStore) -> None:
    ours, theirs = pair(store)
    sums: SimpleQueue[object] = SimpleQueue()
    voted_twice, votes = threading.Event(), itertools.count(1)

    def wait() -> None:
        sums.put(Barrier(Watchdog()).sum_after(None, lambda done: [float(done is None), 3], theirs))

    def numbers(done: bool | None) -> list[float]:
        if next(votes) == 2:
            voted_twice.set()
        return [float(done is True), 4]

    threading.Thread(target=wait).start()

    assert Barrier(Watchdog()).sum_after(lambda: voted_twice.wait(30), numbers, ours) == [2, 7]
    assert sums.get(timeout=30) == [2, 7]
    ours.drop()
    theirs.drop()


def test_a_barrier_that_sums_does_not_wait_for_a_hang(store: TCPStore, watchdog: Watchdog) -> None:
    ours, hung = pair(store)
    with pytest.raises(RuntimeError):
        Barrier(watchdog).sum_after(None, lambda _: [1.0], ours)
    ours.drop()
    hung.drop()


def test_nobody_passes_a_barrier_whose_work_failed(store: TCPStore) -> None:
    ours, theirs = pair(store)
    passed: SimpleQueue[str] = SimpleQueue()

    def wait() -> None:
        try:
            Barrier(Watchdog()).pass_after(None, theirs)
            passed.put("passed")
        except RuntimeError:
            passed.put("broke")

    threading.Thread(target=wait).start()

    def work() -> None:
        raise StorageError("full")

    with pytest.raises(StorageError):
        Barrier(Watchdog()).pass_after(work, ours)
    ours.connections.shut()
    assert passed.get(timeout=30) == "broke"
    ours.drop()
    theirs.drop()


def test_a_vote_may_take_as_long_as_a_round_after_quick_votes(store: TCPStore) -> None:
    ours, theirs = pair(store)
    watchdog = Watchdog(floor_seconds=0.1, first_seconds=30)
    watchdog.start()
    late = threading.Event()

    def meet() -> None:
        barrier = Barrier(Watchdog())
        barrier.pass_after(None, theirs)
        late.wait(0.5)
        barrier.pass_after(None, theirs)

    other = threading.Thread(target=meet)
    other.start()
    barrier = Barrier(watchdog)
    for _ in range(2):
        barrier.pass_after(None, ours)
    other.join(30)
    watchdog.stop()
    ours.drop()
    theirs.drop()


def test_a_wait_without_a_socket_ends_once_after_the_sockets_are_shut(store: TCPStore) -> None:
    groups, silent = pair(store)
    votes: SimpleQueue[str] = SimpleQueue()

    def end_waits() -> None:
        try:
            dist.all_reduce(torch.ones(1), group=groups.world)
        except RuntimeError:
            votes.put("refused")

    groups.connections.after_shut = end_waits
    groups.connections.shut()
    groups.connections.shut()

    assert votes.get(timeout=30) == "refused"
    assert groups.connections.after_shut is None
    groups.drop()
    silent.drop()


def test_a_wait_for_a_key_that_never_comes_ends_when_it_is_given_up(store: TCPStore, watchdog: Watchdog) -> None:
    connections = Connections(store.port)
    with connections.opening():
        client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=TRANSPORT.timeout)
    given_up = threading.Event()
    threading.Thread(target=given_up.set).start()

    limit = mock.Mock(why_past=lambda: "given up" if given_up.is_set() else "")
    with pytest.raises(dist.DistError), watchdog.watching(connections, limit):
        client.get("never")

    store.set("alive", "1")
    assert store.get("alive") == b"1", "the store that this process hosts is not touched"


def test_the_log_says_what_was_overdue(watchdog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    connections, cut_off = Connections(), threading.Event()
    connections.after_shut = cut_off.set
    with watchdog.timing("evaluation", connections):
        assert cut_off.wait(30)

    assert caplog.messages == ["breaking connections: no progress in the evaluation for 0.2 s"]


def test_a_slow_answer_neither_holds_a_wait_nor_breaks_the_next(watchdog: Watchdog) -> None:
    """A limit may ask another worker's store, which answers late if that worker hangs."""
    connections, asked, answered = Connections(), threading.Event(), threading.Event()

    def answer() -> str:
        asked.set()
        assert answered.wait(30)
        return "late"

    with watchdog.watching(connections, mock.Mock(why_past=answer)):
        assert asked.wait(30)
    with watchdog.watching(connections, mock.Mock(why_past=(asked_next := mock.Mock(return_value="")))):
        answered.set()
        until(lambda: asked_next.called)

    assert not connections.is_shut


def test_what_is_no_tcp_connection_and_was_opened_meanwhile_is_left_alone(store: TCPStore) -> None:
    connections = Connections(store.port)
    with contextlib.ExitStack() as stack:
        with connections.opening():
            # As a reader that is started again, or an event loop, in another thread.
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            listens = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            listens.bind(("127.0.0.1", 0))
            asks = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            asks.connect(listens.getsockname())
            serves = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # as a cache that others ask
            client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=TRANSPORT.timeout)

        connections.shut()

        with pytest.raises(dist.DistNetworkError):
            client.get("never")
        ours.sendall(b"pipe")
        assert theirs.recv(4) == b"pipe"
        asks.send(b"query")
        assert listens.recv(5) == b"query"
        with socket.create_connection(serves.getsockname()):
            serves.settimeout(10)
            serves.accept()[0].close()


def test_a_wait_for_peers_is_left_behind_and_its_late_result_dropped(watchdog: Watchdog) -> None:
    connections = Connections()
    come, dropped = threading.Event(), threading.Event()

    class LateGroup(Opening[str]):
        def make(self) -> str:
            come.wait()
            return "group"

        def drop(self, late: str) -> None:
            dropped.set()

    with pytest.raises(ConnectionAbortedError), watchdog.timing("regroup", connections):
        connections.connect(LateGroup())

    assert not dropped.is_set()
    come.set()
    assert dropped.wait(30)


def test_how_long_an_activity_may_take_follows_from_how_long_it_took() -> None:
    watchdog = Watchdog(floor_seconds=5, first_seconds=60)
    assert watchdog.limit("round") == 60

    with watchdog.timing("round", Connections()):
        pass

    assert watchdog.limit("round") == 5
    assert watchdog.limit("evaluation") == 60


def test_several_runs_without_a_word_between_them_may_take_as_long_as_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round of 16 steps follows one of a single step, whose limit it would exceed."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watchdog = Watchdog(floor_seconds=0, first_seconds=60)
    with watchdog.timing(ROUND, Connections()):
        now += 1
    assert watchdog.limit(ROUND, runs=16) == 16 * watchdog.limit(ROUND) == 160

    with watchdog.timing(ROUND, Connections(), runs=16):
        now += 32
    assert watchdog.limit(ROUND) == 20


def test_what_was_never_done_may_be_judged_by_what_it_is_like() -> None:
    watchdog = Watchdog(floor_seconds=0, first_seconds=60)
    assert watchdog.limit("search", like=ROUND) == 60

    with watchdog.timing("round", Connections()):
        pass

    assert watchdog.limit("search", like=ROUND) == watchdog.limit("round") < 60
    assert watchdog.limit("mirror") == 60
    assert watchdog.limit_to_move(100_000_000) == 2


def test_of_what_is_done_several_times_in_a_row_each_counts_by_itself() -> None:
    watchdog, began = Watchdog(floor_seconds=0, first_seconds=60), time.monotonic()

    with watchdog.timing("evaluation", Connections()) as timing:
        for _ in range(3):
            threading.Event().wait(0.02)
            timing.lap()

    assert watchdog.limit("evaluation") < MULTIPLE * (time.monotonic() - began)


def test_an_overdue_activity_has_longer_for_each_run_until_all_end_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("pipetransformer.elastic.transport.watchdog.time", SimpleNamespace(monotonic=lambda: now))
    watchdog = Watchdog(floor_seconds=20, first_seconds=20)
    with pytest.raises(ConnectionError), watchdog.timing("evaluation", Connections()):
        now += 20
        raise ConnectionError

    with watchdog.timing("evaluation", Connections()) as timing:
        now += 5
        timing.lap()
        assert watchdog.limit("evaluation") == 2 * MULTIPLE * 5
    assert watchdog.limit("evaluation") == MULTIPLE * 5


def test_no_operation_of_a_group_ends_before_the_watchdog_would_end_it() -> None:
    memory_of_a_gpu = 141_000_000_000

    assert Transport("127.0.0.1").timeout.total_seconds() > Watchdog().limit_to_move(memory_of_a_gpu)


def test_the_limit_doubles_each_time_an_activity_is_cut_off(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may only have become slower, as a round in which all blocks train again."""
    now = 0.0
    monkeypatch.setattr("pipetransformer.elastic.transport.watchdog.time", SimpleNamespace(monotonic=lambda: now))
    with watchdog.timing("round", Connections()):
        pass
    limit = watchdog.limit("round")

    for times in (2, 4):
        connections, cut_off = Connections(), threading.Event()
        connections.after_shut = cut_off.set
        with pytest.raises(ConnectionError), watchdog.timing("round", connections):
            now += times * limit
            assert cut_off.wait(30)
            raise ConnectionError
        assert watchdog.limit("round") == times * limit

    with watchdog.timing("round", Connections()):
        pass
    assert watchdog.limit("round") == limit


def test_a_worker_cut_off_by_a_less_patient_peer_waits_longer_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("pipetransformer.elastic.transport.watchdog.time", SimpleNamespace(monotonic=lambda: now))
    watchdog = Watchdog(floor_seconds=20, first_seconds=20)

    for seconds, times in ((15, 2), (10, 2)):
        with pytest.raises(ConnectionError), watchdog.timing("round", Connections()):
            now += seconds
            raise ConnectionError
        assert watchdog.limit("round") == times * 20


def test_what_failed_does_not_count_as_how_long_it_takes() -> None:
    watchdog = Watchdog(floor_seconds=5, first_seconds=60)

    with pytest.raises(RuntimeError), watchdog.timing("round", Connections()):
        raise RuntimeError

    assert watchdog.limit("round") == 60


@pytest.mark.parametrize(
    ("hung", "point", "at"),
    [
        pytest.param(2, HookPoint.COMPUTED, 8, id="round"),
        pytest.param(0, HookPoint.MOVING, 2, id="transfer-of-the-leader"),
        pytest.param(1, HookPoint.ENDED, 29, id="end-of-the-job"),
        pytest.param(0, HookPoint.FOUND, 2, id="leader-before-the-rendezvous", marks=pytest.mark.slow),
        pytest.param(3, HookPoint.MET, 2, id="while-groups-are-made", marks=pytest.mark.slow),
        pytest.param(1, HookPoint.COMMITTED, 14, id="evaluation", marks=pytest.mark.slow),
    ],
)
def test_survivors_of_a_worker_that_hangs_go_on_without_it(
    hung: int, point: HookPoint, at: int, tmp_path: Path
) -> None:
    survivors = [worker for worker in range(4) if worker != hung]
    script = [
        Scripted(2, 2, [0, 1, 2, 3]),
        Scripted(2, 2, [0, 2, 1, 3], at_step=9),
        Scripted(3, 1, survivors, after_loss=hung),
    ]

    run = run_job(
        make_spec(ADAMW), script, tmp_path, faults={hung: Faults(stopped_at=(point, at))}, watchdog_seconds=5,
        connection_timeout=OPERATION_TIMEOUT,
    )  # fmt: skip

    assert run.endings == dict.fromkeys(survivors, "Finished"), "nobody waited for that timeout, which is an hour"
    findings = check(tmp_path, TRAINING_SAMPLES, EPOCHS)
    assert findings.clean and findings.redone == 0
