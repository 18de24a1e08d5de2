"""Asynchronous 1F1B: a round has several optimizer steps, and the pipeline is flushed only at the end of the round."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .flushed import OneForwardOneBackward
from .operations import Action, ActionKind, RoundShape


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """1F1B over the chunks of all steps of a round (PipeDream, Narayanan et al., 2019, section 3.2).

    A span's weights change right after the last backward of each step. For a shape without `steps` it is plain 1F1B.
    """

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        lists = OneForwardOneBackward().actions(shape)
        step_after = {end - 1: step for step, end in enumerate(accumulate(shape.steps))}
        return [[each for action in mine for each in _with_step(action, step_after)] for mine in lists]


def _with_step(action: Action, step_after: dict[int, int]) -> list[Action]:
    if action.kind is ActionKind.BACKWARD and action.chunk in step_after:
        return [action, Action(ActionKind.STEP, action.span, step_after[action.chunk])]
    return [action]


def staleness(lists: Sequence[Sequence[object]], shape: RoundShape) -> dict[tuple[int, int], int]:
    """The staleness of each forward: how many steps its weights are behind when its gradient is used.

    It begins at 0 in each round, because the pipeline is empty. It grows to K - k - 1 on span k of K with one chunk a
    step, and to at most 1 with K or more chunks a step.

    Args:
        lists: the operations of all workers, with or without messages.
        shape: the shape of the round.

    Returns:
        The staleness in steps by (span, chunk), for the spans that train.
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
