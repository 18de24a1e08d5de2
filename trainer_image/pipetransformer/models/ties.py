"""Parameters that several units share, such as the embedding table of a language model in its output layer.

Each unit keeps a copy of the parameter, even on the same worker, so that units can be moved and saved independently.
The copies stay bit-identical: in each step all of them get the same gradient, the sum over the copies.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Tie:
    """One shared parameter.

    Attributes:
        places: (unit, name inside the unit) of each copy, in the order of units.
    """

    places: tuple[tuple[int, str], ...]

    @property
    def last_unit(self) -> int:
        """The last unit with a copy. While it trains, the parameter trains, because a model freezes from its first
        unit on."""
        return self.places[-1][0]

    def stages(self, units_by_stage: Iterable[Collection[int]]) -> tuple[int, ...]:
        """The stages that hold a copy. `units_by_stage` are the units of each stage."""
        holders = {unit for unit, _ in self.places}
        return tuple(stage for stage, units in enumerate(units_by_stage) if holders.intersection(units))


@dataclass(frozen=True, slots=True)
class Ties:
    """All shared parameters of a model."""

    all: tuple[Tie, ...] = ()

    @classmethod
    def of(cls, units: Sequence[nn.Module]) -> "Ties":
        """Find the parameters of these units that are the same object in more than one unit."""
        places: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for index, unit in enumerate(units):
            for name, parameter in unit.named_parameters():
                places[id(parameter)].append((index, name))
        return cls(tuple(Tie(tuple(found)) for found in places.values() if len(found) > 1))

    def among(self, kept: Mapping[int, int]) -> "Ties":
        """The ties of a model that has only some of these units. `kept` maps each of them to its index there."""
        left = [tuple((kept[unit], name) for unit, name in tie.places if unit in kept) for tie in self.all]
        return Ties(tuple(Tie(places) for places in left if len(places) > 1))

    def find(self, unit: int, name: str) -> Tie | None:
        """The tie of the parameter `name` (inside the unit) of a unit; None if no other unit shares it."""
        return next((tie for tie in self.all if (unit, name) in tie.places), None)

    def last_unit(self, unit: int, name: str) -> int:
        """The last unit that shares the parameter `name` (inside the unit) of `unit`; `unit` if no other one does."""
        tie = self.find(unit, name)
        return unit if tie is None else tie.last_unit
