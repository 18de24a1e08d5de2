"""Gives the outputs of the frozen units that the first span starts with (the prefix), from the cache or computed.

Outputs that the cache lacks are computed in batches of a micro-batch's size, in the order of need. So a cache with half
of the samples saves half of the batches, and the first micro-batch waits for only one batch. Batches have the same
shape as without a cache, so the same kernels give the same numbers.
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

from .cache import ActivationCache, Found
from .choice import SampleTimer
from .digest import Key


class Source(Protocol):
    """Gives the samples of a round, and says which samples come next."""

    @property
    def name(self) -> str:
        """Name of the samples' split, `train` or `test`."""
        ...

    def inputs(self, sample_ids: Sequence[int]) -> Tensor:
        """(len(sample_ids), *input shape) the inputs of these samples, on the CPU."""
        ...

    def context(self, sample_ids: Sequence[int]) -> MicroBatchContext:
        """The context that units get with these samples."""
        ...

    def variant(self, sample_id: int) -> int | None:
        """Number of the sample's variant (its augmentation) at this step; None if the variant never comes again, so
        that it is not cached."""
        ...

    def upcoming(self) -> Iterable[tuple[int, int | None]]:
        """The samples of the next round, each with the number of its variant (None as in `variant`)."""
        ...

    def expect(self, sample_ids: Collection[int]) -> None:
        """Called before `inputs`. Of the samples of the next round, only the inputs of these will be needed."""
        ...


class PrefixOutputs(Protocol):
    """Gives the outputs of the last frozen unit for the micro-batches of one round."""

    def take(self, number: int, context: MicroBatchContext) -> Tensor:
        """(micro-batch, ...) the output for micro-batch `number`, on the device.

        Call it once for each micro-batch. With slices of tokens, call it once for each slice, in order.
        """
        ...


def run_frozen(units: Sequence[nn.Module], rows: Tensor, context: MicroBatchContext) -> Tensor:
    """Run `rows` through frozen units, without an autograd graph. Units in host memory come to the device one at a
    time."""
    with torch.no_grad():
        for unit in units:
            with on_device(unit, rows.device):
                rows = run_unit(unit, rows, context)
    return rows


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The frozen units, the units' device, and the type of activations."""

    units: Sequence[nn.Module]
    device: torch.device
    dtype: torch.dtype

    def run(self, num_units: int, rows: Tensor, context: MicroBatchContext) -> Tensor:
        """Run `rows`, the outputs of the first `num_units` units, through the other units."""
        return run_frozen(self.units[num_units:], rows, context).contiguous()

    def gather(self, entries: Sequence[Tensor]) -> Tensor:
        """(len(entries), ...) the entries as one tensor on the device."""
        pinned = self.device.type == "cuda"
        rows = torch.empty((len(entries), *entries[0].shape), dtype=entries[0].dtype, pin_memory=pinned)
        torch.stack(list(entries), out=rows)
        return rows.to(self.device, self.dtype, non_blocking=True)


class FrozenPrefix:
    """The frozen units that the first span starts with, and the cache of their outputs."""

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
            units: the frozen units, from the model's first on; empty if none is frozen.
            device: the units' device.
            dtype: type of activations.
            cache: the cache of their outputs; None to compute all outputs.
        """
        self._prefix = _Prefix(list(units), device, dtype)
        self._cache = cache if units else None
        self._timer = SampleTimer(device)

    def holds(self, source: Source, sample_ids: Sequence[int]) -> bool:
        """Whether the cache has the output of all frozen units for each of these samples."""
        if self._cache is None or not self._cache.is_ready:
            return False
        unique = dict.fromkeys(sample_ids)
        found = [self._cache.find(source.name, sample, source.variant(sample)) for sample in unique]
        return all(each is not None and each.num_units == len(self._prefix.units) for each in found)

    def keep(self, source: Source, sample_ids: Sequence[int], outputs: Tensor) -> None:
        """Keep outputs in the cache that were computed elsewhere, such as by `PREFIX` actions.

        Args:
            source: gives the samples.
            sample_ids: the samples.
            outputs: (len(sample_ids), ...) the output of the last frozen unit for each sample.
        """
        if self._cache is None or not self._cache.is_ready:
            return
        host = outputs.to("cpu")
        for sample, row in dict(zip(sample_ids, host, strict=True)).items():
            variant = source.variant(sample)
            found = self._cache.find(source.name, sample, variant)
            if variant is not None and (found is None or found.num_units < len(self._prefix.units)):
                self._cache.keep(source.name, sample, variant, row.clone(), None if found is None else found.key)

    def begin(self, source: Source, micro_batches: Sequence[MicroBatch], made: Collection[int] = ()) -> PrefixOutputs:
        """Start a round.

        Args:
            source: gives the samples.
            micro_batches: the micro-batches of the round, including padding. Take them in about this order.
            made: numbers of the micro-batches that will not be taken, because their outputs are computed otherwise.
        """
        rest = {number: each for number, each in enumerate(micro_batches) if number not in made}
        if self._cache is not None and self._cache.settle():
            return _Cached(self._prefix, self._cache, self._timer, source, rest)
        return _Computed(self._prefix, source, rest)


class _Computed:
    """The outputs of a round without a cache: all are computed."""

    def __init__(self, prefix: _Prefix, source: Source, micro_batches: Mapping[int, MicroBatch]) -> None:
        self._prefix = prefix
        self._rows = inputs_of(source, micro_batches)

    def take(self, number: int, context: MicroBatchContext) -> Tensor:
        rows = to_device(_slice_of(self._rows, number, context.tokens), self._prefix.device)
        return self._prefix.run(0, rows, context) if self._prefix.units else rows


class _Cached:
    """The outputs of a round with a cache.

    Samples are computed together if they have the same length, and their entries have passed the same number of units.
    """

    def __init__(
        self,
        prefix: _Prefix,
        cache: ActivationCache,
        timer: SampleTimer,
        source: Source,
        micro_batches: Mapping[int, MicroBatch],
    ) -> None:
        """Find the entries of all samples, and list which samples to compute and which entries to read ahead."""
        self._prefix, self._cache, self._timer = prefix, cache, timer
        self._source, self._micro_batches = source, micro_batches
        #: The length in tokens that each sample is cut to.
        self._lengths = {sample: each.length for each in micro_batches.values() for sample in each.sample_ids}
        #: By sample, how many micro-batches still need it. Samples that are repeated as padding are in several.
        self._uses = Counter(sample for each in micro_batches.values() for sample in set(each.sample_ids))
        #: The place of the entry of each sample that has one.
        self._found: dict[int, Found] = {}
        #: Samples to compute, in the order of need, by the number of units passed (0 without an entry) and by length.
        self._waiting: dict[tuple[int, int | None], deque[int]] = defaultdict(deque)
        #: Inputs of the samples without an entry.
        self._inputs: dict[int, Tensor] = {}
        self._computed: dict[int, Tensor] = {}
        #: Keys of the entries to read ahead, in the order of need. Those of the next round come last.
        self._ahead: dict[Key, None] = {}
        #: Outputs of the micro-batches that still have slices to take, by number.
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
        """Find the entries of the round's samples. Returns the samples that have none."""
        missing = []
        for sample, length in self._lengths.items():
            found = self._cache.find(self._source.name, sample, self._source.variant(sample))
            if found is not None:
                self._found[sample] = found
                self._ahead[found.key] = None
            else:
                missing.append(sample)
            num_units = self._num_units(sample)
            if num_units < len(self._prefix.units):
                self._waiting[num_units, length].append(sample)
        return missing

    def _expect(self) -> None:
        """Plan to read ahead the entries of the next round. Tell the source which of its samples have none."""
        uncached = set()
        for sample, variant in self._source.upcoming():
            found = self._cache.find(self._source.name, sample, variant)
            if found is None:
                uncached.add(sample)
            else:
                self._ahead[found.key] = None
        self._source.expect(uncached)

    def _read_ahead(self) -> None:
        while self._ahead:
            key = next(iter(self._ahead))
            if not self._cache.store.stage(key):
                return
            del self._ahead[key]

    def _num_units(self, sample: int) -> int:
        """Number of units that the sample's entry has passed; 0 if it has none."""
        return self._found[sample].num_units if sample in self._found else 0

    def _assemble(self, ids: Sequence[int]) -> Tensor:
        """(micro-batch, ...) the outputs for the samples `ids`, read or computed."""
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
            self._timer.start()
            gathered = self._prefix.gather(list(entries.values()))
            self._timer.stop(len(entries), self._cache.choice.gathering)
            rows = dict(zip(entries, gathered, strict=True))
        rows |= {sample: self._computed[sample] for sample in ids if sample not in entries}
        for sample in rows:
            self._uses[sample] -= 1
            if not self._uses[sample]:
                self._computed.pop(sample, None)
        return gathered if len(entries) == len(ids) else torch.stack([rows[sample] for sample in ids])

    def _compute(self, num_units: int, length: int | None, size: int) -> None:
        """Compute the outputs of at most `size` samples, those that are needed first.

        Args:
            num_units: number of units that their entries have passed; 0 for samples without an entry.
            length: length of the samples in tokens.
            size: number of samples in the batch. It is padded if there are fewer.
        """
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
        self._timer.start()
        output = self._prefix.run(num_units, batch, source.context(samples + samples[:1] * padding))
        if num_units == 0:
            self._timer.stop(size, self._cache.choice.computing)
        host = output[: len(samples)].to("cpu")
        for sample, row, entry in zip(samples, output, host, strict=False):
            self._computed[sample] = row
            variant = source.variant(sample)
            if variant is not None:
                replaced = self._found[sample].key if sample in self._found else None
                self._cache.keep(source.name, sample, variant, entry.clone(), replaced)

    def _read(self, sample: int) -> Tensor | None:
        """Read the entry that was found for a sample. If it is damaged, returns None, and the sample is computed."""
        key = self._found[sample].key
        self._ahead.pop(key, None)
        entry = self._cache.read(key)
        if entry is None:
            del self._found[sample]
            length = self._lengths[sample]
            self._inputs[sample] = _cut(self._source.inputs([sample])[0], length, 0)
            self._waiting[0, length].appendleft(sample)
        return entry


def inputs_of(source: Source, micro_batches: Mapping[int, MicroBatch]) -> dict[int, Tensor]:
    """By number, (micro-batch, *input shape) the inputs of each micro-batch, on the CPU."""
    if not micro_batches:
        return {}
    rows = source.inputs([sample for each in micro_batches.values() for sample in each.sample_ids])
    parts = torch.split(rows, [len(each.sample_ids) for each in micro_batches.values()])
    return {number: _cut(part, each.length) for (number, each), part in zip(micro_batches.items(), parts, strict=True)}


def _slice_of(rows: dict[int, Tensor], number: int, tokens: TokenSlice | None) -> Tensor:
    """The positions `tokens` of the rows of micro-batch `number`; all without slices. The last slice removes the
    rows."""
    if tokens is None:
        return rows.pop(number)
    whole = rows[number] if tokens.stop < tokens.total else rows.pop(number)
    return whole[:, tokens.start : tokens.stop]


def _cut(rows: Tensor, length: int | None, dim: int = 1) -> Tensor:
    """The first `length` positions in dimension `dim`; all if `length` is None."""
    return rows if length is None else rows.narrow(dim, 0, length)
