"""What `schedule: Auto` chooses, against the best measured of all candidates: 4 kinds of models, 4 and 8 workers."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.virtual import UnitTimes, profile
from pipetransformer.partition import AUTO, Candidate, ModelCosts, StepModel, UnitCost
from pipetransformer.schedules import GPipe, RoundShape, make_schedule

from .in_place import make_way
from .measured import Measured
from .part import Found
from .rig import measure
from .ways import Way, even_units
from .zero_bubble import errors, seconds_per_action

#: The profiles of the default calibration.
KINDS = ("even", "heavy head", "heavy embedding", "falling")
WORKERS = (4, 8)
_CHUNKS, _SAMPLES = 8, 4
#: Makes a layer's forward about 10 ms.
_DILATE = 3.3
#: A larger loss has to be noise.
_LARGEST_LOSS = 0.05


@dataclass(frozen=True)
class Case:
    """A kind of model on a pipeline. Each worker can own two spans of one layer."""

    kind: str
    workers: int

    def units(self) -> list[UnitTimes]:
        return profile(self.kind).units(2 * self.workers, _DILATE)

    def candidates(self, action_seconds: float) -> list[Candidate]:
        """All that can run, the choice first."""
        units = self.units()
        small, large = ([_cost(unit, samples) for unit in units] for samples in (_SAMPLES, 2 * _SAMPLES))
        costs = ModelCosts(
            micro_batch_sizes=(_SAMPLES, 2 * _SAMPLES), small=small, large=large, seconds_per_action=action_seconds
        )
        model = StepModel(
            costs=costs,
            global_batch=_SAMPLES * _CHUNKS,
            num_shards=1,
            micro_batch_size=_SAMPLES,
            unit_bytes=[1] * len(units),
            trained_bytes=[4] * len(units),
            sample_bytes=4,
            options=AUTO,
        )
        return [candidate for candidate in model.candidates(0, self.workers, 1) if candidate.cut is not None]

    def way(self, candidate: Candidate) -> Way:
        """A round as a candidate says."""
        cut = candidate.cut
        assert cut is not None
        shape = RoundShape(cut.owners, _CHUNKS)
        schedule = make_schedule(cut.schedule, spans_per_worker=candidate.option.spans_per_worker)
        return Way(
            f"{cut.schedule.value}, V={candidate.option.spans_per_worker}",
            tuple(self.units()),
            tuple(cut.spans),
            schedule,
            shape,
            samples=_SAMPLES,
        )


def run(pairs: int) -> Found:
    """Each candidate runs, also those that the choice did not simulate."""
    losses: dict[str, float] = {}
    told_apart: list[str] = []
    ways: dict[str, dict[str, dict[str, float]]] = {}
    wrong: dict[str, float] = {}
    for workers in WORKERS:
        action_seconds = _seconds_per_action(workers)
        for case in (Case(kind, workers) for kind in KINDS):
            name = f"{case.kind}, K={case.workers}, M={_CHUNKS}"
            compared = [case.way(candidate) for candidate in case.candidates(action_seconds)]
            measured = measure(compared, pairs, rounds=1)
            losses[name] = loss(measured, compared)
            if losses[name] > _LARGEST_LOSS and _worse_for_sure(measured, compared):
                told_apart.append(name)
            expected = {way.name: way.simulated(action_seconds).seconds for way in compared}
            ways[f"choice {compared[0].name} for {name}"] = measured.table(expected)
            wrong |= {f"{way}, {name}": error for way, error in errors(measured, compared, action_seconds).items()}
    return Found(
        {"auto_worst_loss": max(losses.values()), "auto_indistinguishable": not told_apart},
        ways,
        wrong,
    )


def loss(measured: Measured, ways: Sequence[Way]) -> float:
    """The choice's median over the best one's, less 1. The choice is the first way."""
    return measured.median(ways[0].name) / measured.median(measured.best([way.name for way in ways])) - 1


def _worse_for_sure(measured: Measured, ways: Sequence[Way]) -> bool:
    return measured.low(ways[0].name, measured.best([way.name for way in ways])) > 1


def _seconds_per_action(workers: int) -> float:
    alone = make_way("one micro-batch", even_units(workers), GPipe(), tuple(range(workers)), 1)
    return seconds_per_action(measure([alone], 5), alone)


def _cost(unit: UnitTimes, samples: int) -> UnitCost:
    seconds = unit.forward(samples)
    weights = unit.weight_gradient * seconds
    return UnitCost(seconds, weights + unit.input_gradient * seconds, weights)
