"""TeraPipe: slices of tokens pass through the pipeline one after another, as micro-batches do."""

from dataclasses import dataclass

from .actions import Action, ActionKind, RoundShape, ScheduleError


@dataclass(frozen=True, slots=True)
class TeraPipe:
    """Slices of a micro-batch go forward from the first to the last, and backward from the last to the first (Li et
    al., 2021, section 3.2). Spans that train nothing run forwards only.

    Every chunk goes forward before any goes backward. That is the shortest round, whatever the lengths of slices.

    Attributes:
        in_turns: whether workers run a backward and a forward in turns instead, as 1F1B does. Worker k of K then keeps
            at most K - k + S - 1 chunks in flight, for S slices of a micro-batch. It needs less memory if there are
            more than two micro-batches.
    """

    in_turns: bool = False

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        if shape.chunks % shape.slices:
            raise ScheduleError(f"{shape.chunks} chunks are no micro-batches of {shape.slices} slices")
        if not self.in_turns:
            return self._one_way_and_back(shape)
        if shape.owners != tuple(range(shape.workers)):
            raise ScheduleError("TeraPipe in turns needs one span a worker")
        return [self._turns(span, shape) for span in shape.owners]

    @staticmethod
    def _one_way_and_back(shape: RoundShape) -> list[list[Action]]:
        workers: list[list[Action]] = [[] for _ in range(shape.workers)]
        for span, owner in enumerate(shape.owners):
            workers[owner] += [Action(ActionKind.FORWARD, span, chunk) for chunk in range(shape.chunks)]
        for span, owner in reversed(list(enumerate(shape.owners))):
            if shape.trains(span):
                workers[owner] += [Action(ActionKind.BACKWARD, span, chunk) for chunk in _backward_order(shape)]
        return workers

    @staticmethod
    def _turns(span: int, shape: RoundShape) -> list[Action]:
        forwards = [Action(ActionKind.FORWARD, span, chunk) for chunk in range(shape.chunks)]
        if not shape.trains(span):
            return forwards
        first = min(shape.workers - span + shape.slices - 1, shape.chunks)
        actions = forwards[:first]
        for number, chunk in enumerate(_backward_order(shape), start=first):
            actions.append(Action(ActionKind.BACKWARD, span, chunk))
            actions += forwards[number : number + 1]
        return actions


def _backward_order(shape: RoundShape) -> list[int]:
    """All chunks, micro-batch by micro-batch, the last slice of each first."""
    return [
        start + number for start in range(0, shape.chunks, shape.slices) for number in reversed(range(shape.slices))
    ]
