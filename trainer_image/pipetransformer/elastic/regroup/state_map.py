"""A state map makes another list of units during a regroup; Multi-Level training coalesces layers this way.

Each worker receives the old units that its new units are made of, and makes the new ones before the vote. A failure
therefore leaves the old model whole. Without a map, units stay the same.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from pipetransformer.models import Ties
from pipetransformer.state.control import Control


class StateMap(Protocol):
    """Maps the units of the old model to those of the new one. The same on all workers."""

    @property
    def num_layers(self) -> int:
        """Layers of the new model."""
        ...

    @property
    def ties(self) -> Ties:
        """Parameters that units of the new model share."""
        ...

    @property
    def takes_moments(self) -> bool:
        """Whether `make` uses the optimizer's moments. Otherwise they do not move."""
        ...

    def sources(self, unit: int) -> Sequence[int]:
        """Return the old units that a new unit is made of."""
        ...

    def blank(self, unit: int) -> nn.Module:
        """Return a new unit whose parameters and buffers are to be replaced."""
        ...

    def prepare(self, units: Collection[int]) -> None:
        """Read from storage what these new units are also made of. A thread does this while the workers vote.

        Raises:
            StorageError: it cannot be read.
        """
        ...

    def make(self, unit: int, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters and buffers of a new unit, by the new model's names, in new tensors.

        Moments are named `NAME@KEY`. Those that are returned become the optimizer's state; the optimizer starts afresh
        for the others.

        Args:
            unit: index in the new model.
            old: tensors of its sources by the old model's names, with the moments of trained parameters if it
                `takes_moments`.
        """
        ...

    def control(self, old: Control) -> Control:
        """Return the control state of the new model. Measured costs of the old units, for example, no longer hold."""
        ...


#: Returns the map for a regroup from this control state into pipelines of so many stages, or None. All workers decide
#: the same.
MapOf = Callable[[Control, int], StateMap | None]


def no_map(control: Control, stages: int) -> None:
    """Keep all units as they are."""


def sources_of(units: Iterable[int], state_map: StateMap) -> set[int]:
    """Return the old units that several new ones are made of."""
    return {source for unit in units for source in state_map.sources(unit)}
