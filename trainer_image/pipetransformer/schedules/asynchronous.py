"""Asynchronous 1F1B: the pipeline is flushed once a round of several steps, and not at each step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .actions import Action, ActionKind, RoundShape
from .flushed import OneForwardOneBackward


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """1F1B over the chunks of all steps of a round. A span's weights change right after the last backward of each step
    (PipeDream, Narayanan et al., 2019, section 3.2). A shape without steps gives plain 1F1B."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        lists = OneForwardOneBackward().actions(shape)
        step_after = {end - 1: step for step, end in enumerate(accumulate(shape.steps))}
        return [[each for action in mine for each in _with_step(action, step_after)] for mine in lists]


def _with_step(action: Action, step_after: dict[int, int]) -> list[Action]:
    if action.kind is ActionKind.BACKWARD and action.chunk in step_after:
        return [action, Action(ActionKind.STEP, action.span, step_after[action.chunk])]
    return [action]


def staleness(lists: Sequence[Sequence[object]], shape: RoundShape) -> dict[tuple[int, int], int]:
    """How old the weights of each forward are: steps of its span between it and the step that its gradient goes into.

    In the steady state it is K - k - 1 on span k of K with one chunk a step, and at most 1 with K or more. It begins at
    0 after a drain.

    Args:
        lists: of all workers, with or without messages.
        shape: of the round.

    Returns:
        Steps by (span, chunk), for the spans that train.
    """
    found = {}
    for mine in lists:
        made: Counter[int] = Counter()
        for action in mine:
            if not isinstance(action, Action):
                continue
            if action.kind is ActionKind.STEP:
                made[action.span] += 1
            elif action.kind is ActionKind.FORWARD and shape.trains(action.span):
                found[action.span, action.chunk] = shape.step_of(action.chunk) - made[action.span]
    return found
