"""GPipe and 1F1B: the weights stay the same in a round, and each chunk has one whole backward."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .operations import Action, ActionKind, RoundShape, Schedule, ScheduleError


@dataclass(frozen=True, slots=True)
class GPipe:
    """All chunks go forward, then all go backward (Huang et al., 2019, section 2.2). Workers may own several spans."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        return there_and_back(shape, range(shape.chunks)[::-1])


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """Worker k of K runs K - k forwards, then a backward and a forward in turns (PipeDream-flush, Narayanan et al.,
    2021, section 2.2). It keeps at most K - k chunks in flight. It can run any number of chunks."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        if shape.owners != tuple(range(shape.workers)):
            raise ScheduleError("1F1B needs one span a worker")
        workers = []
        for span in shape.owners:
            actions = _each(ActionKind.FORWARD, span, range(shape.chunks))
            if shape.trains(span):
                first = min(shape.workers - span, shape.chunks)
                actions, rest = actions[:first], actions[first:]
                for number, action in enumerate(_each(ActionKind.BACKWARD, span, range(shape.chunks))):
                    actions += [action, *rest[number : number + 1]]
            workers.append(actions)
        return workers


def fallback(owners: Sequence[int]) -> Schedule:
    """The schedule of a round that the chosen schedule cannot run: 1F1B, or GPipe if workers own several spans.

    Args:
        owners: worker of each span.
    """
    return GPipe() if len(owners) > max(owners) + 1 else OneForwardOneBackward()


def there_and_back(shape: RoundShape, backward: Sequence[int]) -> list[list[Action]]:
    """All chunks forward in their order, then all backward in the order `backward`. Workers may own several spans."""
    workers: list[list[Action]] = [[] for _ in range(shape.workers)]
    for span, owner in enumerate(shape.owners):
        workers[owner] += _each(ActionKind.FORWARD, span, range(shape.chunks))
    for span, owner in reversed(list(enumerate(shape.owners))):
        if shape.trains(span):
            workers[owner] += _each(ActionKind.BACKWARD, span, backward)
    return workers


def _each(kind: ActionKind, span: int, chunks: Iterable[int]) -> list[Action]:
    return [Action(kind, span, chunk) for chunk in chunks]
