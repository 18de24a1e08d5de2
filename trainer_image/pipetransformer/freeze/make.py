"""Makes the freeze policy of the spec's section `freeze`."""

import logging

from pipetransformer.errors import SpecError
from pipetransformer.user_code import import_function
from pipetransformer_contract.spec import Freeze, FreezePolicyName

from .explicit import Explicit
from .gradient_norm import GradientNorm
from .none import NoFreeze
from .norm_change import NormChange
from .paper_schedule import PaperSchedule
from .plasticity import Plasticity
from .policy import FreezePolicy, Instants

logger = logging.getLogger(__name__)


def make_policy(spec: Freeze, *, steps_per_epoch: int, script_policy: FreezePolicy | None = None) -> FreezePolicy:
    """Make the policy that the spec names, in its initial state.

    Args:
        spec: the spec's section `freeze`. If it names `module:function`, the function is called with `Instants` and
            the spec's options.
        steps_per_epoch: steps of an epoch.
        script_policy: the policy of the user's program, for `Script`.

    Raises:
        SpecError: the policy is unknown, cannot be imported or refuses its options.
    """
    instants = _instants(spec, steps_per_epoch)
    if spec.ignored:
        logger.warning("spec.freeze: policy %s ignores %s", spec.policy, ", ".join(spec.ignored))
    match spec.policy:
        case FreezePolicyName.NONE:
            return NoFreeze()
        case FreezePolicyName.PAPER_SCHEDULE:
            return PaperSchedule(spec.alpha, instants)
        case FreezePolicyName.GRADIENT_NORM:
            return GradientNorm(spec.alpha, instants)
        case FreezePolicyName.NORM_CHANGE:
            return NormChange(spec.percentile, instants)
        case FreezePolicyName.PLASTICITY:
            return Plasticity(spec.tolerance, spec.window_decisions, spec.learning_rate_drop, instants)
        case FreezePolicyName.EXPLICIT:
            return Explicit(spec.boundaries)
        case FreezePolicyName.SCRIPT:
            assert script_policy is not None
            return script_policy
        case _:
            return _imported(spec, instants)


def _instants(spec: Freeze, steps_per_epoch: int) -> Instants:
    start = (spec.start_after_epochs or 0) * steps_per_epoch
    interval = (spec.interval_epochs or 1) * steps_per_epoch
    return Instants(
        start if spec.start_after_steps is None else spec.start_after_steps,
        interval if spec.interval_steps is None else spec.interval_steps,
    )


def _imported(spec: Freeze, instants: Instants) -> FreezePolicy:
    function = import_function(spec.policy, field="spec.freeze.policy")
    try:
        policy = function(instants, **spec.options)
    except Exception as error:
        raise SpecError("spec.freeze.options", f"{spec.policy} failed: {type(error).__name__}: {error}") from error
    if not isinstance(policy, FreezePolicy):
        raise SpecError("spec.freeze.policy", f"{spec.policy} returned {type(policy).__name__}, not a FreezePolicy")
    return policy
