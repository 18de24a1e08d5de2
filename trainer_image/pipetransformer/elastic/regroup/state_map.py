"""State maps: they make the units of another model during a regroup. Multi-Level training changes the model this way.

Each worker receives the old units that its new units are made from, and makes the new ones before the vote. So after a
failure the old model is still complete. Without a map, units stay the same.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from pipetransformer.models import Ties
from pipetransformer.state.control import Control


class StateMap(Protocol):
    """Makes the units of a new model from those of the old one. All workers have the same map."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the new model."""
        ...

    @property
    def ties(self) -> Ties:
        """Parameters that units of the new model share."""
        ...

    @property
    def takes_moments(self) -> bool:
        """Whether `make` uses the optimizer's moments. If not, they are not sent."""
        ...

    def sources(self, unit: int) -> Sequence[int]:
        """Return the old units that a new unit is made from."""
        ...

    def blank(self, unit: int) -> nn.Module:
        """Return a unit of the new model. The caller replaces its parameters and buffers."""
        ...

    def prepare(self, units: Collection[int]) -> None:
        """Read further tensors for these new units from the storage. A thread calls this while the workers vote.

        Raises:
            StorageError: the storage cannot be read.
        """
        ...

    def make(self, unit: int, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the tensors of a new unit.

        Args:
            unit: the unit's index in the new model.
            old: tensors of its `sources`, by the old model's names. With the moments of trained parameters if the map
                `takes_moments`.

        Returns:
            Parameters and buffers by the new model's names, in new tensors. Moments, named `NAME@KEY`, become the
            optimizer's state. For parameters without moments the optimizer starts from the beginning.
        """
        ...

    def control(self, old: Control) -> Control:
        """Return the control state for the new model. It has no measured costs, for example, because those are of the
        old units."""
        ...


#: Returns the map for a regroup from this control state into pipelines with this number of stages; None if units stay
#: the same. All workers get the same answer.
MapOf = Callable[[Control, int], StateMap | None]


def no_map(control: Control, stages: int) -> None:
    """Keep all units as they are."""


def sources_of(units: Iterable[int], state_map: StateMap) -> set[int]:
    """Return all old units that these new units are made from."""
    return {source for unit in units for source in state_map.sources(unit)}
