"""GPipe and 1F1B: one weight version a round, one backward a chunk."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .actions import Action, ActionKind, RoundShape, ScheduleError


@dataclass(frozen=True, slots=True)
class GPipe:
    """Every chunk forward, then every chunk backward (Huang et al., 2019, section 2.2), over any spans."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        return there_and_back(shape, range(shape.chunks)[::-1])


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """Worker k of K runs K - k forwards, then a backward and a forward in turns (PipeDream-flush, Narayanan et al.,
    2021, section 2.2). It keeps at most K - k chunks in flight. Any number of chunks will do."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        if shape.owners != tuple(range(shape.workers)):
            raise ScheduleError("1F1B needs one span a worker")
        return in_turns(shape, range(shape.chunks))


def there_and_back(shape: RoundShape, backward: Sequence[int]) -> list[list[Action]]:
    """Every chunk forward over any spans, then the chunks backward in the order of `backward`."""
    workers: list[list[Action]] = [[] for _ in range(shape.workers)]
    for span, owner in enumerate(shape.owners):
        workers[owner] += _each(ActionKind.FORWARD, span, range(shape.chunks))
    for span, owner in reversed(list(enumerate(shape.owners))):
        if shape.trains(span):
            workers[owner] += _each(ActionKind.BACKWARD, span, backward)
    return workers


def in_turns(shape: RoundShape, backward: Sequence[int]) -> list[list[Action]]:
    """A backward and a forward in turns, over one span a worker, the backwards in the order of `backward`.

    Worker k of K first runs K - k forwards, and S - 1 more for S slices, because the last slice goes back first.
    """
    workers = []
    for span in shape.owners:
        actions = _each(ActionKind.FORWARD, span, range(shape.chunks))
        if shape.trains(span):
            first = min(shape.workers - span + shape.slices - 1, shape.chunks)
            actions, rest = actions[:first], actions[first:]
            for number, action in enumerate(_each(ActionKind.BACKWARD, span, backward)):
                actions += [action, *rest[number : number + 1]]
        workers.append(actions)
    return workers


def _each(kind: ActionKind, span: int, chunks: Iterable[int]) -> list[Action]:
    return [Action(kind, span, chunk) for chunk in chunks]
