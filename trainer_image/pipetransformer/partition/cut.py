"""A cut: how the trainer runs a layout that the operator chose. The leader makes it and sends it to all workers."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from pipetransformer_contract.spec import FrozenForward, ScheduleName


def _read(given: range | list[int]) -> range:
    return given if isinstance(given, range) else range(*given)


#: A range of units; [start, stop] in JSON.
_Units = Annotated[range, PlainValidator(_read), PlainSerializer(lambda units: [units.start, units.stop])]


@dataclass(frozen=True)
class Cut:
    """The spans of a layout, the stages that own them, and the schedule that orders their computations.

    Attributes:
        spans: contiguous units of each span, in the order of the model.
        micro_batch_size: samples in a micro-batch.
        owners: stage of each span; by default each stage owns one span, in order.
        schedule: the schedule that runs.
        why_schedule: why the schedule of the spec does not run; empty if it does.
        ahead_units: the forwards of the first `ahead_units` units, all frozen, run one round ahead; 0 if frozen
            forwards run in place.
        holders: stages that hold these units; the owner of the first span is one.
        why_in_place: why frozen forwards do not run ahead although the spec asks for it; otherwise empty.
    """

    spans: list[_Units]
    micro_batch_size: int
    owners: tuple[int, ...] = ()
    schedule: ScheduleName = ScheduleName.ONE_FORWARD_ONE_BACKWARD
    why_schedule: str = ""
    ahead_units: int = 0
    holders: tuple[int, ...] = ()
    why_in_place: str = ""

    def __post_init__(self) -> None:
        if not self.owners:
            object.__setattr__(self, "owners", tuple(range(len(self.spans))))

    @property
    def stages(self) -> int:
        """Number of stages (K)."""
        return max(self.owners) + 1

    @property
    def num_units(self) -> int:
        """Number of units of the model."""
        return self.spans[-1].stop

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The pairs of stages that exchange messages, the lower stage first.

        The owners of neighbouring spans do. So do the holders of frozen units and the owner of the first span, because
        it gets the outputs that they compute ahead.
        """
        first = self.owners[0]
        some = [*pairwise(self.owners), *((first, holder) for holder in self.holders)]
        return {(min(pair), max(pair)) for pair in some if pair[0] != pair[1]}

    def spans_of(self, stage: int) -> list[range]:
        """The spans that a stage owns, in the order of the model."""
        return [span for span, owner in zip(self.spans, self.owners, strict=True) if owner == stage]

    def units_of(self, stage: int) -> list[int]:
        """The units that a stage owns, ascending."""
        return [unit for span in self.spans_of(stage) for unit in span]

    def copies_of(self, stage: int) -> list[int]:
        """The frozen units of other stages that a stage holds copies of, to run them ahead; ascending."""
        own = self.units_of(stage)
        return [unit for unit in range(self.ahead_units) if unit not in own] if stage in self.holders else []

    def held_by(self, stage: int) -> list[int]:
        """The units that a stage owns, and those it holds copies of, ascending."""
        return sorted([*self.units_of(stage), *self.copies_of(stage)])

    def prefix_layers(self, boundary: int) -> int:
        """Number of frozen layers in the first span, if the first `boundary` layers of the model are frozen. The cache
        keeps the outputs of the last of them."""
        return min(boundary, self.spans[0].stop - 1)

    def off_device(self, stage: int, cached_layers: int) -> list[int]:
        """The frozen units that a stage keeps in host memory, ascending. The cache has their outputs.

        Only units of the first span and copies of them can be in host memory. Frozen units of other spans are needed in
        each round.

        Args:
            stage: the stage.
            cached_layers: the cache has had the outputs of the first `cached_layers` layers for all samples.
        """
        if not cached_layers:
            return []
        prefix = self.spans[0] if stage == self.owners[0] else range(0)
        return [unit for unit in sorted({*prefix, *self.copies_of(stage)}) if unit <= cached_layers]

    @property
    def frozen_forward(self) -> FrozenForward:
        """When the frozen layers of this cut compute: one round ahead, or in place."""
        return FrozenForward.AHEAD if self.ahead_units else FrozenForward.IN_PLACE

    @property
    def units_by_stage(self) -> list[list[int]]:
        """The units that each stage owns."""
        return [self.units_of(stage) for stage in range(self.stages)]

    def layers_of(self, stage: int) -> list[range]:
        """The layers that a stage owns: a range for each span that has layers. Layer 0 comes after the embedding."""
        last = self.num_units - 1
        held = [range(max(span.start, 1) - 1, min(span.stop, last) - 1) for span in self.spans_of(stage)]
        return [layers for layers in held if layers]

    def frozen_layers(self, boundary: int) -> list[int]:
        """Number of frozen layers of each stage, if the first `boundary` layers of the model are frozen."""
        held = [self.layers_of(stage) for stage in range(self.stages)]
        return [sum(len(range(layers.start, min(layers.stop, boundary))) for layers in some) for some in held]

    @property
    def stage_layers(self) -> list[int]:
        """Number of layers of each stage."""
        return [sum(map(len, self.layers_of(stage))) for stage in range(self.stages)]
