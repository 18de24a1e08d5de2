"""The outputs of a first span's frozen units, computed or read from the cache.

Missing outputs are computed in batches of a micro-batch's size, in the order of need. So a cache with
half of the samples saves half of the batches, and the first micro-batch waits for one batch only. Batches have the
same shape as without a cache, so the same kernels give the same numbers.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pipetransformer.data import MicroBatch
from pipetransformer.device_copies import to_device
from pipetransformer.models import MicroBatchContext, TokenSlice, run_unit
from pipetransformer.models.off_device import on_device

from .cache import ActivationCache
from .choice import Stopwatch
from .digest import Key


class Source(Protocol):
    """Where a round's samples come from."""

    @property
    def name(self) -> str:
        """The split, `train` or `test`."""
        ...

    def inputs(self, sample_ids: Sequence[int]) -> Tensor:
        """(len(sample_ids), *input shape) on the CPU."""
        ...

    def context(self, sample_ids: Sequence[int]) -> MicroBatchContext:
        """What units may know of these samples."""
        ...

    def variant(self, sample_id: int) -> int | None:
        """The sample's variant at this step; None if it does not come again and is not cached."""
        ...

    def upcoming(self) -> Iterable[tuple[int, int | None]]:
        """The next round's samples with their variants."""
        ...

    def expect(self, sample_ids: Collection[int]) -> None:
        """Called before `inputs`: of the upcoming samples, the inputs of these alone will be needed."""
        ...


class PrefixOutputs(Protocol):
    """The activations at the frozen boundary for the micro-batches of one round."""

    def take(self, number: int, context: MicroBatchContext) -> Tensor:
        """(micro-batch, ...) activations of one micro-batch, on the device; once for each, or once for each slice of
        tokens, in order."""
        ...


def run_frozen(units: Sequence[nn.Module], rows: Tensor, context: MicroBatchContext) -> Tensor:
    """Run `rows` through frozen units, without a graph. Units that are off the device come one at a time."""
    with torch.no_grad():
        for unit in units:
            with on_device(unit, rows.device):
                rows = run_unit(unit, rows, context)
    return rows


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The frozen units, and where they run."""

    units: Sequence[nn.Module]
    device: torch.device
    dtype: torch.dtype

    def run(self, num_units: int, rows: Tensor, context: MicroBatchContext) -> Tensor:
        """Run `rows`, the outputs of the first `num_units` units, through the other units."""
        return run_frozen(self.units[num_units:], rows, context).contiguous()

    def gather(self, entries: Sequence[Tensor]) -> Tensor:
        """(len(entries), ...) on the device."""
        pinned = self.device.type == "cuda"
        rows = torch.empty((len(entries), *entries[0].shape), dtype=entries[0].dtype, pin_memory=pinned)
        torch.stack(list(entries), out=rows)
        return rows.to(self.device, self.dtype, non_blocking=True)


class FrozenPrefix:
    """The frozen units that a first span starts with."""

    def __init__(
        self,
        units: Sequence[nn.Module],
        *,
        device: torch.device,
        dtype: torch.dtype,
        cache: ActivationCache | None = None,
    ) -> None:
        """
        Args:
            units: the frozen units, from the model's first on; may be empty.
            device: the units' device.
            dtype: type of activations.
            cache: a cache for these units; None to compute everything.
        """
        self._prefix = _Prefix(list(units), device, dtype)
        self._cache = cache if units else None
        self._watch = Stopwatch(device)

    def holds(self, source: Source, sample_ids: Sequence[int]) -> bool:
        """Whether the cache has an entry of the whole prefix for each of these samples."""
        if self._cache is None or not self._cache.ready():
            return False
        variants = {sample: source.variant(sample) for sample in sample_ids}
        places = [
            None if variant is None else self._cache.find(source.name, sample, variant)
            for sample, variant in variants.items()
        ]
        return all(place is not None and place[0] == len(self._prefix.units) for place in places)

    def keep(self, source: Source, sample_ids: Sequence[int], outputs: Tensor) -> None:
        """Keep outputs that were computed elsewhere in the cache."""
        if self._cache is None or not self._cache.ready():
            return
        host = outputs.to("cpu")
        for sample, row in dict(zip(sample_ids, host, strict=True)).items():
            variant = source.variant(sample)
            place = None if variant is None else self._cache.find(source.name, sample, variant)
            if variant is not None and (place is None or place[0] < len(self._prefix.units)):
                self._cache.keep(source.name, sample, variant, row.clone(), None if place is None else place[1])

    def begin(self, source: Source, micro_batches: Sequence[MicroBatch], made: Collection[int] = ()) -> PrefixOutputs:
        """Start a round over these micro-batches, including padding. They are taken in this order, or nearly, except
        for the numbers in `made`, which are not taken."""
        rest = {number: each for number, each in enumerate(micro_batches) if number not in made}
        if self._cache is not None and self._cache.ready():
            return _Cached(self._prefix, self._cache, self._watch, source, rest)
        return _Computed(self._prefix, source, rest)


class _Computed:
    """A round without a cache."""

    def __init__(self, prefix: _Prefix, source: Source, micro_batches: Mapping[int, MicroBatch]) -> None:
        self._prefix = prefix
        self._rows = inputs_of(source, micro_batches)

    def take(self, number: int, context: MicroBatchContext) -> Tensor:
        rows = to_device(_slice_of(self._rows, number, context.tokens), self._prefix.device)
        return self._prefix.run(0, rows, context) if self._prefix.units else rows


class _Cached:
    """A round with a cache. Samples of one length, whose entries end after the same number of units, are computed
    together."""

    def __init__(
        self,
        prefix: _Prefix,
        cache: ActivationCache,
        watch: Stopwatch,
        source: Source,
        micro_batches: Mapping[int, MicroBatch],
    ) -> None:
        """Find entries, list what is missing and what to read ahead."""
        self._prefix, self._cache, self._watch = prefix, cache, watch
        self._source, self._micro_batches = source, micro_batches
        #: Length that each sample is cut to.
        self._lengths = {sample: each.length for each in micro_batches.values() for sample in each.sample_ids}
        #: Number of micro-batches that still need a sample (padding repeats some).
        self._uses = Counter(sample for each in micro_batches.values() for sample in set(each.sample_ids))
        #: Entries by sample, with the number of units that computed each.
        self._found: dict[int, tuple[int, Key]] = {}
        #: Samples to compute, by that number and their length, in the order of need.
        self._waiting: dict[tuple[int, int | None], deque[int]] = defaultdict(deque)
        #: Inputs of samples without an entry.
        self._inputs: dict[int, Tensor] = {}
        self._computed: dict[int, Tensor] = {}
        #: Entries to read ahead, in the order of need, including the next round's.
        self._ahead: dict[Key, None] = {}
        #: Micro-batches of which later slices will be taken.
        self._whole: dict[int, Tensor] = {}
        missing = self._find()
        self._expect()
        if missing:
            self._inputs = {
                sample: _cut(row, self._lengths[sample], 0)
                for sample, row in zip(missing, source.inputs(missing), strict=True)
            }
        self._read_ahead()

    def take(self, number: int, context: MicroBatchContext) -> Tensor:
        if number not in self._whole:
            self._whole[number] = self._assemble(self._micro_batches[number].sample_ids)
            self._read_ahead()
        return _slice_of(self._whole, number, context.tokens)

    def _find(self) -> list[int]:
        """Find the samples' entries. Returns the samples without any."""
        missing = []
        for sample, length in self._lengths.items():
            variant = self._source.variant(sample)
            place = None if variant is None else self._cache.find(self._source.name, sample, variant)
            if place is not None:
                self._found[sample] = place
                self._ahead[place[1]] = None
            else:
                missing.append(sample)
            num_units = 0 if place is None else place[0]
            if num_units < len(self._prefix.units):
                self._waiting[num_units, length].append(sample)
        return missing

    def _expect(self) -> None:
        """Plan to read the next round's entries ahead, and say which samples have none."""
        uncached = set()
        for sample, variant in self._source.upcoming():
            place = None if variant is None else self._cache.find(self._source.name, sample, variant)
            if place is None:
                uncached.add(sample)
            else:
                self._ahead[place[1]] = None
        self._source.expect(uncached)

    def _read_ahead(self) -> None:
        while self._ahead:
            key = next(iter(self._ahead))
            if not self._cache.store.stage(key):
                return
            del self._ahead[key]

    def _num_units(self, sample: int) -> int:
        """Units that computed the sample's entry; 0 without one."""
        return self._found[sample][0] if sample in self._found else 0

    def _assemble(self, ids: Sequence[int]) -> Tensor:
        """The rows of a micro-batch, read or computed."""
        entries: dict[int, Tensor] = {}
        for sample in dict.fromkeys(ids):
            if self._num_units(sample) == len(self._prefix.units):
                entry = self._read(sample)
                if entry is not None:
                    entries[sample] = entry
        self._cache.count("hits", len(entries))
        for sample in ids:
            while sample not in entries and sample not in self._computed:
                self._compute(self._num_units(sample), self._lengths[sample], len(ids))
        rows: dict[int, Tensor] = {}
        if entries:
            self._watch.start()
            gathered = self._prefix.gather(list(entries.values()))
            self._watch.stop(len(entries), self._cache.choice.gathering)
            rows = dict(zip(entries, gathered, strict=True))
        rows |= {sample: self._computed[sample] for sample in ids if sample not in entries}
        for sample in rows:
            self._uses[sample] -= 1
            if not self._uses[sample]:
                self._computed.pop(sample, None)
        return gathered if len(entries) == len(ids) else torch.stack([rows[sample] for sample in ids])

    def _compute(self, num_units: int, length: int | None, size: int) -> None:
        """Compute the next samples, at most `size`, of this length whose entries end after `num_units` units."""
        queue, source = self._waiting[num_units, length], self._source
        samples = [queue.popleft() for _ in range(min(size, len(queue)))]
        if num_units == 0:
            rows = to_device(torch.stack([self._inputs.pop(sample) for sample in samples]), self._prefix.device)
            self._cache.count("computed", len(samples))
        else:
            entries = {sample: self._read(sample) for sample in samples}
            whole = {sample: entry for sample, entry in entries.items() if entry is not None}
            if not whole:
                return
            samples, rows = list(whole), self._prefix.gather(list(whole.values()))
            self._cache.count("advanced", len(samples))
        padding = size - len(samples)
        batch = torch.cat([rows, rows[:1].expand(padding, *rows.shape[1:])]) if padding else rows
        self._watch.start()
        output = self._prefix.run(num_units, batch, source.context(samples + samples[:1] * padding))
        if num_units == 0:
            self._watch.stop(size, self._cache.choice.computing)
        host = output[: len(samples)].to("cpu")
        for sample, row, entry in zip(samples, output, host, strict=False):
            self._computed[sample] = row
            variant = source.variant(sample)
            if variant is not None:
                replaced = self._found[sample][1] if sample in self._found else None
                self._cache.keep(source.name, sample, variant, entry.clone(), replaced)

    def _read(self, sample: int) -> Tensor | None:
        """The entry that was found for a sample; None if it is damaged, and then it counts as not found."""
        key = self._found[sample][1]
        self._ahead.pop(key, None)
        entry = self._cache.read(key)
        if entry is None:
            del self._found[sample]
            length = self._lengths[sample]
            self._inputs[sample] = _cut(self._source.inputs([sample])[0], length, 0)
            self._waiting[0, length].appendleft(sample)
        return entry


def inputs_of(source: Source, micro_batches: Mapping[int, MicroBatch]) -> dict[int, Tensor]:
    """(micro-batch, *input shape) inputs of each micro-batch, on the CPU."""
    if not micro_batches:
        return {}
    rows = source.inputs([sample for each in micro_batches.values() for sample in each.sample_ids])
    parts = torch.split(rows, [len(each.sample_ids) for each in micro_batches.values()])
    return {number: _cut(part, each.length) for (number, each), part in zip(micro_batches.items(), parts, strict=True)}


def _slice_of(rows: dict[int, Tensor], number: int, tokens: TokenSlice | None) -> Tensor:
    """The positions of a slice in the rows of this number, which go with the last slice."""
    if tokens is None:
        return rows.pop(number)
    whole = rows[number] if tokens.stop < tokens.total else rows.pop(number)
    return whole[:, tokens.start : tokens.stop]


def _cut(rows: Tensor, length: int | None, dim: int = 1) -> Tensor:
    """The first `length` positions; all without one."""
    return rows if length is None else rows.narrow(dim, 0, length)
