"""One way to run a round on virtual devices: a model's times, its cut, a schedule; and what it should take."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from benchmarks.virtual import UnitTimes
from pipetransformer.partition.contiguous import partition
from pipetransformer.schedules import ActionKind, RoundShape, Schedule
from pipetransformer.schedules.ahead import Ahead
from pipetransformer.schedules.operations import Operation
from pipetransformer.schedules.order import planned
from pipetransformer.schedules.simulate import RoundCosts, Simulated, simulate

#: Seconds of a unit's forward on these devices, so long that Python's own time between two units is small beside it.
UNIT_SECONDS = 0.01


@dataclass(frozen=True)
class Way:
    """A round of one pipeline.

    Attributes:
        name: in tables and results.
        units: times of all units, in the order of the model.
        cut: the units of each span.
        schedule: orders the round.
        shape: of the round.
        frozen: leading units that do not train. In a span they run without a graph.
        samples: samples of a micro-batch.
        slices: tokens of each slice of a micro-batch; empty without slices.
        prefix: units that run ahead, before those of the spans; they are not among `units`.
    """

    name: str
    units: tuple[UnitTimes, ...]
    cut: tuple[range, ...]
    schedule: Schedule
    shape: RoundShape
    frozen: int = 0
    samples: int = 1
    slices: tuple[int, ...] = ()
    prefix: tuple[UnitTimes, ...] = field(default=())

    @cached_property
    def lists(self) -> tuple[tuple[Operation, ...], ...]:
        """The operations of each worker."""
        return planned(self.schedule, self.shape)

    def tokens(self, chunk: int) -> tuple[int, int]:
        """Where a chunk's tokens begin in its samples, and their number; both 0 without slices."""
        if not self.slices:
            return 0, 0
        place = chunk % len(self.slices)
        return sum(self.slices[:place]), self.slices[place]

    def unit_forward(self, unit: UnitTimes, chunk: int) -> float:
        """Declared seconds of a unit's forward."""
        start, length = self.tokens(chunk)
        return unit.forward(self.samples, length, start)

    @property
    def declared_seconds(self) -> float:
        """What the round takes by declared times alone; for frozen forwards ahead the bound of any such round."""
        if isinstance(self.schedule, Ahead):
            return self.schedule.bound_seconds(self.shape)
        return self.simulated().seconds

    def simulated(self, action_seconds: float = 0.0) -> Simulated:
        """The round by declared times; each action takes `action_seconds` in addition."""
        prefix = [unit.forward(self.samples) for unit in self.prefix]
        return simulate(self.lists, self.shape, RoundCosts(self._costs, action_seconds=action_seconds, prefix=prefix))

    @property
    def least_action_seconds(self) -> float:
        """Declared seconds of the shortest computation."""
        rows = [seconds for row in self._costs.values() for seconds in row if seconds]
        return min([*rows, *(unit.forward(self.samples) for unit in self.prefix)])

    @property
    def _costs(self) -> dict[tuple[ActionKind, int], tuple[float, ...]]:
        """Declared seconds of each kind of computation on each span, by slice."""
        chunks = range(max(1, len(self.slices)))
        rows: dict[tuple[ActionKind, int], tuple[float, ...]] = {}
        for span, units in enumerate(self.cut):
            by_chunk = [self._span_seconds(units, chunk) for chunk in chunks]
            forward, inputs, weights = (tuple(part) for part in zip(*by_chunk, strict=True))
            rows |= {
                (ActionKind.FORWARD, span): forward,
                (ActionKind.INPUT_GRADIENT, span): inputs,
                (ActionKind.WEIGHT_GRADIENT, span): weights,
                (ActionKind.BACKWARD, span): tuple(a + b for a, b in zip(inputs, weights, strict=True)),
                (ActionKind.STEP, span): (0.0,),
            }
        return rows

    def _span_seconds(self, units: range, chunk: int) -> tuple[float, float, float]:
        """Declared seconds of a span: forward, gradients of inputs, gradients of weights."""
        forward = inputs = weights = 0.0
        for index in units:
            unit = self.units[index]
            seconds = self.unit_forward(unit, chunk)
            forward += seconds
            if index >= self.frozen:
                weights += seconds * unit.weight_gradient
            if index > self.frozen:  # no unit before the first that trains wants a gradient
                inputs += seconds * unit.input_gradient
        return forward, inputs, weights


def even_cut(units: Sequence[UnitTimes], spans: int, *, frozen: int = 0, samples: int = 1) -> tuple[range, ...]:
    """The exact cut by declared times; frozen units count their forward alone."""
    costs = []
    for index, unit in enumerate(units):
        seconds = unit.forward(samples)
        trained = (index >= frozen) * unit.weight_gradient + (index > frozen) * unit.input_gradient
        costs.append(seconds * (1 + trained))
    return tuple(partition(costs, spans))


def even_units(count: int, seconds: float = UNIT_SECONDS) -> tuple[UnitTimes, ...]:
    """Units whose forward takes so long, whatever the samples."""
    return (UnitTimes(fixed=seconds),) * count
