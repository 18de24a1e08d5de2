"""The outputs of a first stage's frozen units, computed or read from the cache.

Missing outputs are computed in batches of a micro-batch's size, in the order of need. So a cache with
half of the samples saves half of the batches, and the first micro-batch waits for one batch only. Batches have the
same shape as without a cache, so the same kernels give the same numbers.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipetransformer.device_copies import to_device
from pipetransformer.models import run_unit

from .cache import ActivationCache
from .choice import Stopwatch
from .digest import Key


@dataclass(frozen=True)
class Source:
    """The source of a round's samples.

    Attributes:
        split: `train` or `test`.
        inputs: returns inputs (len(ids), *input shape) on the CPU.
        augmentation: returns a sample's variant at this step; None if it does not come again and is not cached.
        enter: called before the units compute a batch of samples.
        upcoming: returns the next round's samples with their variants.
        expect: called before `inputs` with the upcoming samples whose inputs will be needed.
    """

    split: str
    inputs: Callable[[Sequence[int]], Tensor]
    augmentation: Callable[[int], int | None]
    enter: Callable[[Sequence[int]], None]
    upcoming: Callable[[], Iterable[tuple[int, int | None]]] = lambda: ()
    expect: Callable[[Collection[int]], None] = lambda samples: None


@dataclass
class _Round:
    """The state of a round.

    Attributes:
        uses: number of micro-batches that still need a sample (padding repeats some).
        found: entries by sample, with the number of units that computed each.
        waiting: samples to compute, by that number, in the order of need.
        inputs: inputs of samples without an entry.
        computed: results by sample.
        ahead: entries to read ahead, in the order of need, including the next round's.
    """

    source: Source
    micro_batches: deque[Sequence[int]]
    uses: Counter[int]
    found: dict[int, tuple[int, Key]] = field(default_factory=dict)
    waiting: dict[int, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    inputs: dict[int, Tensor] = field(default_factory=dict)
    computed: dict[int, Tensor] = field(default_factory=dict)
    ahead: dict[Key, None] = field(default_factory=dict)


class FrozenPrefix:
    """Returns the activations at a first stage's frozen boundary, one micro-batch after another."""

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
            units: the frozen units of this stage, from the model's first on; may be empty.
            device: the units' device.
            dtype: type of activations.
            cache: a cache for these units; None to compute everything.
        """
        self._units = list(units)
        self._device = device
        self._dtype = dtype
        self._cache = cache if units else None
        self._watch = Stopwatch(device)
        self._round: _Round | None = None
        self._plain: deque[tuple[Sequence[int], Tensor]] = deque()

    def begin(self, source: Source, micro_batches: Sequence[Sequence[int]]) -> None:
        """Start a round over these ids, including padding. `take` then returns them in this order."""
        self._round = None
        self._source = source
        if self._cache is not None and self._cache.ready():
            self._round = self._plan(self._cache, source, micro_batches)
            self._read_ahead(self._cache, self._round)
        else:
            rows = source.inputs([sample for ids in micro_batches for sample in ids])
            parts = torch.split(rows, [len(ids) for ids in micro_batches])
            self._plain = deque(zip(micro_batches, parts, strict=True))

    def take(self) -> Tensor:
        """(micro-batch, ...) output of the frozen units for the next micro-batch, on the device."""
        if self._cache is None or self._round is None:
            ids, rows = self._plain.popleft()
            return self._run(0, to_device(rows, self._device), ids, self._source)
        output = self._assemble(self._cache, self._round)
        self._read_ahead(self._cache, self._round)
        return output

    def _plan(self, cache: ActivationCache, source: Source, micro_batches: Sequence[Sequence[int]]) -> _Round:
        """Find entries, list what is missing and what to read ahead."""
        now = _Round(source, deque(micro_batches), Counter(i for ids in micro_batches for i in set(ids)))
        for sample in dict.fromkeys(i for ids in micro_batches for i in ids):
            augmentation = source.augmentation(sample)
            place = None if augmentation is None else cache.find(source.split, sample, augmentation)
            if place is not None:
                now.found[sample] = place
                now.ahead[place[1]] = None
            num_units = 0 if place is None else place[0]
            if num_units < len(self._units):
                now.waiting[num_units].append(sample)
        uncached = set()
        for sample, augmentation in source.upcoming():
            place = None if augmentation is None else cache.find(source.split, sample, augmentation)
            if place is None:
                uncached.add(sample)
            else:
                now.ahead[place[1]] = None
        source.expect(uncached)
        if now.waiting[0]:
            now.inputs = dict(zip(now.waiting[0], source.inputs(now.waiting[0]), strict=True))
        return now

    def _read_ahead(self, cache: ActivationCache, now: _Round) -> None:
        while now.ahead:
            key = next(iter(now.ahead))
            if not cache.store.stage(key):
                return
            del now.ahead[key]

    def _assemble(self, cache: ActivationCache, now: _Round) -> Tensor:
        """The rows of the next micro-batch, read or computed."""
        ids = now.micro_batches.popleft()
        entries: dict[int, Tensor] = {}
        for sample in dict.fromkeys(ids):
            if now.found.get(sample, (0, None))[0] == len(self._units):
                entry = self._read(cache, now, sample)
                if entry is not None:
                    entries[sample] = entry
        cache.count("hits", len(entries))
        for sample in ids:
            while sample not in entries and sample not in now.computed:
                self._compute(cache, now, now.found.get(sample, (0, None))[0], len(ids))
        rows: dict[int, Tensor] = {}
        if entries:
            self._watch.start()
            gathered = self._gather(list(entries.values()))
            self._watch.stop(len(entries), cache.choice.gathering)
            rows = dict(zip(entries, gathered, strict=True))
        rows |= {sample: now.computed[sample] for sample in ids if sample not in entries}
        for sample in rows:
            now.uses[sample] -= 1
            if not now.uses[sample]:
                now.computed.pop(sample, None)
        return gathered if len(entries) == len(ids) else torch.stack([rows[sample] for sample in ids])

    def _compute(self, cache: ActivationCache, now: _Round, num_units: int, size: int) -> None:
        """Compute the next samples, at most `size`, whose entries end after `num_units` units."""
        queue = now.waiting[num_units]
        samples = [queue.popleft() for _ in range(min(size, len(queue)))]
        if num_units == 0:
            rows = to_device(torch.stack([now.inputs.pop(sample) for sample in samples]), self._device)
            cache.count("computed", len(samples))
        else:
            entries = {sample: self._read(cache, now, sample) for sample in samples}
            whole = {sample: entry for sample, entry in entries.items() if entry is not None}
            if not whole:
                return
            samples, rows = list(whole), self._gather(list(whole.values()))
            cache.count("advanced", len(samples))
        padding = size - len(samples)
        batch = torch.cat([rows, rows[:1].expand(padding, *rows.shape[1:])]) if padding else rows
        self._watch.start()
        output = self._run(num_units, batch, samples + samples[:1] * padding, now.source)
        if num_units == 0:
            self._watch.stop(size, cache.choice.computing)
        host = output[: len(samples)].to("cpu")
        for sample, row, entry in zip(samples, output, host, strict=False):
            now.computed[sample] = row
            augmentation = now.source.augmentation(sample)
            if augmentation is not None:
                replaced = now.found[sample][1] if sample in now.found else None
                cache.keep(now.source.split, sample, augmentation, entry.clone(), replaced)

    def _read(self, cache: ActivationCache, now: _Round, sample: int) -> Tensor | None:
        """The entry that was found for a sample; None if it is damaged, and then it counts as not found."""
        key = now.found[sample][1]
        now.ahead.pop(key, None)
        entry = cache.read(key)
        if entry is None:
            del now.found[sample]
            now.inputs[sample] = now.source.inputs([sample])[0]
            now.waiting[0].appendleft(sample)
        return entry

    def _gather(self, entries: Sequence[Tensor]) -> Tensor:
        """(len(entries), ...) on the device."""
        pinned = self._device.type == "cuda"
        rows = torch.empty((len(entries), *entries[0].shape), dtype=entries[0].dtype, pin_memory=pinned)
        torch.stack(list(entries), out=rows)
        return rows.to(self._device, self._dtype, non_blocking=True)

    def _run(self, num_units: int, rows: Tensor, ids: Sequence[int], source: Source) -> Tensor:
        """Run `rows`, the outputs of the first `num_units` units, through the other units."""
        if not self._units:
            return rows
        source.enter(ids)
        with torch.no_grad():
            for unit in self._units[num_units:]:
                rows = run_unit(unit, rows)
        return rows
