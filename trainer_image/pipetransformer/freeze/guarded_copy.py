"""A worker's own copy of the job's policy, whose errors become `SpecError`.

A policy may be the user's code. If it raised a `RuntimeError`, that would look like a broken connection, and the
workers would regroup without end.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any

from pipetransformer.errors import SpecError

from .policy import FreezeObservation, FreezePolicy


class PolicyCopy:
    """Asks a copy of `pristine`, which stays unchanged. The copy resumes from `state`, another copy's `state_dict`.

    All methods raise `SpecError` if the policy fails.
    """

    def __init__(self, pristine: FreezePolicy, state: Mapping[str, Any]) -> None:
        self._name = type(pristine).__name__
        self._checked = False
        try:
            self._policy = copy.deepcopy(pristine)
            if state.get("policy") == self._name:  # a resumed run may use another policy
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
        """As `FreezePolicy.decide`, with its limits checked."""
        try:
            boundary = int(self._policy.decide(observation))
            if not 0 <= boundary <= observation.num_layers:
                raise ValueError(f"boundary {boundary} of {observation.num_layers} layers")
            return boundary
        except Exception as error:
            raise self._failed(error) from error

    def state_dict(self) -> dict[str, Any]:
        """State to resume another copy with."""
        try:
            state = self._policy.state_dict()
            if state and not self._checked:
                json.dumps(state)  # checkpoints and messages store it as JSON
                self._checked = True
            return {"policy": self._name, "state": state}
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> SpecError:
        message = f"{self._name} failed: {type(error).__name__}: {error}"
        return SpecError("spec.freeze.policy", message, reason="PolicyFailed")
