"""What the frozen prefix gives a first stage is what its units compute, read or not."""

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.cache import ActivationCache, FrozenPrefix
from pipetransformer.cache import cache as cache_module
from pipetransformer.cache.digest import Key, UnitContent
from pipetransformer.data import MicroBatch
from pipetransformer.models import MicroBatchContext
from pipetransformer_contract.spec import Cache, CacheDtype
from tests.testkit.trainer.cache_files import cache_file
from tests.testkit.trainer.storing import until

SAMPLES = 24
ALL = range(SAMPLES)
SIZE = 4
ROW_BYTES = 3 * 8 * 4
INPUTS = torch.randn(SAMPLES, 3, 8, generator=torch.Generator().manual_seed(0))


class Unit(nn.Module):
    """A layer that counts the batches it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.batches = 0

    def forward(self, x: Tensor) -> Tensor:
        self.batches += 1
        assert x.shape == (SIZE, 3, 8)
        return torch.tanh(self.linear(x))


@dataclass(frozen=True)
class Samples:
    """A round's source: all of one variant."""

    augmentation: int | None
    name: str = "train"

    def inputs(self, sample_ids: Sequence[int]) -> Tensor:
        return INPUTS[list(sample_ids)] + float(self.augmentation or 0)

    def context(self, sample_ids: Sequence[int]) -> MicroBatchContext:
        return MicroBatchContext(0, sample_ids)

    def variant(self, sample_id: int) -> int | None:
        return self.augmentation

    def upcoming(self) -> list[tuple[int, int | None]]:
        return []

    def expect(self, sample_ids: Collection[int]) -> None:
        pass


class Bench:
    """A cache with units to freeze, and epochs of shuffled micro-batches that are compared with plain computation."""

    def __init__(self, scratch: Path, **settings: object) -> None:
        torch.manual_seed(0)
        self.units = [Unit().eval() for _ in range(4)]
        spec = Cache.model_validate({"policy": "Always", "memory_bytes": 1 << 20} | settings)
        self.cache = ActivationCache(spec, job="job", scratch=scratch)
        self.prefix = self.freeze(2)
        self.epochs = 0

    def freeze(self, num_units: int) -> FrozenPrefix:
        self.cache.use(self.units[:num_units])
        self.prefix = FrozenPrefix(
            self.units[:num_units], device=torch.device("cpu"), dtype=torch.float32, cache=self.cache
        )
        self._num_units = num_units
        return self.prefix

    def epoch(self, *, augmentation: int | None = 0, rounds: int = 2) -> dict[str, int]:
        """One pass over the data; the counts of the cache."""
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epochs)).tolist()
        self.epochs += 1
        share = SAMPLES // rounds
        for start in range(0, SAMPLES, share):
            ids = order[start : start + share]
            self.round([ids[i : i + SIZE] for i in range(0, share, SIZE)], augmentation=augmentation)
        return self.cache.take_counts()

    def holds(self, samples: int, num_units: int, split: str = "train", uses: Collection[int] = ALL) -> bool:
        return self.cache.holds(split, samples, num_units, lambda sample: sample in uses)

    def round(self, micro_batches: Sequence[Sequence[int]], *, augmentation: int | None = 0) -> None:
        shift = float(augmentation or 0)
        outputs = self.prefix.begin(Samples(augmentation), [MicroBatch(tuple(ids), len(ids)) for ids in micro_batches])
        for number, ids in enumerate(micro_batches):
            expected = INPUTS[list(ids)] + shift
            with torch.no_grad():
                for unit in self.units[: self._num_units]:
                    expected = torch.tanh(unit.linear(expected))
            self.check(outputs.take(number, MicroBatchContext(0, ids)), expected)

    def check(self, output: Tensor, expected: Tensor) -> None:
        assert torch.equal(output, expected)

    @property
    def batches(self) -> list[int]:
        """Batches that each unit has computed since the last call."""
        counts = [unit.batches for unit in self.units]
        for unit in self.units:
            unit.batches = 0
        return counts


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.cache.close()


def outcome(counts: dict[str, int]) -> tuple[int, int, int]:
    return counts["hits"], counts["advanced"], counts["computed"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"memory_bytes": 0, "disk_bytes": 1 << 20}, {"memory_bytes": 10 * ROW_BYTES, "disk_bytes": 1 << 20}],
    ids=["memory", "disk", "both"],
)
def test_a_second_epoch_reads_what_the_first_one_computed_bit_for_bit(settings: dict[str, int], tmp_path: Path) -> None:
    bench = Bench(tmp_path, **settings)

    assert outcome(bench.epoch()) == (0, 0, SAMPLES)
    assert bench.batches[:2] == [SAMPLES // SIZE] * 2
    kept = [bench.cache.store.get(key) for key in bench.cache.store.all_keys()]
    assert all(entry is not None and entry.untyped_storage().nbytes() == ROW_BYTES for entry in kept)
    assert outcome(bench.epoch()) == (SAMPLES, 0, 0)
    assert bench.batches[:2] == [0, 0]
    of_disk = SAMPLES - bench.cache.store.used_bytes[0] // ROW_BYTES
    assert len(bench.cache.choice.waiting) == of_disk, "only these wait for the disk"
    bench.cache.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_units", [2, 3])
def test_a_change_of_the_units_costs_no_round_without_a_cache(
    num_units: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_DIGESTS_AT_MOST_SECONDS", 30.0)  # those of these units take a millisecond
    bench = Bench(tmp_path, policy="Auto")

    bench.freeze(num_units)

    assert bench.cache.settle()
    bench.cache.close()


def test_a_change_waits_for_slow_digests_only_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, known, digest = Bench(tmp_path, policy="Auto"), threading.Event(), UnitContent.digest

    def slow(content: UnitContent) -> bytes:
        known.wait()
        return digest(content)

    monkeypatch.setattr(UnitContent, "digest", slow)
    bench.freeze(3)

    assert not bench.cache.settle()
    known.set()
    until(bench.cache.settle)
    bench.cache.close()


def test_a_cache_of_half_the_data_saves_half_the_batches(tmp_path: Path) -> None:
    bench = Bench(tmp_path, memory_bytes=SAMPLES // 2 * ROW_BYTES)
    bench.epoch(rounds=1)
    assert bench.batches[0] == SAMPLES // SIZE

    counts = bench.epoch(rounds=1)

    assert outcome(counts) == (SAMPLES // 2, 0, SAMPLES // 2)
    assert counts["memoryBytes"] == SAMPLES // 2 * ROW_BYTES
    assert bench.batches[0] == SAMPLES // 2 // SIZE


def test_a_raised_boundary_runs_only_the_newly_frozen_units_on_what_is_cached(bench: Bench) -> None:
    bench.epoch()
    bench.freeze(4)
    assert bench.batches[0]

    assert outcome(bench.epoch()) == (0, SAMPLES, 0)
    assert bench.batches == [0, 0, SAMPLES // SIZE, SAMPLES // SIZE]
    counts = bench.epoch()
    assert outcome(counts) == (SAMPLES, 0, 0)
    assert counts["memoryBytes"] == SAMPLES * ROW_BYTES


def test_units_that_trained_in_between_make_no_entry_match(bench: Bench) -> None:
    bench.epoch()
    bench.freeze(4)
    bench.epoch()
    bench.freeze(1)
    with torch.no_grad():
        bench.units[1].linear.weight += 1e-3
    bench.epoch()
    bench.freeze(4)

    assert outcome(bench.epoch()) == (0, SAMPLES, 0)


def test_a_shorter_prefix_has_no_use_for_entries_of_a_longer_one(bench: Bench) -> None:
    bench.epoch()
    bench.freeze(1)

    counts = bench.epoch()

    assert outcome(counts) == (0, 0, SAMPLES)
    assert counts["memoryBytes"] == SAMPLES * ROW_BYTES


def test_padding_is_computed_once_and_given_to_every_micro_batch(bench: Bench) -> None:
    for _ in range(2):
        bench.round([[0, 1, 2, 3], [4, 5, 0, 0], [0, 0, 0, 0]])

    assert bench.batches[0] == 2


def test_a_torn_entry_is_computed_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, memory_bytes=0, disk_bytes=1 << 20)
    bench.epoch()
    bench.epoch()
    file = cache_file(tmp_path)
    content = bytearray(file.read_bytes())
    content[100] ^= 0xFF  # in the first entry's payload
    file.write_bytes(content)

    counts = bench.epoch()

    assert counts["torn"] == 1 and outcome(counts) == (SAMPLES - 1, 0, 1)
    assert outcome(bench.epoch()) == (SAMPLES, 0, 0)
    bench.cache.close()


def test_a_torn_entry_of_an_earlier_boundary_is_computed_from_its_input(tmp_path: Path) -> None:
    bench = Bench(tmp_path, memory_bytes=0, disk_bytes=1 << 20)
    bench.epoch()
    bench.epoch()
    file = cache_file(tmp_path)
    file.write_bytes(bytes(file.stat().st_size))
    bench.freeze(3)

    counts = bench.epoch()

    assert counts["torn"] == SAMPLES and outcome(counts) == (0, 0, SAMPLES)
    bench.cache.close()


@dataclass(frozen=True)
class Continued(Samples):
    """A round's source that knows the next round, and notes of which samples it shall read the inputs."""

    following: Sequence[int] = ()
    expected: list[Collection[int]] = field(default_factory=list)

    def upcoming(self) -> list[tuple[int, int | None]]:
        return [(sample, self.augmentation) for sample in self.following]

    def expect(self, sample_ids: Collection[int]) -> None:
        self.expected.append(sample_ids)


def test_of_the_next_round_entries_are_read_ahead_and_inputs_only_of_samples_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, memory_bytes=0, disk_bytes=1 << 20)
    bench.round([(0, 1, 2, 3), (4, 5, 6, 7)])
    staged, stage = [], bench.cache.store.stage

    def note(key: Key) -> bool:
        staged.append(key.sample)
        return stage(key)

    monkeypatch.setattr(bench.cache.store, "stage", note)
    source = Continued(0, following=(4, 9, 5, 8))

    bench.prefix.begin(source, [MicroBatch((0, 1, 10, 11), 4)])

    assert [set(each) for each in source.expected] == [{8, 9}]
    assert staged == [0, 1, 4, 5], "in the order of need"
    assert bench.cache.store.disk is not None and len(bench.cache.store.disk._staged) == 4
    bench.freeze(2)
    assert not bench.cache.store.disk._staged, "another runner may need others"
    bench.cache.close()


def test_a_look_up_drops_no_entries(tmp_path: Path) -> None:
    bench, ids = Bench(tmp_path, policy="Auto"), (0, 1, 2, 3)
    until(bench.cache.settle)
    bench.round([ids])
    bench.cache.choice.computing.extend([1e-6] * 100)
    bench.cache.choice.gathering.extend([1e-3] * 100)

    assert bench.prefix.holds(Samples(0), ids)
    assert not bench.cache.settle() and not bench.prefix.holds(Samples(0), ids), "the next round does not read"
    bench.cache.close()


def test_outputs_that_were_computed_elsewhere_are_kept_in_place_of_those_of_fewer_units(bench: Bench) -> None:
    ids, longer = (0, 1, 2, 3), torch.randn(4, 3, 8)
    bench.round([(0, 1, 4, 5)])
    bench.freeze(4)
    assert bench.cache.settle()
    assert bench.prefix.holds(Samples(0), ids) is False
    assert bench.prefix.holds(Samples(0), (0, 1)) is False, "their entries have not passed all units"

    bench.prefix.keep(Samples(0), ids, longer)
    bench.prefix.keep(Samples(0), ids, torch.zeros(4, 3, 8))  # which are here already
    bench.prefix.keep(Samples(None), (6,), longer[:1])

    assert bench.prefix.holds(Samples(0), ids) and not bench.prefix.holds(Samples(0), (0, 4))
    assert not bench.prefix.holds(Samples(None), ids)
    assert sorted(key.sample for key in bench.cache.store.all_keys()) == [0, 1, 2, 3, 4, 5]
    rows = bench.prefix.begin(Samples(0), [MicroBatch(ids, 4)]).take(0, MicroBatchContext(0, ids))
    assert torch.equal(rows, longer)


def test_variants_of_a_sample_are_kept_apart(bench: Bench) -> None:
    assert outcome(bench.epoch(augmentation=1)) == (0, 0, SAMPLES)
    assert outcome(bench.epoch(augmentation=2)) == (0, 0, SAMPLES)
    assert outcome(bench.epoch(augmentation=1)) == (SAMPLES, 0, 0)


def test_samples_that_are_augmented_at_random_are_neither_read_nor_kept(bench: Bench) -> None:
    bench.epoch()

    counts = bench.epoch(augmentation=None)

    assert outcome(counts) == (0, 0, SAMPLES)
    assert counts["memoryBytes"] == SAMPLES * ROW_BYTES


def test_a_smaller_type_is_close_and_takes_half_the_room(tmp_path: Path) -> None:
    bench = Bench(tmp_path, dtype=CacheDtype.FLOAT16)
    bench.epoch()
    bench.check = lambda output, expected: torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)  # type: ignore[method-assign]

    counts = bench.epoch()

    assert outcome(counts) == (SAMPLES, 0, 0)
    assert counts["memoryBytes"] == SAMPLES * ROW_BYTES // 2
    bench.cache.close()


def test_what_a_smaller_type_cannot_hold_is_not_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, dtype=CacheDtype.FLOAT16)
    bench.units[1].forward = lambda x: x * 1e6  # type: ignore[method-assign]
    bench.check = lambda output, expected: None  # type: ignore[method-assign]

    assert bench.epoch()["outOfRange"] == SAMPLES
    assert outcome(bench.epoch()) == (0, 0, SAMPLES)
    bench.cache.close()


def test_auto_gives_up_what_is_slower_to_read_than_to_compute(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="Auto")
    until(bench.cache.settle)
    bench.epoch()
    choice = bench.cache.choice
    assert choice.memory_pays
    choice.computing.extend([1e-6] * 100)
    choice.gathering.extend([1e-3] * 100)
    assert not choice.memory_pays

    bench.epoch()

    assert bench.cache.store.used_bytes == (0, 0)
    bench.freeze(3)
    assert bench.cache.choice.memory_pays
    bench.cache.close()


def test_auto_goes_on_without_a_disk_that_is_too_slow(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="Auto", memory_bytes=5 * ROW_BYTES, disk_bytes=1 << 20)
    until(bench.cache.settle)
    bench.epoch()
    bench.cache.choice.computing.extend([1e-3] * 100)
    bench.cache.choice.gathering.extend([1e-6] * 100)
    bench.cache.choice.waiting.extend([1e-2] * 100)

    assert outcome(bench.epoch()) == (5, 0, SAMPLES - 5)
    assert bench.cache.store.used_bytes == (5 * ROW_BYTES, 0)

    bench.freeze(3)
    until(bench.cache.settle)
    bench.epoch()
    assert bench.cache.store.used_bytes[1] > 0, "more units take longer to compute, so the disk is tried again"
    bench.cache.close()


@pytest.mark.parametrize("cached", [True, False])
def test_slices_of_tokens_are_those_of_whole_samples(cached: bool, bench: Bench) -> None:
    """A cache computes and keeps whole samples; without one each slice runs by itself."""
    ids = (0, 1, 2, 3)
    units = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    bench.cache.use(units)
    cache = bench.cache if cached else None
    prefix = FrozenPrefix(units, device=torch.device("cpu"), dtype=torch.float32, cache=cache)
    with torch.no_grad():
        expected = nn.Sequential(*units)(INPUTS[list(ids)])
    for _ in range(2):  # computed, then read
        outputs = prefix.begin(Samples(0), [MicroBatch(ids, len(ids))])
        parts = [outputs.take(0, context) for context in MicroBatchContext(0, ids).in_slices((2, 1))]
        assert [part.shape[1] for part in parts] == [2, 1]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)
    counts = bench.cache.take_counts()
    assert outcome(counts) == (SIZE, 0, SIZE) if cached else not counts


def test_a_cache_that_holds_an_epoch_says_so_for_each_prefix(bench: Bench) -> None:
    bench.round([(0, 1, 2, 3)])
    assert bench.holds(SIZE, 2)
    assert not bench.holds(SAMPLES, 2)
    bench.epoch()
    assert bench.holds(SAMPLES, 2)
    assert not bench.holds(SIZE, 2, "test")

    bench.freeze(4)
    bench.round([(0, 1, 2, 3)])
    assert bench.holds(SIZE, 4)
    assert bench.holds(SAMPLES, 2), "entries of four units end after at least two"
    assert not bench.holds(SAMPLES, 4)
    bench.epoch()
    assert bench.holds(SAMPLES, 4)
    bench.cache.store.remove(bench.cache.store.all_keys()[0])
    assert not bench.holds(SAMPLES, 4)


def test_entries_of_other_pipelines_do_not_count(bench: Bench) -> None:
    """After a regroup they wait to be sent. Peers may also send an entry of fewer units than the one that is here."""
    bench.round([(0, 1, 2, 3)])
    bench.freeze(4)
    bench.round([(0, 1, 4, 5)])
    (short,) = {key.prefix for key in bench.cache.store.all_keys() if key.sample == 2}
    bench.cache.accept(Key(short, "train", 0, 0), torch.zeros(3, 8))
    assert [key.sample for key in bench.cache.store.all_keys()].count(0) == 2

    assert bench.holds(6, 2)
    assert not bench.holds(7, 2), "there are seven entries of six samples"
    assert not bench.holds(3, 2, uses={0, 1, 6})
    assert bench.holds(3, 4, uses={0, 1, 4}) and not bench.holds(3, 4, uses={0, 1, 2})


def test_auto_says_that_it_holds_entries_only_once_it_has_read_some(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy="Auto")
    until(bench.cache.settle)
    bench.epoch()
    assert not bench.holds(SAMPLES, 2)
    bench.cache.choice.gathering.extend([0.0] * 8)
    assert bench.holds(SAMPLES, 2)
    computing = bench.cache.choice.computing
    assert computing
    bench.cache.measure_again()
    assert not bench.cache.choice.computing
    assert bench.holds(SAMPLES, 2), "reading takes as long as before"
    computing.append(1.0)
    assert not bench.cache.choice.computing, "a measurement that ends late counts no more"
    bench.cache.close()
