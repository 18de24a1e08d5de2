"""Runs a worker's copy of the freeze policy, within the limits of the spec. Errors of the policy become `SpecError`.

A policy may be the user's code. A `RuntimeError` from it would look like a broken connection, and the workers would
regroup again and again.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any

from pipetransformer.errors import SpecError
from pipetransformer_contract.spec import FreezeTrial

from .limits import Limits
from .policy import FreezeObservation, FreezePolicy
from .trial import Trial, Verdict


class PolicyCopy:
    """A copy of the job's policy. All methods raise `SpecError` if the policy fails.

    Args:
        pristine: the policy to copy, in its initial state. It stays unchanged.
        state: the `state_dict` of another copy. This one resumes from it; empty to start from the initial state.
        limits: bounds of the number of frozen layers; None for no bounds.
        trial: how freezes are put on trial (`freeze.trial`); None if they are not.
    """

    def __init__(
        self,
        pristine: FreezePolicy,
        state: Mapping[str, Any],
        limits: Limits | None = None,
        trial: FreezeTrial | None = None,
    ) -> None:
        self._name = type(pristine).__name__
        self._limits = limits or Limits()
        self._trial = None if trial is None else Trial(trial)
        if self._trial is not None and "trial" in state:
            self._trial.load_state_dict(state["trial"])
        try:
            self._policy = copy.deepcopy(pristine)
            if state.get("policy") == self._name:  # a resumed run may use another policy
                self._policy.load_state_dict(state["state"])
        except Exception as error:
            raise self._failed(error) from error

    def needs_similarities(self, step: int) -> bool:
        """See `FreezePolicy.needs_similarities`."""
        try:
            return self._policy.needs_similarities(step)
        except Exception as error:
            raise self._failed(error) from error

    def next_decision(self, step: int) -> int | None:
        """See `FreezePolicy.next_decision`. If a trial may end before that, returns that step."""
        try:
            found = self._policy.next_decision(step)
            if found is not None and found <= step:
                raise ValueError(f"next_decision({step}) is {found}, which is not later")
        except Exception as error:
            raise self._failed(error) from error
        trial = None if self._trial is None else self._trial.next_decision(step)
        return min((each for each in (found, trial) if each is not None), default=None)

    def note_loss(self, step: int, loss: float) -> None:
        """Tell the trial a loss of a step after which the policy is not asked, because the round goes on.

        Args:
            step: committed steps after this step.
            loss: its mean training loss.
        """
        if self._trial is not None:
            self._trial.note_loss(step, loss)

    def decide(self, observation: FreezeObservation) -> int:
        """The policy's decision, brought within the limits. A trial may delay it, or thaw layers."""
        try:
            boundary = int(self._policy.decide(observation))
            if not 0 <= boundary <= observation.num_layers:
                raise ValueError(f"boundary {boundary} of {observation.num_layers} layers")
        except Exception as error:
            raise self._failed(error) from error
        boundary = self._limits.clamp(boundary)
        return boundary if self._trial is None else self._trial.decide(observation, boundary)

    @property
    def verdict(self) -> Verdict | None:
        """How a trial ended in the newest decision; None if no trial ended."""
        return None if self._trial is None else self._trial.verdict

    def on_trial(self, boundary: int) -> int:
        """Number of layers on trial, if `boundary` layers are frozen."""
        return 0 if self._trial is None else self._trial.on_trial(boundary)

    def state_dict(self) -> dict[str, Any]:
        """The state of the policy and of its trial, JSON-able, to resume another copy with."""
        try:
            state = self._policy.state_dict()
            json.dumps(state)  # checkpoints and messages store it as JSON
            _check_keys(state)
        except Exception as error:
            raise self._failed(error) from error
        return {"policy": self._name, "state": state} | (
            {} if self._trial is None else {"trial": self._trial.state_dict()}
        )

    def _failed(self, error: Exception) -> SpecError:
        message = f"{self._name} failed: {type(error).__name__}: {error}"
        return SpecError("spec.freeze.policy", message, reason="PolicyFailed")


def _check_keys(state: object) -> None:
    """Raises `TypeError` if a dict has a key that JSON would turn into a text: the policy would not find it again."""
    if isinstance(state, dict):
        if wrong := [key for key in state if not isinstance(key, str)]:
            raise TypeError(f"the key {wrong[0]!r} of its state_dict must be a str, because JSON has no other keys")
        state = list(state.values())
    if isinstance(state, list | tuple):
        for each in state:
            _check_keys(each)
