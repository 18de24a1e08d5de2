"""The interface of a freeze policy, and the instants at which one that decides now and then does so."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FreezeObservation:
    """What every rank knows alike after a step's vote.

    `step` counts committed steps, so it is also the index of the next one; `epoch` counts finished epochs. A policy
    is asked once with step 0, before training. `unit_gradient_norms` has the L2 norm of the global gradient of the
    embedding, of each block and of the head (L + 2 numbers, 0 for frozen ones) at the step just committed. A
    parameter that several units share counts in the last of them; a unit that shares all its parameters with later ones
    has the norm of those. It is empty at step 0 and after a step that was skipped because it was not finite.
    `learning_rate` is that step's, 0 at step 0.
    `similarities` is there when the policy needs it: how alike a fixed set of samples looks to the first block that
    still trains, an (n, n) matrix with normalised rows, flat, by the weights before the step.
    """

    step: int
    epoch: int
    boundary: int
    num_layers: int
    unit_gradient_norms: Sequence[float]
    learning_rate: float = 0.0
    similarities: Sequence[float] = ()


class FreezePolicy(ABC):
    """Decides the frozen boundary after each step, from the observation and its own state alone.

    Every rank asks its own copy, so the answer must depend on nothing else. A policy that remembers something between
    steps gives it by `state_dict`: it moves with regroups and stands in checkpoints.
    """

    @abstractmethod
    def decide(self, observation: FreezeObservation) -> int:
        """Blocks to freeze from the next step on, 0 to `num_layers`: more or fewer than `observation.boundary`."""

    def needs_similarities(self, step: int) -> bool:
        """Whether the observation after `step` committed steps shall have `similarities`, which cost an evaluation."""
        del step
        return False

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state; a policy that gets it back goes on as if nothing had happened."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        del state


@dataclass(frozen=True)
class Instants:
    """Steps after which a policy may act: `start` steps pass, then every `interval`-th is one."""

    start: int
    interval: int

    def number(self, step: int) -> int | None:
        """T of the decision after `step` committed steps, from 1; None when this is no instant."""
        number, between = divmod(step - self.start, self.interval)
        return None if between or number < 1 else number


def ceil_share(value: float) -> int:
    """Ceiling that forgives the rounding of a float: 4.000000000000001 is 4."""
    return -int(-(value - 1e-9) // 1)
