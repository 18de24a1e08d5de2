"""Breaks the lists of a round, each time in a way that is an error for a reason of its own.

Most mutants are errors by what was done to them, as a message that only one end has. Two operations that change places
may do no harm, so those are broken only if the order of all operations has a circle, which a sort finds: another proof
than the judge's games.
"""

import json
import random
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from typing import Any

_Round = dict[str, Any]
_COMPUTES = ("F", "B", "I", "W", "S")
#: The computations that make what a message carries, and the one that uses it.
_MAKERS = {"a": ("F",), "g": ("B", "I"), "w": ("S",)}
_MESSAGES = ("send", "receive")


def mutants(document: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    """One mutant of each kind that this round can have: the reason why it is an error, and the document."""
    for mutate in (
        _dropped, _doubled, _half_a_message, _doubled_message, _backward_first, _other_chunk, _other_worker,
        _frozen_backward, _used_before_it_came, _sent_before_it_is_made, _other_peer, _order_of_one_end, _swapped,
    ):  # fmt: skip
        broken = json.loads(document)
        reason = mutate(broken, draw)
        if reason:
            yield reason, json.dumps(broken)


def in_a_circle(document: str) -> bool:
    """Whether some operations wait for each other, if a message is one moment for both of its ends."""
    read = json.loads(document)
    after: dict[Any, set[Any]] = {}
    for worker, operations in enumerate(read["lists"]):
        before = None
        for operation in operations:
            node = _node(worker, operation)
            after.setdefault(node, set()).update(() if before is None else (before,))
            before = node
    for node in list(after):
        after[node] |= {given for given in _givers(node, read) if given in after}
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        return True
    return False


def _node(worker: int, operation: list[Any]) -> tuple[Any, ...]:
    """A computation, or a message, which is the same for both ends."""
    if operation[0] in _MESSAGES:
        return "message", *operation[1:4], *sorted((worker, operation[4]))
    return tuple(operation)


def _givers(node: tuple[Any, ...], read: _Round) -> list[tuple[Any, ...]]:
    """What must be done before a node, by the flow of data."""
    if node[0] == "message":
        _, what, span, chunk, *_ = node
        return [(kind, span - 1 if what == "a" else span + 1, chunk) for kind in _MAKERS[what]]
    kind, span, chunk = node
    owners = read["owners"]

    def moved(what: str, giver: int) -> list[tuple[Any, ...]]:
        if owners[giver] != owners[span]:
            return [("message", what, span, chunk, *sorted((owners[giver], owners[span])))]
        return [(kind, giver, chunk) for kind in _MAKERS[what]]

    if kind == "F":
        return moved("a", span - 1) if span > 0 else []
    if kind == "W":
        return [("I", span, chunk)]
    ends = list(accumulate(read.get("steps", [])))
    if kind == "S":
        own = [("B", span, number) for number in range(ends[chunk])]
    else:
        own = [("F", span, chunk), *(("S", span, step) for step, end in enumerate(ends) if end <= chunk)]
    return [*own, *(moved("w" if kind == "S" else "g", span + 1) if span < len(owners) - 1 else [])]


def _pick(read: _Round, draw: random.Random, wanted: Callable[[list[Any]], bool]) -> tuple[list[Any], int] | None:
    """A worker's list and a place in it that holds such an operation."""
    places = [(mine, at) for mine in read["lists"] for at, operation in enumerate(mine) if wanted(operation)]
    return draw.choice(places) if places else None


def _computes(operation: list[Any]) -> bool:
    return operation[0] in _COMPUTES


def _is_message(operation: list[Any]) -> bool:
    return operation[0] in _MESSAGES


def _dropped(read: _Round, draw: random.Random) -> str:
    mine, at = _pick(read, draw, _computes) or ([], 0)
    return f"{mine.pop(at)} is missing" if mine else ""


def _doubled(read: _Round, draw: random.Random) -> str:
    mine, at = _pick(read, draw, _computes) or ([], 0)
    if mine:
        mine.insert(draw.randint(at, len(mine)), list(mine[at]))
    return "a computation is there twice" if mine else ""


def _half_a_message(read: _Round, draw: random.Random) -> str:
    mine, at = _pick(read, draw, _is_message) or ([], 0)
    return f"{mine.pop(at)} is missing, and the other end waits" if mine else ""


def _doubled_message(read: _Round, draw: random.Random) -> str:
    mine, at = _pick(read, draw, _is_message) or ([], 0)
    if mine:
        mine.insert(at, list(mine[at]))
    return "one end has a message twice" if mine else ""


def _backward_first(read: _Round, draw: random.Random) -> str:
    """A backward changes places with its forward, or the weights' half with the input's."""
    mine, at = _pick(read, draw, lambda operation: operation[0] in ("B", "I", "W")) or ([], 0)
    if not mine:
        return ""
    first = mine.index(["I" if mine[at][0] == "W" else "F", *mine[at][1:]])
    mine[first], mine[at] = mine[at], mine[first]
    return "a backward comes before its forward"


def _other_chunk(read: _Round, draw: random.Random) -> str:
    mine, at = _pick(read, draw, _computes) or ([], 0)
    if mine:
        mine[at][2] = (mine[at][2] + 1) % (read["chunks"] + 1)
    return "a computation is for another chunk" if mine else ""


def _other_worker(read: _Round, draw: random.Random) -> str:
    mine, at = _pick(read, draw, _computes) or ([], 0)
    others = [other for other in read["lists"] if other is not mine]
    if not mine or not others:
        return ""
    draw.choice(others).append(mine.pop(at))
    return "a worker computes on a span that it does not own"


def _frozen_backward(read: _Round, draw: random.Random) -> str:
    if not read["first_trained"]:
        return ""
    span = draw.randrange(read["first_trained"])
    read["lists"][read["owners"][span]].append(["B", span, 0])
    return "a span that trains nothing has a backward"


def _used_before_it_came(read: _Round, draw: random.Random) -> str:
    """A computation moves before the receive of what it needs."""
    mine, at = _pick(read, draw, lambda operation: operation[0] == "receive") or ([], 0)
    if not mine:
        return ""
    _, what, span, chunk, _ = mine[at]
    kinds = _MAKERS[what]
    use = next(place for place, one in enumerate(mine) if one[0] in kinds and one[1:] == [span, chunk])
    mine.insert(at, mine.pop(use))
    return "a computation comes before what it needs"


def _sent_before_it_is_made(read: _Round, draw: random.Random) -> str:
    mine, at = _pick(read, draw, lambda operation: operation[0] == "send") or ([], 0)
    if mine:
        _, what, span, chunk, _ = mine[at]
        made = [[kind, span - 1 if what == "a" else span + 1, chunk] for kind in _MAKERS[what]]
        maker = next(place for place, one in enumerate(mine) if one in made)
        mine.insert(maker, mine.pop(at))
    return "a value is sent before it is made" if mine else ""


def _other_peer(read: _Round, draw: random.Random) -> str:
    mine, at = _pick(read, draw, _is_message) or ([], 0)
    if mine:
        mine[at][4] = (mine[at][4] + 1) % len(read["lists"])
    return "a message goes to another worker" if mine else ""


def _order_of_one_end(read: _Round, draw: random.Random) -> str:
    """Two messages of a pair change places at one end: NCCL would take one for the other."""
    mine, at = _pick(read, draw, _is_message) or ([], 0)
    later = [place for place in range(at + 1, len(mine)) if _is_message(mine[place]) and mine[place][4] == mine[at][4]]
    if not later:
        return ""
    mine[at], mine[later[0]] = mine[later[0]], mine[at]
    return "both ends of a pair have its messages in different orders"


def _swapped(read: _Round, draw: random.Random) -> str:
    """Two messages of different pairs change places, so that both ends of each pair still agree, but all wait in a
    circle."""
    for _ in range(20):
        mine, at = _pick(read, draw, _is_message) or ([], 0)
        others = [place for place, one in enumerate(mine) if _is_message(one) and one[4] != mine[at][4]]
        if not others:
            continue
        other = draw.choice(others)
        mine[at], mine[other] = mine[other], mine[at]
        if same_ends(read) and in_a_circle(json.dumps(read)):
            return "workers wait for each other in a circle"
        mine[at], mine[other] = mine[other], mine[at]
    return ""


def same_ends(read: _Round) -> bool:
    """Whether both ends of each pair of workers issue the same messages in the same order."""
    ends: dict[tuple[int, int], list[Any]] = {}
    for worker, operations in enumerate(read["lists"]):
        for operation in operations:
            if _is_message(operation):
                ends.setdefault((worker, operation[4]), []).append(operation[1:4])
    return all(ends.get((second, first)) == values for (first, second), values in ends.items())
