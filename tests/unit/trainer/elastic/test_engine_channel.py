"""The worker's side of the channel: it waits out an absent operator and says everything again until it is heard."""

import datetime
import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from pipetransformer.elastic.generations import channel_client, channel_source, senders
from pipetransformer.elastic.generations.channel_client import (
    Backoff,
    ChannelClient,
    ChannelUnavailableError,
    JobEndedError,
)
from pipetransformer.elastic.generations.channel_source import ChannelSource
from pipetransformer.elastic.generations.member_list import split_address
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, LeaverError, host_store
from pipetransformer.elastic.generations.senders import HeartbeatSender, ReportSender
from pipetransformer.elastic.generations.watcher import GenerationWatcher
from pipetransformer.elastic.transport.connections import Connections
from pipetransformer.elastic.transport.groups import HashStore, PrefixStore, Store
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import (
    Generation,
    Heartbeat,
    HeartbeatReply,
    Member,
    Outcome,
    Ready,
    Report,
    ReportReply,
    ResizeReason,
)
from tests.testkit.trainer.silence import nobody_listens
from tests.testkit.trainer.storing import until
from tests.testkit.trainer.stub_channel import StubChannel

pytestmark = pytest.mark.timeout(120)

SECONDS = datetime.timedelta(seconds=10)


@pytest.fixture
def stub() -> Iterator[StubChannel]:
    operator_channel = StubChannel(1, Layout(1, 1))
    yield operator_channel
    operator_channel.close()


def client(stub: StubChannel) -> ChannelClient:
    return ChannelClient(stub.url, "ns/job", "job-w0")


def make_report(step: int) -> Report:
    return Report(job_uid="job-uid", layout_generation=1, step=step, boundary=0, num_layers=4, bytes_budget=10)


def test_a_worker_says_that_it_is_ready_and_gets_its_generation(stub: StubChannel) -> None:
    generation = ChannelSource(client(stub), "127.0.0.1:1", HashStore()).next_generation(0)

    assert generation.layout_generation == 1
    assert generation.members[0].address == "127.0.0.1:1"


def test_the_polls_of_a_worker_share_a_connection_until_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_source, "POLL_SECONDS", 0)
    stub = StubChannel(2, Layout(2, 1))
    try:
        source = ChannelSource(client(stub), "127.0.0.1:1", HashStore())
        threading.Thread(target=source.next_generation, args=(0,), daemon=True).start()
        assert stub.wait_for(lambda: stub.polls >= 3, 30)
        assert stub.connections == 1
        stub.down.set()
        assert stub.wait_for(lambda: stub.refused >= 1, 30)
        polls = stub.polls
        stub.down.clear()
        assert stub.wait_for(lambda: stub.polls >= polls + 3, 30)
        assert stub.connections == 1 + stub.refused
    finally:
        stub.ready("job-w1", Ready(address="127.0.0.1:3"))
        stub.close()


def test_a_worker_waits_until_the_operator_is_back(stub: StubChannel) -> None:
    stub.down.set()
    source = ChannelSource(client(stub), "127.0.0.1:1", HashStore())
    found: list[Generation] = []
    thread = threading.Thread(target=lambda: found.append(source.next_generation(0)))
    thread.start()
    assert not found

    stub.down.clear()
    thread.join(30)

    assert found[0].layout_generation == 1


def test_a_report_is_sent_again_until_it_is_acknowledged(stub: StubChannel) -> None:
    source = ChannelSource(client(stub), "127.0.0.1:1", HashStore())
    source.next_generation(0)
    stub.down.set()
    sender = ReportSender(client(stub), source, Beating(mock.Mock()))
    sender.start()
    sender.submit(make_report(1), urgent=True)
    assert not sender.flush(timeout=0.1)

    sender.submit(make_report(2), urgent=True)
    stub.down.clear()

    assert sender.flush(timeout=10)
    assert stub.reports[-1].step == 2
    sender.stop()


def test_answers_to_heartbeats_and_reports_ask_for_a_checkpoint(stub: StubChannel) -> None:
    source = ChannelSource(client(stub), "127.0.0.1:1", HashStore())
    source.next_generation(0)
    beating, reporting = (Beating(lambda: Heartbeat(layout_generation=1)) for _ in range(2))
    stub.asks_for = "one"
    heartbeats, reports = HeartbeatSender(client(stub), source, beating), ReportSender(client(stub), source, reporting)
    heartbeats.start()
    reports.start()
    reports.submit(make_report(1), urgent=True)
    assert reports.flush(timeout=10)
    assert stub.wait_for(lambda: bool(beating.tokens), 10)
    heartbeats.stop()
    reports.stop()
    assert set(beating.tokens) == set(reporting.tokens) == {"one"}


class TooMany(BaseHTTPRequestHandler):
    """Asks everybody to come again later."""

    later = "7"

    def do_GET(self) -> None:
        self.send_response(429)
        self.send_header("Retry-After", self.later)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Impatient(threading.Event):
    """Notes how long it was to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return True


@pytest.mark.parametrize(("later", "seconds"), [("7", 7.0), ("700", 60.0), ("tomorrow", 0.5)])
def test_a_worker_that_asks_too_often_waits_as_long_as_the_operator_says(
    later: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not longer than a minute."""
    monkeypatch.setattr(TooMany, "later", later)
    stop = Impatient()
    backoff = Backoff(stop)
    with HTTPServer(("127.0.0.1", 0), TooMany) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(ChannelUnavailableError, match="429") as caught:
            ChannelClient(f"http://127.0.0.1:{server.server_port}", "ns/job", "job-w0").generation(0, 1)
    backoff.wait(caught.value.retry_after)
    for _ in range(6):
        backoff.wait()
    assert stop.waits == [seconds, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    backoff.reset()
    backoff.wait()
    assert stop.waits[-1] == 0.5


class Beating:
    """What a heartbeat speaks for; counts how often it hears of its job's end."""

    def __init__(self, heartbeat: Callable[[], Heartbeat]) -> None:
        self.heartbeat = heartbeat
        self.ended = 0
        self.tokens: list[str] = []

    def on_checkpoint_asked(self, token: str) -> None:
        self.tokens.append(token)

    def on_job_ended(self) -> None:
        self.ended += 1

    def on_stop_asked(self) -> None:
        """Go on."""


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (ChannelUnavailableError("HTTP 429", retry_after=7.0), 7.0),
        (ChannelUnavailableError("HTTP 429", retry_after=1.0), senders.HEARTBEAT_SECONDS),
        (HeartbeatReply(layout_generation=1, next_seconds=30.0), 30.0),
        (HeartbeatReply(layout_generation=1), senders.HEARTBEAT_SECONDS),
    ],
    ids=["refused", "refused for less", "asked to beat rarely", "asked for nothing"],
)
def test_a_heartbeat_waits_as_long_as_the_operator_says(answer: Exception | HeartbeatReply, seconds: float) -> None:
    sender = HeartbeatSender(
        mock.Mock(heartbeat=mock.Mock(side_effect=[answer, JobEndedError("it has ended")])),
        mock.Mock(),
        Beating(mock.Mock()),
    )
    sender._wake = wake = Impatient()
    sender._run()
    assert wake.waits == [seconds]


def sending(answer: Callable[[Report], ReportReply]) -> ReportSender:
    """Sends reports to an operator that answers so."""
    sender = ReportSender(mock.Mock(report=answer), mock.Mock(), Beating(mock.Mock()))
    sender.start()
    return sender


def test_a_report_of_mere_progress_waits_as_long_as_the_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is urgent does not, and stays so if another one replaces it."""
    monkeypatch.setattr(senders, "REPORT_SECONDS", 0.0)
    heard: list[int] = []
    hears, goes_on = threading.Event(), threading.Event()

    def answer(report: Report) -> ReportReply:
        heard.append(report.step)
        if report.step == 3:
            hears.set()
            goes_on.wait(10)
        return ReportReply(layout_generation=1, next_seconds=3600.0)

    sender = sending(answer)
    sender.submit(make_report(1), urgent=True)
    assert sender.flush(10)
    sender.submit(make_report(2), urgent=False)
    assert not sender.flush(0.2)
    sender.submit(make_report(3), urgent=True)
    assert hears.wait(10)
    sender.submit(make_report(4), urgent=True)
    sender.submit(make_report(5), urgent=False)
    goes_on.set()
    assert sender.flush(10)
    sender.stop()
    assert heard == [1, 3, 5]


def test_a_leader_that_was_followed_by_another_repeats_no_report() -> None:
    tried = threading.Event()

    def refuse(report: Report) -> ReportReply:
        tried.set()
        raise ChannelUnavailableError("HTTP 503")

    sender = sending(refuse)
    sender.submit(make_report(1), urgent=True)
    assert tried.wait(10)
    assert not sender.flush(0)

    sender.forget()

    assert sender.flush(0), "nothing is left to send"
    sender.stop()


def test_a_server_that_does_not_take_connections_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_client, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        address = "{}:{}".format(*full.getsockname())
        started = time.monotonic()
        with pytest.raises(ChannelUnavailableError, match="timed out"):
            ChannelClient(f"http://{address}", "ns/job", "job-w0").report(make_report(1))
    assert time.monotonic() - started < 10, "it waited as long as for an answer"


def test_all_that_a_worker_says_and_hears_goes_on_once_its_token_is_back(stub: StubChannel, tmp_path: Path) -> None:
    """A projected volume is exchanged: the file is not there for a moment."""
    token, tried = tmp_path / "token", threading.Semaphore(0)
    speaks = ChannelClient(stub.url, "ns/job", "job-w0", token)
    source = ChannelSource(speaks, "127.0.0.1:1", HashStore())

    def beat() -> Heartbeat:
        tried.release()
        return Heartbeat(layout_generation=1)

    heartbeats, reports, watcher = (
        HeartbeatSender(speaks, source, Beating(beat)),
        ReportSender(speaks, source, Beating(beat)),
        GenerationWatcher(source.next_generation),
    )  # fmt: skip
    stub.ready("job-w0", Ready(address="127.0.0.1:1"))
    reports.submit(make_report(1), urgent=True)
    watcher.watch(0)
    reports.start()
    heartbeats.start()
    for _ in range(2):
        assert tried.acquire(timeout=10)
        heartbeats.beat_now()

    token.write_text("ours")

    assert stub.wait_for(lambda: bool(stub.beats), 30)
    assert reports.flush(10)
    assert stub.wait_for(lambda: stub.polls > 0, 30)
    heartbeats.stop()
    reports.stop()


def test_an_unreadable_authority_is_read_again_with_the_next_request(tmp_path: Path) -> None:
    authority = tmp_path / "ca.crt"
    operator_channel = ChannelClient("https://127.0.0.1:1", "ns/job", "job-w0", None, authority)
    for broken in (None, "", "-----BEGIN CERTIFICATE-----"):
        if broken is not None:
            authority.write_text(broken)
        with pytest.raises(ChannelUnavailableError):
            operator_channel.report(make_report(1))


class Zips(BaseHTTPRequestHandler):
    """Answers each heartbeat with a packed body, because the worker says that it can read one."""

    def do_POST(self) -> None:
        body = HeartbeatReply(layout_generation=7).model_dump_json(by_alias=True).encode()
        self.send_response(200 if self.headers["Accept-Encoding"] == "gzip" else 406)
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(gzip.compress(body))

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_packed_answer_is_read() -> None:
    with HTTPServer(("127.0.0.1", 0), Zips) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        speaks = ChannelClient(f"http://127.0.0.1:{server.server_port}", "ns/job", "job-w0")
        assert speaks.heartbeat(Heartbeat(layout_generation=1)).layout_generation == 7


class Proxy(BaseHTTPRequestHandler):
    """Answers by itself what it should have passed on."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>Please log in</html>")

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    "ask",
    [
        lambda channel: channel.generation(0, 1),
        lambda channel: channel.heartbeat(Heartbeat(layout_generation=1)),
        lambda channel: channel.report(make_report(1)),
    ],
    ids=["generation", "heartbeat", "report"],
)
def test_an_answer_that_is_not_the_operators_is_none(ask: Callable[[ChannelClient], object]) -> None:
    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(ChannelUnavailableError, match="the answer is no"):
            ask(ChannelClient(f"http://127.0.0.1:{server.server_port}", "ns/job", "job-w0"))


def test_heartbeats_tell_of_newer_generations(stub: StubChannel) -> None:
    source = ChannelSource(client(stub), "127.0.0.1:1", HashStore())
    beat = Heartbeat(layout_generation=1, lost_peers=["job-w3"])
    sender = HeartbeatSender(client(stub), source, Beating(lambda: beat))
    sender.start()

    assert stub.wait_for(lambda: bool(stub.beats), 30)
    assert stub.beats[0].lost_peers == ["job-w3"]
    sender.stop()


def test_the_heartbeat_that_hears_of_the_jobs_end_is_the_last(stub: StubChannel) -> None:
    subject = Beating(lambda: Heartbeat(layout_generation=1))
    source = ChannelSource(client(stub), "127.0.0.1:1", HashStore())
    sender = HeartbeatSender(client(stub), source, subject)
    stub.end()
    sender.start()
    sender._thread.join(30)

    assert not sender._thread.is_alive()
    assert subject.ended == len(stub.beats) == 1


def test_a_job_that_has_ended_closes_the_rendezvous(stub: StubChannel) -> None:
    source = ChannelSource(client(stub), "127.0.0.1:1", HashStore())
    source.next_generation(0)
    stub.report(make_report(9).model_copy(update={"outcome": Outcome.SUCCEEDED}))

    with pytest.raises(RendezvousClosedError):
        source.next_generation(1)


class OneGeneration:
    """A source that knows one generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def next_generation(self, after: int) -> Generation:
        return self._generation

    def newest(self) -> int:
        return self._generation.layout_generation

    def close(self) -> None:
        """Nothing waits."""


def generation(leader: str, members: list[str], leavers: list[str], address: str) -> Generation:
    return Generation(
        job_uid="uid",
        layout_generation=3,
        stages=1,
        pipelines=len(members),
        members=[Member(name=name, uid=name, address=address) for name in members],
        leavers=[Member(name=name, uid=name, address=address) for name in leavers],
        leader=leader,
        nonce="nonce",
        reason=ResizeReason.RELEASE,
    )


def test_members_and_leavers_meet_at_the_leaders_store() -> None:
    leader_store, address = host_store("127.0.0.1", SECONDS)
    published = generation("a", ["a"], ["b"], address)
    other_store, _ = host_store("127.0.0.1", SECONDS)
    leaver = GenerationRendezvousHandler("b", other_store, OneGeneration(published), timeout=SECONDS)
    caught: list[LeaverError] = []

    def leave() -> None:
        try:
            leaver.next_rendezvous()
        except LeaverError as error:
            caught.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    handler = GenerationRendezvousHandler("a", leader_store, OneGeneration(published), timeout=SECONDS)
    assert handler.num_nodes_waiting() == 1
    info = handler.next_rendezvous()
    thread.join(30)

    assert (info.rank, info.world_size, caught[0].rank) == (0, 1, 1)
    assert handler.num_nodes_waiting() == 0
    info.store.set("key", "value")
    assert caught[0].store.get("key") == b"value"
    for store in (info.store, caught[0].store):
        assert getattr(store, "timeout") == SECONDS, "they agree on a plan there"  # noqa: B009 - torch's stub lacks it


def test_a_worker_in_no_group_says_above_which_generation_it_waits() -> None:
    store, address = host_store("127.0.0.1", SECONDS)
    said: list[int | None] = []

    class Watched(OneGeneration):
        def next_generation(self, after: int) -> Generation:
            said.append(handler.waiting_after)
            return super().next_generation(after)

    third = generation("a", ["a"], [], address)
    handler = GenerationRendezvousHandler("a", store, Watched(third), timeout=SECONDS)
    handler.find_next()
    said.append(handler.waiting_after)
    handler.announce(third.model_copy(update={"layout_generation": 4}))
    handler.find_next()
    handler.find_next()

    assert said == [0, None, 4], "one that is announced is not waited for"


def test_a_generation_all_have_voted_for_is_met_after_the_end_of_the_job() -> None:
    store, address = host_store("127.0.0.1", SECONDS)
    handler = GenerationRendezvousHandler(
        "a", store, OneGeneration(generation("a", ["a"], [], address)), timeout=SECONDS
    )
    handler.announce(generation("a", ["a"], [], address))
    handler.set_closed()

    assert handler.find_next().layout_generation == 3
    with pytest.raises(RendezvousClosedError):
        handler.find_next()


class Hasty(GenerationRendezvousHandler):
    """Waits for a moment for the others, however long it took to reach the leader's store."""

    def _connect(self, generation: Generation, connections: Connections, seconds: float) -> Store:
        store = super()._connect(generation, connections, seconds)
        self._timeout = datetime.timedelta(milliseconds=50)
        return store


def test_a_participant_that_does_not_come_is_named() -> None:
    store, address = host_store("127.0.0.1", SECONDS)
    handler = Hasty("a", store, OneGeneration(generation("a", ["a", "b"], [], address)), timeout=SECONDS)

    with pytest.raises(RendezvousTimeoutError, match="b did not join"):
        handler.next_rendezvous()


def test_who_has_come_and_left_is_not_waited_for() -> None:
    store, address = host_store("127.0.0.1", SECONDS)
    published = generation("a", ["a", "b"], [], address)
    other_store, _ = host_store("127.0.0.1", SECONDS)
    joiner = GenerationRendezvousHandler("b", other_store, OneGeneration(published), timeout=SECONDS)
    joiner.patient = True  # which does not outlast its connection
    with ThreadPoolExecutor() as threads:
        comes = threads.submit(joiner.next_rendezvous)
        until(lambda: PrefixStore("uid/3/nonce", store).check(["here/b"]))
        joiner.connections.shut()
        with pytest.raises(RendezvousConnectionError):
            comes.result()
    joiner.take_leave()

    handler = GenerationRendezvousHandler("a", store, OneGeneration(published), timeout=SECONDS)
    with pytest.raises(RendezvousConnectionError, match="b left the rendezvous"):
        handler.next_rendezvous()


def test_a_joiner_waits_for_those_who_still_train_as_long_as_it_takes() -> None:
    store, address = host_store("127.0.0.1", SECONDS)
    other_store, _ = host_store("127.0.0.1", SECONDS)
    published = generation("a", ["a", "b"], [], address)
    training = GenerationRendezvousHandler("a", store, OneGeneration(published), timeout=SECONDS)
    joiner = Hasty("b", other_store, OneGeneration(published), timeout=SECONDS)
    joiner.patient = True
    waiting = threading.Thread(target=joiner.next_rendezvous)
    waiting.start()
    until(lambda: PrefixStore("uid/3/nonce", store).check(["here/b"]))

    waiting.join(0.3)
    assert waiting.is_alive()
    assert training.next_rendezvous().world_size == 2
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_generation_that_does_not_name_the_worker_is_refused() -> None:
    store, address = host_store("127.0.0.1", SECONDS)
    handler = GenerationRendezvousHandler(
        "z", store, OneGeneration(generation("a", ["a"], [], address)), timeout=SECONDS
    )

    with pytest.raises(RendezvousStateError, match="'z'"):
        handler.next_rendezvous()


def test_the_others_are_named_in_a_circle_from_the_next_one_on() -> None:
    """A report of lost peers may be cut, and a worker most often notices those that follow it."""
    store, address = host_store("127.0.0.1", SECONDS)
    published = generation("a", ["a", "b", "c"], ["d"], address)
    handlers = [GenerationRendezvousHandler(name, store, OneGeneration(published), timeout=SECONDS) for name in "bz"]
    assert handlers[0].others == [], "before the first generation"
    for handler in handlers:
        handler.find_next()

    assert [handler.others for handler in handlers] == [["c", "d", "a"], []]


def test_the_newest_generation_is_the_highest_that_was_seen() -> None:
    """Answers to heartbeats and reports may come out of order."""
    source = ChannelSource(mock.Mock(), "127.0.0.1:1", HashStore())
    for number in (2, 3, 2):
        source.on_published(number)
    assert source.newest() == 3


def test_addresses_split_with_and_without_brackets() -> None:
    assert split_address("10.0.0.1:29500") == ("10.0.0.1", 29500)
    assert split_address("[fd00::1]:29500") == ("fd00::1", 29500)


class GivenUp(OneGeneration):
    """A source by which there is a newer generation than the one that it gives."""

    def newest(self) -> int:
        return super().newest() + 1


def test_no_worker_waits_for_a_dead_leader_of_a_void_generation() -> None:
    store, _ = host_store("127.0.0.1", SECONDS)
    with nobody_listens() as address:
        published = generation("a", ["a", "b"], [], address)
        handler = GenerationRendezvousHandler("b", store, GivenUp(published), timeout=datetime.timedelta(seconds=600))

        with pytest.raises(RendezvousConnectionError, match="store of leader a"):
            handler.next_rendezvous()


def test_a_leader_that_hangs_is_given_up_once_the_connections_are_shut() -> None:
    """A client of a store tries on by itself, half a second each time, and cannot be told to stop."""
    store, _ = host_store("127.0.0.1", SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as hangs, ThreadPoolExecutor() as threads:
        published = generation("a", ["a", "b"], [], f"127.0.0.1:{hangs.getsockname()[1]}")
        handler = GenerationRendezvousHandler("b", store, OneGeneration(published), timeout=SECONDS)
        handler.find_next()
        comes = threads.submit(handler.next_rendezvous)
        with hangs.accept()[0], hangs.accept()[0]:  # one that asks whether somebody listens, and the client
            handler.connections.shut()
            with pytest.raises(RendezvousConnectionError, match="store of leader a"):
                comes.result()


def test_a_leader_that_hangs_is_given_up_after_the_timeout() -> None:
    store, _ = host_store("127.0.0.1", SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        published = generation("a", ["a", "b"], [], f"127.0.0.1:{hangs.getsockname()[1]}")
        short = datetime.timedelta(milliseconds=300)
        handler = GenerationRendezvousHandler("b", store, OneGeneration(published), timeout=short)
        with pytest.raises(RendezvousConnectionError, match="store of leader a"):
            handler.next_rendezvous()
        handler.take_leave()  # ends, too


def test_torchrun_finds_our_handler() -> None:
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    assert "pipetransformer" in rendezvous_handler_registry._registry
