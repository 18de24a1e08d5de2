"""Entries follow their samples from one worker's cache to another's."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.cache import ActivationCache
from pipetransformer_contract.spec import Cache

pytestmark = pytest.mark.timeout(60)

SAMPLES = 40


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[Callable[..., ActivationCache]]:
    """Builds caches of workers that have frozen the same unit."""
    caches: list[ActivationCache] = []

    def make(**settings: object) -> ActivationCache:
        torch.manual_seed(0)
        spec = Cache.model_validate({"policy": "Always", "memory_bytes": 1 << 20} | settings)
        cache = ActivationCache(spec, job="job", scratch=tmp_path)
        cache.use([nn.Linear(2, 2).eval()])
        assert cache.settle()
        caches.append(cache)
        return cache

    yield make
    for cache in caches:
        cache.close()


def fill(cache: ActivationCache) -> None:
    for sample in range(SAMPLES):
        cache.keep("train", sample, 0, entry(sample), None)


def entry(sample: int) -> Tensor:
    return torch.full((3, 2), float(sample), dtype=torch.bfloat16)


def held(cache: ActivationCache) -> list[int]:
    """Samples whose entries are here and whole."""
    samples = sorted(key.sample for key in cache.store.all_keys())
    for sample in samples:
        place = cache.find("train", sample, 0)
        assert place is not None
        read = cache.read(place[1])
        assert read is not None and torch.equal(read, entry(sample))
    return samples


@pytest.mark.parametrize("settings", [{}, {"memory_bytes": 60, "disk_bytes": 1 << 20}], ids=["memory", "disk"])
def test_entries_go_to_the_pipelines_that_use_them_now(
    make_cache: Callable[..., ActivationCache], settings: dict[str, int]
) -> None:
    caches = [make_cache(**settings) for _ in range(3)]
    fill(caches[0])
    addresses = [cache.listen("127.0.0.1") for cache in caches]

    caches[0].hand_over(lambda key: key.sample % 3, 0, addresses.__getitem__)
    caches[0].wait_until_handed_over(30)

    wait_for(lambda: sum(len(cache.store.all_keys()) for cache in caches) == SAMPLES)
    assert [held(cache) for cache in caches] == [list(range(p, SAMPLES, 3)) for p in range(3)]


def test_a_worker_that_feeds_no_pipeline_any_more_gives_all_away(make_cache: Callable[..., ActivationCache]) -> None:
    old, new = make_cache(), make_cache()
    fill(old)

    old.use(())  # its new role comes first, and entries follow after the first step
    old.hand_over(lambda key: 0, None, lambda pipeline: new.listen("127.0.0.1"))
    old.wait_until_handed_over(30)

    wait_for(lambda: len(new.store.all_keys()) == SAMPLES)
    assert held(new) == list(range(SAMPLES)) and held(old) == []


@pytest.mark.parametrize("address", ["", json.dumps(["127.0.0.1", 9, "token"])], ids=["without a cache", "gone"])
def test_entries_for_a_peer_that_takes_none_are_given_up(
    make_cache: Callable[..., ActivationCache], address: str
) -> None:
    cache = make_cache()
    fill(cache)

    cache.hand_over(lambda key: key.sample % 2, 0, lambda pipeline: address)
    cache.wait_until_handed_over(30)

    assert held(cache) == list(range(0, SAMPLES, 2))


def test_entries_of_another_prefix_are_not_taken(make_cache: Callable[..., ActivationCache]) -> None:
    old, new = make_cache(), make_cache()
    old.use([nn.Linear(2, 2).eval()])
    assert old.settle()
    fill(old)

    old.hand_over(lambda key: 1, 0, lambda pipeline: new.listen("127.0.0.1"))
    old.wait_until_handed_over(30)

    assert held(old) == [] and held(new) == []


def test_a_closed_cache_takes_no_entry_and_has_none(make_cache: Callable[..., ActivationCache]) -> None:
    cache = make_cache()
    fill(cache)
    kept = cache.store.all_keys()[0]
    late = kept._replace(sample=SAMPLES)
    assert cache.settle() and cache.find(kept.split, kept.sample, kept.augmentation) is not None

    cache.close()
    cache.accept(late, entry(SAMPLES))

    assert cache.store.tier_of(late) is None
    assert not cache.settle() and cache.find(kept.split, kept.sample, kept.augmentation) is None


def test_who_does_not_know_the_token_is_not_heard(make_cache: Callable[..., ActivationCache]) -> None:
    old, new = make_cache(), make_cache()
    fill(old)
    host, port, token = json.loads(new.listen("127.0.0.1"))
    with socket.create_server(("127.0.0.1", 0)) as eavesdropper:
        address = json.dumps(["127.0.0.1", eavesdropper.getsockname()[1], token[::-1]])
        old.hand_over(lambda key: 1, 0, lambda pipeline: address)
        with eavesdropper.accept()[0] as connection, connection.makefile("rb") as stream:
            entries = stream.read()

    for said, heard in ((entries, []), (token.encode() + entries[len(token) :], list(range(SAMPLES)))):
        with socket.create_connection((host, port)) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1):  # until all that will be taken is
                pass
        assert held(new) == heard


def test_a_torn_or_senseless_stream_harms_nothing(make_cache: Callable[..., ActivationCache]) -> None:
    old, new = make_cache(), make_cache()
    fill(old)
    host, port, token = json.loads(new.listen("127.0.0.1"))
    for rubbish in (b"\xff" * 64, b"\x02\x00", b"\x02\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00{}", b""):
        with socket.create_connection((host, port)) as connection:
            connection.sendall(token.encode() + rubbish)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1):
                pass

    old.hand_over(lambda key: 1, 0, lambda pipeline: new.listen(host))
    old.wait_until_handed_over(30)

    wait_for(lambda: len(new.store.all_keys()) == SAMPLES)
    assert held(new) == list(range(SAMPLES))


def full_cache(make_cache: Callable[..., ActivationCache]) -> ActivationCache:
    """A cache with more than a connection holds that nobody reads from."""
    cache = make_cache(memory_bytes=1 << 26)
    large = torch.zeros(1 << 22)
    for sample in range(4):
        cache.keep("train", sample, 0, large, None)
    return cache


def test_a_sender_whose_peer_takes_nothing_stops_at_once(make_cache: Callable[..., ActivationCache]) -> None:
    cache = full_cache(make_cache)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cache.hand_over(lambda key: 1, 0, lambda _: json.dumps(["127.0.0.1", silent.getsockname()[1], "token"]))
        silent.accept()

        begun = time.monotonic()
        cache.close()

    assert time.monotonic() - begun < 5


def test_entries_that_are_not_sent_yet_stay_if_they_are_of_this_pipeline_again(
    make_cache: Callable[..., ActivationCache],
) -> None:
    cache = full_cache(make_cache)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cache.hand_over(lambda key: 1, 0, lambda _: json.dumps(["127.0.0.1", silent.getsockname()[1], "token"]))
        with silent.accept()[0]:
            cache.hand_over(lambda key: 0, 0, lambda _: "")
    wait_for(lambda: all(thread.name != "cache-sender" for thread in threading.enumerate()))

    assert len(cache.store.all_keys()) == 4


def test_entries_that_come_before_the_digests_are_known_are_kept_if_they_fit_them(
    make_cache: Callable[..., ActivationCache],
) -> None:
    old, new = make_cache(), make_cache()
    fill(old)
    right = old.store.all_keys()[0]
    gate = threading.Event()
    new._hashing.submit(gate.wait, 30)
    torch.manual_seed(0)
    new.use([nn.Linear(2, 2).eval()])
    for key in (right, right._replace(prefix=b"other")):
        new.accept(key, entry(key.sample))
    gate.set()

    assert new.settle() and held(new) == [right.sample]
    new.use(())
    new.accept(right._replace(sample=1), entry(1))
    assert [key.sample for key in new.store.all_keys()] == [right.sample], "it feeds no pipeline now"


def test_an_entry_larger_than_the_cache_is_not_even_read(make_cache: Callable[..., ActivationCache]) -> None:
    host, port, token = json.loads(make_cache(memory_bytes=100).listen("127.0.0.1"))
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(token.encode() + struct.pack("<IQ", 10, 101))
        assert connection.recv(1) == b""


def wait_for(condition: Callable[[], bool]) -> None:
    """The last entries are on their way when the sender has ended; the test's timeout bounds this."""
    while not condition():
        pass
