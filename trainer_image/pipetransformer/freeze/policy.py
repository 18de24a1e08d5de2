"""The interface of a freeze policy, and the instants at which one that works by epochs acts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class FreezeObservation:
    """What every rank knows alike after a step's vote.

    `step` counts committed steps, so it is also the index of the next one; `epoch` counts finished epochs. A policy
    is asked once with step 0, before training. `unit_gradient_norms` has the L2 norm of the global gradient of the
    embedding, of each block and of the head (L + 2 numbers, 0 for frozen ones) at the step just committed; it is empty
    at step 0 and after a step that was skipped because it was not finite.
    """

    step: int
    epoch: int
    boundary: int
    num_layers: int
    unit_gradient_norms: Sequence[float]


class FreezePolicy(Protocol):
    """Decides the frozen boundary after each step, from the observation and its own state alone."""

    def decide(self, observation: FreezeObservation) -> int:
        """Blocks to freeze from the next step on, 0 to `num_layers`: more or fewer than `observation.boundary`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state; a policy that gets it back goes on as if nothing had happened."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Instants:
    """Ends of epochs at which a policy may act: `start_after_epochs` pass, then every `interval_epochs`."""

    steps_per_epoch: int
    start_after_epochs: int = 0
    interval_epochs: int = 1

    def number(self, step: int) -> int | None:
        """T of the decision after `step` committed steps, from 1; None when this is no instant."""
        epochs, inside = divmod(step, self.steps_per_epoch)
        number, between = divmod(epochs - self.start_after_epochs, self.interval_epochs)
        return None if inside or between or number < 1 else number


def ceil_share(value: float) -> int:
    """Ceiling that forgives the rounding of a float: 4.000000000000001 is 4."""
    return -int(-(value - 1e-9) // 1)


class Stateless:
    """Mixed into policies that recompute everything from the observation."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state
