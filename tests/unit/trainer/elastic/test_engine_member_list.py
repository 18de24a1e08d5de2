"""The list of members: the leader gets it from the operator, and the others from the leader, unless it is silent."""

import datetime
import threading
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from pipetransformer.elastic.generations import channel_source, member_list
from pipetransformer.elastic.generations.channel_client import ChannelClient
from pipetransformer.elastic.generations.channel_source import ChannelSource
from pipetransformer.elastic.generations.member_list import generation_store, read_shared, share_if_leader
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, host_store
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Generation, Member, Ready, ResizeReason
from tests.testkit.trainer.silence import nobody_listens
from tests.testkit.trainer.stub_channel import StubChannel

pytestmark = pytest.mark.timeout(120)

SECONDS = datetime.timedelta(seconds=10)
LONG, SHORT = 600.0, 0.05


class Worker:
    """One that hosts a store and asks the channel."""

    def __init__(self, stub: StubChannel, name: str) -> None:
        self.name = name
        self.store, self.address = host_store("127.0.0.1", SECONDS)
        self.source = ChannelSource(ChannelClient(stub.url, "ns/job", name), self.address, self.store)

    def holds(self, generation: Generation) -> bool:
        """Whether it has handed the list of this generation on."""
        return bool(generation_store(generation, self.store).check(["members"]))


@pytest.fixture
def stub() -> Iterator[StubChannel]:
    channel = StubChannel(3, Layout(3, 1))
    yield channel
    channel.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No leader counts as silent, unless a test says so."""
    monkeypatch.setattr(channel_source, "LEADER_SECONDS", LONG)


def workers(stub: StubChannel) -> list[Worker]:
    return [Worker(stub, f"job-w{number}") for number in range(3)]


def generation(members: list[Member], number: int = 1, **changes: str) -> Generation:
    return Generation(
        layout_generation=number,
        stages=len(members),
        pipelines=1,
        members=members,
        leader=members[0].name,
        reason=ResizeReason.START,
        **({"job_uid": "job-uid", "nonce": "nonce-1"} | changes),
    )


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Where nobody listens."""
    with nobody_listens() as address:
        yield address


def test_of_all_workers_only_the_leader_asks_the_operator_for_the_members(
    stub: StubChannel, threads: ThreadPoolExecutor
) -> None:
    crowd = workers(stub)
    found = list(threads.map(lambda worker: worker.source.next_generation(0), crowd))

    assert found == [stub.generations[0]] * 3
    assert stub.asked_for_members == ["job-w0"]


def test_the_operator_is_asked_if_a_leader_dies_before_it_passes_the_list(
    stub: StubChannel, silent_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_source, "LEADER_SECONDS", SHORT)
    stub.ready("job-w0", Ready(address=silent_address))
    stub.ready("job-w1", Ready(address="127.0.0.1:1"))

    assert Worker(stub, "job-w2").source.next_generation(0) == stub.generations[0]
    assert stub.asked_for_members == ["job-w2"]


def test_a_leader_that_lives_and_hands_nothing_on_is_given_up_too(
    stub: StubChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_source, "LEADER_SECONDS", SHORT)
    leader, follower, _ = workers(stub)
    stub.ready("job-w0", Ready(address=leader.address))
    stub.ready("job-w2", Ready(address="127.0.0.1:1"))

    assert follower.source.next_generation(0) == stub.generations[0]
    assert stub.asked_for_members == ["job-w1"]


def test_a_worker_leaves_a_dead_leader_for_the_next_generations_leader(
    stub: StubChannel, threads: ThreadPoolExecutor, silent_address: str
) -> None:
    stub.ready("job-w0", Ready(address=silent_address))
    _, successor, follower = workers(stub)
    stub.ready("job-w1", Ready(address=successor.address))
    waits = threads.submit(follower.source.next_generation, 0)
    assert stub.wait_for(lambda: stub.polls > 0, 30)

    assert stub.wait_for(lambda: len(stub.generations) == 1, 30)
    second = generation(stub.generations[0].members[1:], 2, nonce="nonce-2")
    stub.generations.append(second)
    share_if_leader(second, "job-w1", successor.store)
    follower.source.on_published(2)  # as its heartbeat learns

    assert waits.result(30) == second
    assert stub.asked_for_members == []


def test_a_list_of_another_generation_or_job_is_not_read() -> None:
    store, address = host_store("127.0.0.1", SECONDS)
    members = [Member(name=name, uid=name, address=address) for name in ("job-w0", "job-w1")]
    present = generation(members, 2)
    for other in (
        generation(members, 1),
        generation(members, 2, nonce="nonce-2"),
        generation(members, 2, job_uid="another"),
    ):
        share_if_leader(other, "job-w0", store)
    assert read_shared(present.notice(), SHORT, lambda: False) is None

    share_if_leader(present, "job-w0", store)
    assert read_shared(present.notice(), LONG, lambda: False) == present


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(lambda old: zlib.compress(old.model_dump_json().encode()), id="an old list"),
        pytest.param(lambda old: zlib.compress(b"{}"), id="no list"),
        pytest.param(lambda old: b"nonsense", id="no bytes of ours"),
    ],
)
def test_a_leader_that_says_something_else_is_not_believed(said: object) -> None:
    store, address = host_store("127.0.0.1", SECONDS)
    members = [Member(name=name, uid=name, address=address) for name in ("job-w0", "job-w1")]
    present, old = generation(members, 2), generation(members[:1], 1)
    assert callable(said)
    generation_store(present, store).set("members", said(old))

    assert read_shared(present.notice(), LONG, lambda: False) is None


def test_the_present_leader_hands_the_list_on_while_it_still_trains(
    stub: StubChannel, threads: ThreadPoolExecutor
) -> None:
    leader, follower, joiner = workers(stub)
    for worker in (leader, follower, joiner):
        stub.ready(worker.name, Ready(address=worker.address))
    watched = threads.submit(leader.source.watch, 1)
    stub.publish(Layout(1, 3))

    assert joiner.source.next_generation(1) == watched.result(30) == stub.generations[1]
    assert stub.asked_for_members == ["job-w0"]


def test_the_next_leader_passes_the_list_once_it_has_the_generation(stub: StubChannel) -> None:
    leader, follower, joiner = workers(stub)
    members = [Member(name=each.name, uid=each.name, address=each.address) for each in (follower, leader, joiner)]
    passed_on = generation(members, 2)
    for worker in (leader, follower):
        GenerationRendezvousHandler(worker.name, worker.store, worker.source, timeout=SECONDS).announce(passed_on)

    assert follower.holds(passed_on) and not leader.holds(passed_on)
    assert read_shared(passed_on.notice(), LONG, lambda: False) == passed_on


def test_the_list_is_dropped_once_all_have_met(stub: StubChannel, threads: ThreadPoolExecutor) -> None:
    crowd = workers(stub)
    handlers = [GenerationRendezvousHandler(one.name, one.store, one.source, timeout=SECONDS) for one in crowd]
    infos = list(threads.map(lambda handler: handler.next_rendezvous(), handlers))

    assert [info.rank for info in infos] == [0, 1, 2]
    assert not crowd[0].holds(stub.generations[0])


def test_a_job_that_ends_while_its_leader_is_silent_ends_the_wait(
    stub: StubChannel, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, take = threading.Event(), member_list.read_shared

    def begin(*arguments: object) -> Generation | None:
        waits.set()
        return take(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(channel_source, "read_shared", begin)
    leader, follower, _ = workers(stub)
    stub.ready("job-w0", Ready(address=leader.address))
    stub.ready("job-w2", Ready(address="127.0.0.1:1"))
    asks = threads.submit(follower.source.next_generation, 0)
    assert waits.wait(30)
    follower.source.close()

    with pytest.raises(RendezvousClosedError):
        asks.result(30)


def test_a_list_of_4096_members_takes_100_kb_in_the_leaders_store() -> None:
    """Each of 4,095 others reads it."""
    store, _ = host_store("127.0.0.1", SECONDS)
    members = [
        Member(name=f"transformer-w{number}", uid=str(uuid.uuid4()), address=f"10.0.{number >> 8}.{number & 255}:29400")
        for number in range(4096)
    ]
    large = generation(members)
    share_if_leader(large, members[0].name, store)
    assert len(generation_store(large, store).get("members")) < 150_000
