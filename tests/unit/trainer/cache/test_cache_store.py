"""Entries of the cache: limits, what is given up first, and what a broken disk does."""

import errno
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pipetransformer.cache import ActivationCache, tiers
from pipetransformer.cache.choice import Choice, SampleTimer
from pipetransformer.cache.digest import Key, PrefixDigests, UnitContent
from pipetransformer.cache.disk import DiskFiles
from pipetransformer.cache.store import TieredStore
from pipetransformer_contract.spec import Cache, CachePolicy
from tests.testkit.trainer.cache_files import cache_file

ENTRY_BYTES = 32


def key(sample: int, prefix: bytes = b"p") -> Key:
    return Key(prefix, "train", sample, 0)


def entry(sample: int) -> torch.Tensor:
    return torch.full((4, 2), float(sample))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    """Room for two entries in memory and two on disk."""
    store = TieredStore(2 * ENTRY_BYTES, 2 * ENTRY_BYTES, tmp_path)
    yield store
    store.close()


def held(store: TieredStore, samples: Sequence[int]) -> list[int]:
    """Which of `samples` the store gives back as they were put."""
    found = {sample: store.get(key(sample)) for sample in samples}
    assert all(value is None or torch.equal(value, entry(sample)) for sample, value in found.items())
    return [sample for sample, value in found.items() if value is not None]


def test_memory_fills_first_then_the_disk_and_what_came_first_stays(store: TieredStore) -> None:
    for sample in range(5):
        store.put(key(sample), entry(sample))

    assert [store.tier_of(key(sample)) for sample in range(5)] == [store.memory] * 2 + [store.disk] * 2 + [None]
    assert held(store, range(5)) == [0, 1, 2, 3]
    assert store.used_bytes == (2 * ENTRY_BYTES, 2 * ENTRY_BYTES)


def test_room_that_was_freed_is_used_again(store: TieredStore, tmp_path: Path) -> None:
    for sample in range(4):
        store.put(key(sample), entry(sample))
    assert held(store, range(4)) == [0, 1, 2, 3]
    file = cache_file(tmp_path)
    size = file.stat().st_size

    store.remove(key(0))
    store.remove(key(3))
    for sample in (4, 5, 6):
        store.put(key(sample), entry(sample))

    assert held(store, range(7)) == [1, 2, 4, 5]
    assert file.stat().st_size == size


def test_an_entry_that_is_too_large_for_any_tier_is_not_kept(store: TieredStore) -> None:
    store.put(key(0), torch.zeros(1000))

    assert store.get(key(0)) is None
    assert store.used_bytes == (0, 0)


def test_an_entry_larger_than_all_that_may_wait_goes_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_LARGEST_BACKLOG_BYTES", ENTRY_BYTES // 2)
    store = TieredStore(0, 10 * ENTRY_BYTES, tmp_path)
    assert store.put(key(0), entry(0))
    assert held(store, [0]) == [0]
    store.close()


def test_no_more_than_a_backlog_waits_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_LARGEST_BACKLOG_BYTES", 2 * ENTRY_BYTES)
    store, is_quick = TieredStore(0, 10 * ENTRY_BYTES, tmp_path), threading.Event()
    assert store.disk is not None
    for first in (0, 3):
        is_quick.clear()
        store.disk._thread.submit(is_quick.wait, 30)
        assert [store.put(key(sample), entry(sample)) for sample in range(first, first + 3)] == [True, True, False]
        is_quick.set()
        assert held(store, range(first, first + 3)) == [first, first + 1]
    store.close()


def test_entries_are_read_ahead_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_LARGEST_READ_AHEAD_BYTES", 2 * ENTRY_BYTES)
    store = TieredStore(0, 10 * ENTRY_BYTES, tmp_path)
    for sample in range(6):
        store.put(key(sample), entry(sample))

    assert [store.stage(key(sample)) for sample in range(4)] == [True, True, False, False]
    assert store.stage(key(1)), "it is read ahead already"
    assert held(store, [0]) == [0]
    assert [store.stage(key(sample)) for sample in (2, 3)] == [True, False]
    store.unstage()
    assert [store.stage(key(sample)) for sample in (3, 4, 5)] == [True, True, False]
    store.remove(key(3))
    assert store.stage(key(5))
    assert held(store, range(6)) == [0, 1, 2, 4, 5]
    store.close()


def test_entries_of_several_sizes_and_types_share_the_disk(tmp_path: Path) -> None:
    store = TieredStore(0, 1 << 20, tmp_path)
    entries = [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.randn(2, 2, dtype=torch.float64)]
    for sample, tensor in enumerate(entries):
        store.put(key(sample), tensor)

    for sample, tensor in enumerate(entries):
        read = store.get(key(sample))
        assert read is not None and read.dtype == tensor.dtype and torch.equal(read, tensor)
    store.close()


def test_entries_of_other_prefixes_are_given_up(store: TieredStore) -> None:
    for sample in range(4):
        store.put(key(sample, prefix=b"old" if sample % 2 else b"new"), entry(sample))

    store.keep_only({b"new"})

    assert {key.prefix for key in store.all_keys()} == {b"new"}
    assert store.used_bytes[0] + store.used_bytes[1] == 2 * ENTRY_BYTES


def test_a_changed_byte_on_disk_is_noticed(store: TieredStore, tmp_path: Path) -> None:
    for sample in range(4):
        store.put(key(sample), entry(sample))
    assert held(store, [2, 3]) == [2, 3]
    file = cache_file(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    assert held(store, range(4)) == [0, 1, 2]
    assert store.take_failures() == (1, 0)
    assert store.take_failures() == (0, 0)
    assert store.tier_of(key(3)) is None


@pytest.mark.parametrize(
    "other",
    [
        Key(b"q", "train", 0, 0),
        Key(b"p", "test", 0, 0),
        Key(b"p", "train", 1, 0),
        Key(b"p", "train", 0, 1),
    ],
    ids=["prefix", "split", "sample", "augmentation"],
)
def test_a_slot_on_disk_is_read_only_as_what_it_was_written_as(other: Key, tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    written = entry(1)
    assert files.write(key(0), written) and files.write(other, entry(2))
    path = cache_file(tmp_path)
    content = path.read_bytes()
    half = len(content) // 2

    path.write_bytes(content[half:] + content[:half])
    for one in (key(0), other):
        assert files.read(one, written.shape, written.dtype) is None

    path.write_bytes(content)
    read = files.read(key(0), written.shape, written.dtype)
    assert read is not None and torch.equal(read, written)
    files.close()


def test_a_file_cut_short_is_noticed(store: TieredStore, tmp_path: Path) -> None:
    for sample in range(4):
        store.put(key(sample), entry(sample))
    assert held(store, [2, 3]) == [2, 3]
    file = cache_file(tmp_path)
    os.truncate(file, 40)

    assert held(store, range(4)) == [0, 1]
    assert store.take_failures() == (2, 0)


def test_a_full_disk_costs_its_entries_only(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as while_full:
        while_full.setattr(os, "pwritev", full)
        for sample in range(4):
            store.put(key(sample), entry(sample))
        assert held(store, range(4)) == [0, 1]
    assert store.take_failures()[1] >= 1
    assert store.take_failures() == (0, 0)
    assert not store.put(key(5), entry(5)), "no more is written than what the disk took"


def test_a_folder_that_cannot_be_made_costs_the_disk_tier_only(tmp_path: Path) -> None:
    store = TieredStore(0, 1000, tmp_path / "missing")
    store.put(key(0), entry(0))

    assert store.get(key(0)) is None


def test_each_store_has_a_file_of_its_own_which_a_killed_worker_does_not_leave(tmp_path: Path) -> None:
    stores = [TieredStore(0, 1000, tmp_path) for _ in range(2)]
    for number, store in enumerate(stores):
        store.put(key(number), entry(number))

    assert [held(store, range(2)) for store in stores] == [[0], [1]]
    assert list(tmp_path.iterdir()) == []
    for store in stores:
        store.close()


def test_reading_is_chosen_until_all_that_it_compares_was_measured_and_then_by_the_medians() -> None:
    choice = Choice(always=False)
    choice.gathering.extend([2.0] * 8)
    choice.waiting.extend([2.0] * 8)
    choice.computing.extend([3.0] * 7)
    assert choice.memory_pays and choice.disk_pays
    choice.computing.append(100.0)
    assert choice.memory_pays and not choice.disk_pays
    choice.forget_computing()
    choice.computing.extend([1.0] * 8)
    assert not choice.memory_pays
    assert Choice(always=True).memory_pays


def test_a_measurement_is_of_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, seconds = SampleTimer(torch.device("cpu")), deque[float]()
    monkeypatch.setattr("time.perf_counter", iter([1.0, 3.0]).__next__)
    timer.start()
    timer.stop(4, seconds)
    assert list(seconds) == [0.5]


def test_a_digest_follows_weights_structure_mode_and_job() -> None:
    def unit() -> torch.nn.Linear:
        torch.manual_seed(0)
        linear = torch.nn.Linear(3, 3).eval()
        linear.register_buffer("table", torch.zeros(2))
        linear.register_buffer("constants", torch.zeros(2), persistent=False)
        return linear

    def digest(*units: torch.nn.Module, job: bytes = b"job") -> bytes:
        return PrefixDigests(job).of(list(map(UnitContent, units)))[-1]

    changed, training, double = unit(), unit().train(), unit().double()
    other_table, other_constants = unit(), unit()
    with torch.no_grad():
        changed.bias[0] += 1e-7
        other_table.get_buffer("table")[1] += 1
        other_constants.get_buffer("constants")[1] += 1
    wrapped = torch.nn.Sequential(unit()).eval()
    digests = [
        digest(unit()),
        digest(changed),
        digest(training),
        digest(double),
        digest(other_table),
        digest(other_constants),
        digest(wrapped),
        digest(unit(), unit()),
    ]

    assert len({*digests, digest(unit(), job=b"other")}) == 9
    assert digest(unit()) == digests[0]
    assert PrefixDigests(b"job").of([UnitContent(unit()), UnitContent(changed)])[0] == digests[0]


class Described(torch.nn.Linear):
    """Notes the threads in which it is described."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.threads: list[threading.Thread] = []

    def extra_repr(self) -> str:
        self.threads.append(threading.current_thread())
        return super().extra_repr()


def test_the_training_thread_does_not_describe_units_that_are_hashed(tmp_path: Path) -> None:
    unit = Described().eval()
    cache = ActivationCache(Cache(policy=CachePolicy.ALWAYS), job="job", scratch=tmp_path)
    for _ in range(2):
        cache.use([unit])
        assert cache.settle()
    cache.close()

    assert len(unit.threads) == 1, "once while it stays frozen"
    assert unit.threads != [threading.current_thread()]


def test_a_digest_does_not_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = torch.nn.ParameterList([torch.zeros(2)])
    before = UnitContent(unit).digest()
    monkeypatch.setattr(torch.nn.ParameterList, "extra_repr", lambda self: "(cuda:0)")
    assert UnitContent(unit).digest() == before


def test_a_unit_that_trained_in_between_is_hashed_again() -> None:
    first, second = torch.nn.Linear(2, 2).eval(), torch.nn.Linear(2, 2).eval()
    digests = PrefixDigests(b"")
    before = digests.of([UnitContent(first), UnitContent(second)])

    digests.keep_only([first])
    with torch.no_grad():
        second.weight += 1
    after = digests.of([UnitContent(first), UnitContent(second)])

    assert after[0] == before[0] and after[1] != before[1]
