"""Checks that lists compute each chunk on each span, whole and in order.

A forgotten or doubled backward would train with wrong gradients and no error, so what a user's schedule says is checked
before it runs.
"""

from collections.abc import Sequence

from .actions import Action, ActionKind, RoundShape, ScheduleError

#: What may follow what, for one chunk on one span.
_AFTER = {
    (None, ActionKind.FORWARD): "forward",
    ("forward", ActionKind.BACKWARD): "done",
    ("forward", ActionKind.INPUT_GRADIENT): "half",
    ("half", ActionKind.WEIGHT_GRADIENT): "done",
}


def check_complete(lists: Sequence[Sequence[Action]], shape: RoundShape) -> None:
    """Check that every chunk passes every span once: forward, and backward, whole or in halves, where the span trains.

    Raises:
        ScheduleError: it does not, a worker computes on a span of another one, or a span whose input needs no gradient
            has a backward in halves.
    """
    reached: dict[tuple[int, int], str] = {}
    for worker, actions in enumerate(lists):
        for action in actions:
            if action.kind is ActionKind.STEP:
                continue
            place = action.span, action.chunk
            state = _AFTER.get((reached.get(place), action.kind))
            known = action.span in range(len(shape.owners)) and action.chunk in range(shape.chunks)
            if not known or shape.owners[action.span] != worker:
                raise ScheduleError(f"worker {worker} has no span and chunk for {action}")
            trained = action.kind is ActionKind.FORWARD or shape.trains(action.span)
            if state is None or not trained:
                raise ScheduleError(f"worker {worker} has {action} after {reached.get(place, 'nothing')}")
            if action.kind is ActionKind.INPUT_GRADIENT and not shape.gives_gradient(action.span):
                raise ScheduleError(f"worker {worker} has {action}, but no span waits for this gradient")
            reached[place] = state
    for span in range(len(shape.owners)):
        for chunk in range(shape.chunks):
            state = reached.get((span, chunk))
            if state != ("done" if shape.trains(span) else "forward"):
                raise ScheduleError(f"the round ends with chunk {chunk} at {state or 'nothing'} on span {span}")
