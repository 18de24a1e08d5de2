"""A worker's own copy of the job's policy, whose failures are the user's to mend.

A policy may be anybody's code. Whatever it raises becomes a `SpecError`: a `RuntimeError` that got through would look
like a broken connection, and the workers would regroup for ever.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any

from pipetransformer.errors import SpecError

from .policy import FreezeObservation, FreezePolicy


class PolicyCopy:
    """Asks a copy of `pristine`, which stays as it is, going on from `state`: what `state_dict` of another copy gave.

    All methods raise `SpecError` when the policy fails.
    """

    def __init__(self, pristine: FreezePolicy, state: Mapping[str, Any]) -> None:
        self._name = type(pristine).__name__
        self._checked = False
        try:
            self._policy = copy.deepcopy(pristine)
            if state.get("policy") == self._name:  # a run that goes on may have another one
                self._policy.load_state_dict(state["state"])
        except Exception as error:
            raise self._failed(error) from error

    def needs_similarities(self, step: int) -> bool:
        """As `FreezePolicy.needs_similarities`."""
        try:
            return self._policy.needs_similarities(step)
        except Exception as error:
            raise self._failed(error) from error

    def decide(self, observation: FreezeObservation) -> int:
        """As `FreezePolicy.decide`, and within its limits."""
        try:
            boundary = int(self._policy.decide(observation))
            if not 0 <= boundary <= observation.num_layers:
                raise ValueError(f"boundary {boundary} of {observation.num_layers} blocks")
            return boundary
        except Exception as error:
            raise self._failed(error) from error

    def state_dict(self) -> dict[str, Any]:
        """What another copy goes on from."""
        try:
            state = self._policy.state_dict()
            if state and not self._checked:
                json.dumps(state)  # it will travel and be stored as that
                self._checked = True
            return {"policy": self._name, "state": state}
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> SpecError:
        message = f"{self._name} failed: {type(error).__name__}: {error}"
        return SpecError("spec.freeze.policy", message, reason="PolicyFailed")
