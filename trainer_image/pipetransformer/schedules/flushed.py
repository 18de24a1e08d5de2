"""GPipe and 1F1B: one weight version a round, one backward a chunk."""

from dataclasses import dataclass

from .actions import Action, ActionKind, RoundShape, ScheduleError


@dataclass(frozen=True, slots=True)
class GPipe:
    """Every chunk forward, then every chunk backward (Huang et al., 2019, section 2.2), over any spans.

    Chunks go backward in reverse order, as slices of tokens need it: a later slice attends to the earlier ones.
    """

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        workers: list[list[Action]] = [[] for _ in range(shape.workers)]
        for span, owner in enumerate(shape.owners):
            workers[owner] += [Action(ActionKind.FORWARD, span, chunk) for chunk in range(shape.chunks)]
        for span, owner in reversed(list(enumerate(shape.owners))):
            if shape.trains(span):
                workers[owner] += [Action(ActionKind.BACKWARD, span, chunk) for chunk in reversed(range(shape.chunks))]
        return workers


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """Worker k of K runs K - k forwards, then a backward and a forward in turns (PipeDream-flush, Narayanan et al.,
    2021, section 2.2). It keeps at most K - k chunks in flight. Any number of chunks will do."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        if shape.owners != tuple(range(shape.workers)):
            raise ScheduleError("1F1B needs one span a worker")
        return [self._of(span, shape) for span in shape.owners]

    @staticmethod
    def _of(span: int, shape: RoundShape) -> list[Action]:
        forwards = [Action(ActionKind.FORWARD, span, chunk) for chunk in range(shape.chunks)]
        if not shape.trains(span):
            return forwards
        first = min(shape.workers - span, shape.chunks)
        actions = forwards[:first]
        for chunk in range(shape.chunks):
            actions.append(Action(ActionKind.BACKWARD, span, chunk))
            actions += forwards[first + chunk : first + chunk + 1]
        return actions
