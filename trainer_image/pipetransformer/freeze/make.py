"""From the spec's `freeze` to its policy."""

from pipetransformer_contract.spec import Freeze, FreezePolicyName

from .explicit import Explicit
from .gradient_norm import GradientNorm
from .none import NoFreeze
from .paper_schedule import PaperSchedule
from .policy import FreezePolicy, Instants


def make_policy(spec: Freeze, *, steps_per_epoch: int, own: FreezePolicy | None = None) -> FreezePolicy:
    """The policy that the spec names, acting at the ends of epochs of `steps_per_epoch` steps; `own` for `Script`."""
    instants = Instants(steps_per_epoch, spec.start_after_epochs, spec.interval_epochs)
    match spec.policy:
        case FreezePolicyName.NONE:
            return NoFreeze()
        case FreezePolicyName.PAPER_SCHEDULE:
            return PaperSchedule(spec.alpha, instants)
        case FreezePolicyName.GRADIENT_NORM:
            return GradientNorm(spec.alpha, instants)
        case FreezePolicyName.EXPLICIT:
            return Explicit(spec.boundaries)
        case FreezePolicyName.SCRIPT:
            assert own is not None
            return own
