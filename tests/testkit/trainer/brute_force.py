"""The fastest step of a pipelined job by trying everything: each layout, each micro-batch size, each cut.

It imports nothing of ours, and plays 1F1B by itself.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise


@dataclass(frozen=True)
class Unit:
    """An embedding, a layer or a head. Seconds and bytes are of one micro-batch of s samples.

    Attributes:
        fixed: seconds of a forward without samples.
        per_sample: further seconds of a forward for each sample.
        backward: seconds of a whole backward, in forwards.
        weights: seconds of the gradients of the weights alone, in forwards.
        saved: bytes kept for the backward, for each sample.
        parameter_bytes: bytes of parameters, and of gradients, which are summed over the pipelines. A frozen unit takes
            no more.
        trained_bytes: bytes while it trains.
    """

    fixed: float
    per_sample: float
    backward: float
    weights: float
    saved: float
    parameter_bytes: int
    trained_bytes: int


@dataclass(frozen=True)
class Situation:
    """A job at one boundary.

    Attributes:
        units: embedding, layers and head.
        frozen: number of frozen layers.
        missing: share of the frozen forwards that the first worker computes, by number of pipelines.
        away: number of leading units that the first worker keeps in host memory, by number of pipelines. It has room
            for the largest of them.
        global_batch: samples of a step.
        shards: parts of the data, which pipelines share.
        workers: most workers of a layout.
        worker_bytes: bytes of a worker.
        seconds_per_byte: of a message, or of a sum over the pipelines.
        sample_bytes: bytes of one sample between two workers.
        seconds_per_action: of any computation besides those of its units.
    """

    units: Sequence[Unit]
    frozen: int
    missing: Sequence[float]
    away: Sequence[int]
    global_batch: int
    shards: int
    workers: int
    worker_bytes: float
    seconds_per_byte: float
    sample_bytes: int
    seconds_per_action: float

    def least_seconds(self) -> float:
        """Seconds of the fastest step of all; infinite if nothing fits."""
        return min(self.by_layout().values(), default=math.inf)

    def by_layout(self) -> dict[tuple[int, int], float]:
        """Seconds of the fastest step of each layout of (stages, pipelines) that fits."""
        layers = len(self.units) - 2
        found = {}
        for stages in range(1, min(layers, self.workers) + 1):
            for pipelines in range(1, min(self.workers // stages, self.shards) + 1):
                least = min(self._steps(stages, pipelines), default=math.inf)
                if least < math.inf:
                    found[stages, pipelines] = least
        return found

    def _steps(self, stages: int, pipelines: int) -> Iterator[float]:
        share = math.ceil(self.shards / pipelines)
        samples = math.ceil(self.global_batch * share / self.shards)
        for size in {math.ceil(samples / (stages * each)) for each in (1, 2, 3, 4, 5, 6)}:
            for inner in combinations(range(2, len(self.units) - 1), stages - 1):
                bounds = [0, *inner, len(self.units)]
                yield self._step(
                    [range(*pair) for pair in pairwise(bounds)], size, math.ceil(samples / size), pipelines
                )

    def _step(self, cut: Sequence[range], size: int, micro_batches: int, pipelines: int) -> float:
        """Seconds of a step; infinite if it does not fit."""
        first_active = self.frozen + 1 if self.frozen else 0
        forward, backward = [0.0] * len(cut), [0.0] * len(cut)
        reduction = 2 * (pipelines - 1) / pipelines * self.seconds_per_byte
        summed = [0.0] * len(cut)
        away = self.away[pipelines - 1]
        for stage, held in enumerate(cut):
            kept = 0.0
            needed = max((unit.parameter_bytes for unit in self.units[:away]), default=0) if stage == 0 else 0
            for index in held:
                unit = self.units[index]
                once = unit.fixed + unit.per_sample * size
                if index < first_active:
                    forward[stage] += once * (self.missing[pipelines - 1] if stage == 0 else 1)
                    needed += 0 if stage == 0 and index < away else unit.parameter_bytes
                else:
                    forward[stage] += once
                    backward[stage] += once * (unit.weights if index == first_active else unit.backward)
                    needed += unit.trained_bytes
                    kept += unit.saved * size
                    summed[stage] += reduction * unit.parameter_bytes
            if round(needed + kept * min(len(cut) - stage, micro_batches)) > self.worker_bytes:
                return math.inf
        trains = [held[-1] >= first_active for held in cut]
        ends = self._play(forward, backward, trains, micro_batches, self.seconds_per_byte * self.sample_bytes * size)
        return max(end + max(0.0, s - b) for end, s, b in zip(ends, summed, backward, strict=True))

    def _play(
        self,
        forward: Sequence[float],
        backward: Sequence[float],
        trains: Sequence[bool],
        micro_batches: int,
        message: float,
    ) -> list[float]:
        """When each stage ends under 1F1B."""
        stages = len(forward)
        orders = [
            _order(stages - stage, micro_batches) if trains[stage] else _forwards(micro_batches)
            for stage in range(stages)
        ]
        done: dict[tuple[str, int, int], float] = {}
        clock, place = [0.0] * stages, [0] * stages
        while any(place[stage] < len(orders[stage]) for stage in range(stages)):
            for stage in range(stages):
                while place[stage] < len(orders[stage]):
                    kind, number = orders[stage][place[stage]]
                    source = (kind, stage - 1 if kind == "F" else stage + 1, number)
                    arrived = 0.0
                    if 0 <= source[1] < stages:
                        if source not in done:
                            break
                        arrived = done[source] + message
                    takes = (forward if kind == "F" else backward)[stage] + self.seconds_per_action
                    clock[stage] = max(clock[stage], arrived) + takes
                    done[kind, stage, number] = clock[stage]
                    place[stage] += 1
        return clock


def _forwards(micro_batches: int) -> list[tuple[str, int]]:
    return [("F", number) for number in range(micro_batches)]


def _order(in_flight: int, micro_batches: int) -> list[tuple[str, int]]:
    """1F1B on one stage: forwards until `in_flight` wait, then backwards and forwards in turns, then backwards."""
    order = []
    for number in range(micro_batches + in_flight - 1):
        if number < micro_batches:
            order.append(("F", number))
        if 0 <= number - in_flight + 1 < micro_batches:
            order.append(("B", number - in_flight + 1))
    return order
