"""Random jobs whose ideal is compared with brute force."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipetransformer.partition import ModelCosts, StepModel, UnitCost
from pipetransformer.partition.ideal import Ideal
from pipetransformer_contract.choose import Bounds, Packing
from pipetransformer_contract.layout import Layout

from .brute_force import Situation, Unit

_SAMPLES = 512


@dataclass(frozen=True)
class Case:
    """A job at one boundary, for both.

    Attributes:
        situation: what brute force needs; `with_missing` fills in what its cache lacks.
        cached: number of frozen layers whose outputs the cache has.
        off: number of frozen layers that have left the workers' devices, at least `cached`, if any leave.
        cache_bytes: size of a pipeline's cache.
        offloads: whether frozen layers leave the workers' devices once the cache has their outputs.
    """

    situation: Situation
    cached: int
    off: int
    cache_bytes: int
    offloads: bool

    def with_missing(self) -> Situation:
        """What brute force tries: the first worker computes what its cache lacks, or has of fewer layers, and keeps
        away what has left, if it has room for all samples."""
        situation = self.situation
        forwards = [unit.fixed + unit.per_sample * 8 for unit in situation.units[: situation.frozen + 1]]
        stale = sum(forwards[self.cached + 1 :]) / sum(forwards) if self.cached else 1.0
        missing, away = [], []
        for pipelines in range(1, situation.shards + 1):
            held = min(1.0, self.cache_bytes * pipelines / (_SAMPLES * situation.sample_bytes))
            missing.append(1 - held + held * stale)
            away.append(self.off + 1 if self.offloads and self.off and held == 1 else 0)
        return replace(situation, missing=missing, away=away)

    def ideal(self) -> Ideal:
        """The product's answer."""
        situation = self.situation
        units = situation.units
        bounds = Bounds(Layout(1, 1), 1, situation.workers, 1, situation.shards, 0)
        model = StepModel(
            costs=ModelCosts(
                micro_batch_sizes=(2, 8),
                small=_costs(units, 2),
                large=_costs(units, 8),
                seconds_per_byte=situation.seconds_per_byte,
                seconds_per_action=situation.seconds_per_action,
                worker_bytes=int(situation.worker_bytes),
            ),
            global_batch=situation.global_batch,
            num_shards=situation.shards,
            micro_batch_size=None,
            unit_bytes=[unit.parameter_bytes for unit in units],
            trained_bytes=[unit.trained_bytes for unit in units],
            sample_bytes=situation.sample_bytes,
            num_samples=_SAMPLES,
            cache_bytes=self.cache_bytes,
            offloads=self.offloads,
        )
        return Ideal(model, bounds, Packing.MEASURED)


def _costs(units: Sequence[Unit], size: int) -> list[UnitCost]:
    forwards = [unit.fixed + unit.per_sample * size for unit in units]
    return [
        UnitCost(once, once * unit.backward, once * unit.weights, unit.saved * size)
        for once, unit in zip(forwards, units, strict=True)
    ]


def draw(seed: int, most_layers: int) -> Case:
    """A random job. Memory is short in most of them, links are slow in some, layers differ in some."""
    rng = random.Random(seed)
    layers = rng.randint(1, most_layers)
    uneven = rng.choice((0.0, 0.3, 1.0))
    units = [_unit(rng, 1.0 + uneven * rng.uniform(-0.9, 2.0)) for _ in range(layers)]
    units = [_unit(rng, rng.choice((0.1, 2.0))), *units, _unit(rng, rng.choice((0.1, 2.0)))]
    whole = sum(unit.trained_bytes for unit in units)
    shards = rng.randint(1, 8)
    frozen = rng.randint(0, layers)
    situation = Situation(
        units=units,
        frozen=frozen,
        missing=(),
        away=(),
        global_batch=shards * rng.randint(1, 6),
        shards=shards,
        workers=rng.randint(1, 8),
        worker_bytes=int(whole * rng.choice((0.2, 0.35, 0.6, 2.0))),
        seconds_per_byte=rng.choice((0.0, 1e-9, 1e-6)),
        sample_bytes=64,
        seconds_per_action=rng.choice((0.0, 2e-4)),
    )
    cached, cache_bytes = rng.randint(0, frozen), rng.choice((0, _SAMPLES * 16, _SAMPLES * 64))
    offloads = rng.random() < 0.5
    return Case(situation, cached, rng.randint(cached, frozen), cache_bytes, offloads)


def _unit(rng: random.Random, weight: float) -> Unit:
    trained = int(4000 * weight)
    return Unit(
        fixed=1e-4,
        per_sample=1e-3 * weight,
        backward=rng.choice((2.0, 2.5)),
        weights=1.0,
        saved=rng.choice((0.0, 100.0)),
        parameter_bytes=trained // 4,
        trained_bytes=trained,
    )
