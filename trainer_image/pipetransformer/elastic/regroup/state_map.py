"""What a regroup may do to the state besides moving it: make another list of units from the present one.

Without a map units stay what they are. With one, every worker receives the old units that its new ones are made of,
and makes them itself, between the old generation and the vote for the new one: a failure leaves the old model whole.
Multi-Level training coalesces layers so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from pipetransformer.models import Ties
from pipetransformer.state.control import Control


class StateMap(Protocol):
    """From the units of the old model to those of the new one. Pure, and the same on all workers.

    Attributes:
        num_layers: blocks of the new model.
        ties: parameters that the new model's units share.
    """

    num_layers: int
    ties: Ties

    def sources(self, unit: int) -> Sequence[int]:
        """The old units that a new unit is made of."""
        ...

    def blank(self, unit: int) -> nn.Module:
        """A new unit whose parameters and buffers are to be replaced."""
        ...

    def make(self, unit: int, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters and buffers of a new unit by the new model's names, in new tensors.

        Args:
            unit: index in the new model.
            old: those of its sources by the old model's names, with the moments of what trains as `NAME@KEY`. What is
                returned so is the new optimizer's state; without it, the optimizer starts afresh.
        """
        ...

    def control(self, old: Control) -> Control:
        """What all workers know alike from here on; measured costs of the old units, for example, no longer hold."""
        ...


#: The map of the regroup that follows this committed control state, so all workers decide alike; None for none.
MapOf = Callable[[Control], StateMap | None]


def no_map(control: Control) -> None:
    """Units stay what they are."""


def sources_of(units: Iterable[int], state_map: StateMap) -> set[int]:
    """The old units that several new ones are made of."""
    return {source for unit in units for source in state_map.sources(unit)}
