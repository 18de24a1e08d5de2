"""Judges the lists of a round: an independent proof, which imports nothing of ours and knows no schedule.

It reads a document of JSON: `owners` (worker of each span), `chunks`, `first_trained` (number of leading spans that
only run forwards), `slices` (chunks of each micro-batch), and `lists`, the operations of each worker in order.
`prefix`, if it is there, has the number of frozen `units` before span 0, the number of chunks of the `next` round, and
whether the round before has `made` this round's prefixes. Chunks of the next round count on. `steps`, if it is there,
has the number of chunks of each step whose weights change within the round. An operation is one of

    ["F", span, chunk]   forward
    ["B", span, chunk]   backward; or in halves: ["I", ...] for the input, later ["W", ...] for the weights
    ["S", span, step]    the span's weights change, by the gradients of the step's chunks
    ["P", chunk, start, stop]   the frozen units from `start` to before `stop`, on any one worker
    ["send" or "receive", "a", span, chunk, peer]   the activation that goes into the span
    ["send" or "receive", "g", span, chunk, peer]   the gradient of the span's output
    ["send" or "receive", "p", 0, chunk, peer]   the output of the frozen units
    ["send" or "receive", "w", span, step, peer]   what the span's step divides its gradient by

A new kind of computation, such as one for the next round, needs a row in `KINDS`, and what it takes and gives in
`_Play._needs` and `_Play._gives`.
"""

import json
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

#: What a chunk on a span may do next, after its last computation.
KINDS = {"": ("F",), "F": ("B", "I"), "I": ("W",), "B": (), "W": ()}

#: What a computation takes from the same one on the next span.
DOWN = {"B": "g", "I": "g", "S": "w"}

#: Without frozen forwards ahead.
_NO_PREFIX = {"units": 0, "made": False, "next": 0}

_Value = tuple[str, int, int]  # "a", "g", "p" or "w", span, chunk or step


@dataclass
class Verdict:
    """What a document is worth.

    Attributes:
        faults: what is wrong, in words; empty if the lists are right.
        in_flight: for each worker, the most chunks that have gone forward on a span of it and wait for the backward.
        versions: for each span and chunk, how often the span's weights had changed before each computation.
    """

    faults: list[str] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    versions: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)


def judge(document: str) -> Verdict:
    """Read the lists of a round, and say what is wrong with them."""
    read = json.loads(document)
    verdict = Verdict()
    _check_computations(read, verdict)
    _check_slices(read, verdict)
    _check_steps(read, verdict)
    _check_prefixes(read, verdict)
    _check_pairs(read, verdict)
    if not verdict.faults:  # otherwise the games would only repeat it
        for rendezvous in (False, True):
            verdict.faults += _Play(read, rendezvous).run()
    return verdict


def _check_computations(read: dict[str, Any], verdict: Verdict) -> None:
    """Each chunk passes each span once, forward and, where the span trains, backward; on the span's worker."""
    reached: dict[tuple[int, int], str] = defaultdict(str)
    steps: Counter[int] = Counter()
    for worker, operations in enumerate(read["lists"]):
        flying = most = 0
        for kind, span, *rest in operations:
            if kind in ("send", "receive", "P"):
                continue
            if span not in range(len(read["owners"])) or read["owners"][span] != worker:
                verdict.faults.append(f"worker {worker} computes {kind} on span {span}, which is not its own")
                continue
            if kind == "S":
                steps[span] += 1
                continue
            (chunk,) = rest
            trains = span >= read["first_trained"]
            if chunk not in range(read["chunks"]) or kind not in KINDS[reached[span, chunk]]:
                after = reached[span, chunk] or "nothing"
                verdict.faults.append(f"worker {worker} computes {kind} after {after} for chunk {chunk} on span {span}")
                continue
            if kind != "F" and not trains:
                verdict.faults.append(f"worker {worker} computes {kind} on span {span}, which trains nothing")
            if kind == "I" and span == read["first_trained"]:
                verdict.faults.append(f"worker {worker} computes a gradient that no span before span {span} waits for")
            reached[span, chunk] = kind
            verdict.versions.setdefault((span, chunk), {})[kind] = steps[span]
            flying += {"F": int(trains), "I": 0}.get(kind, -1)
            most = max(most, flying)
        verdict.in_flight.append(most)
    for span in range(len(read["owners"])):
        ends = ("B", "W") if span >= read["first_trained"] else ("F",)
        for chunk in range(read["chunks"]):
            if reached[span, chunk] not in ends:
                at = reached[span, chunk] or "nothing"
                verdict.faults.append(f"the round ends after {at} for chunk {chunk} on span {span}")


def _check_slices(read: dict[str, Any], verdict: Verdict) -> None:
    """Slices of one micro-batch go forward in order, because a later one attends to the earlier ones, and backward in
    the reverse order."""
    slices = read.get("slices", 1)
    for worker, operations in enumerate(read["lists"]):
        last: dict[tuple[str, int, int], int] = {}
        for kind, span, *rest in operations:
            if kind not in ("F", "B", "I"):
                continue
            micro_batch, number = divmod(rest[0], slices)
            forward = kind == "F"
            expected = last.get((str(forward), span, micro_batch), -1 if forward else slices) + (1 if forward else -1)
            if number != expected:
                verdict.faults.append(
                    f"worker {worker} computes {kind} of slice {number} of micro-batch {micro_batch} on span {span}, "
                    f"where slice {expected} is next"
                )
            last[str(forward), span, micro_batch] = number


def _check_steps(read: dict[str, Any], verdict: Verdict) -> None:
    """A span that trains takes each step, in order, when exactly the chunks up to the step's last have gone back."""
    ends = accumulate(read.get("steps", []))
    wanted = [(step, list(range(end))) for step, end in enumerate(ends)]
    for span, owner in enumerate(read["owners"]):
        back: list[int] = []
        taken: list[tuple[int, list[int]]] = []
        for kind, *rest in read["lists"][owner]:
            if kind in ("B", "W") and rest[0] == span:
                back.append(rest[1])
            elif kind == "S" and rest[0] == span:
                taken.append((rest[1], sorted(back)))
        if taken != (wanted if span >= read["first_trained"] else []):
            verdict.faults.append(f"span {span} takes steps after backwards {taken}, and not {wanted}")


def _check_prefixes(read: dict[str, Any], verdict: Verdict) -> None:
    """One worker runs all frozen units, in order and once, of each chunk whose prefix this round computes."""
    prefix = read.get("prefix", _NO_PREFIX)
    first = read["chunks"] if prefix["made"] else 0
    expected = range(first, read["chunks"] + prefix["next"]) if prefix["units"] else range(0)
    reached: dict[int, tuple[int, int]] = {}  # by chunk: the worker, and the unit that is next
    for worker, operations in enumerate(read["lists"]):
        for kind, *rest in operations:
            if kind == "P":
                chunk, start, stop = rest
                if reached.get(chunk, (worker, 0)) != (worker, start) or stop <= start:
                    verdict.faults.append(f"worker {worker} runs units {start} to {stop} of chunk {chunk} out of order")
                reached[chunk] = worker, stop
    if {chunk: stop for chunk, (_, stop) in reached.items()} != dict.fromkeys(expected, prefix["units"]):
        verdict.faults.append(f"of chunks {list(expected)}, frozen units {reached} have run")


def _check_pairs(read: dict[str, Any], verdict: Verdict) -> None:
    """Both ends of each pair of workers issue the same messages in the same order, both directions together, because
    NCCL matches them by order alone."""
    ends: dict[tuple[int, int], list[tuple[int, _Value]]] = defaultdict(
        list
    )  # (this end, other end) -> (sender, value)
    for worker, operations in enumerate(read["lists"]):
        for kind, *rest in operations:
            if kind in ("send", "receive"):
                *value, peer = rest
                ends[worker, peer].append((worker if kind == "send" else peer, (value[0], value[1], value[2])))
    for (first, second), messages in ends.items():
        if messages != ends.get((second, first), []):
            verdict.faults.append(f"workers {first} and {second} do not issue the same messages in the same order")


class _Play:
    """A game of tokens: each worker does its operations in order, one as soon as it can.

    A send puts its value into a queue without bounds. With `rendezvous` it waits instead until the other worker is at
    the receive. A receive takes the oldest value of its queue, whichever that is.
    """

    def __init__(self, read: dict[str, Any], rendezvous: bool) -> None:
        self.owners, self.first_trained = read["owners"], read["first_trained"]
        self.lists, self.rendezvous = read["lists"], rendezvous
        self.prefix, self.chunks = read.get("prefix", _NO_PREFIX), read["chunks"]
        self.place = [0] * len(self.lists)
        self.held: set[tuple[int, _Value]] = set()  # by the worker that may compute with it, or send it
        self.queues: dict[tuple[int, int], deque[_Value]] = defaultdict(deque)
        self.faults: list[str] = []

    def run(self) -> list[str]:
        moved = True
        while moved and not self.faults:
            moved = False
            for worker in range(len(self.lists)):
                while not self.faults and self._operate(worker):
                    moved = True
        how = "if every send waits for its receive" if self.rendezvous else "though no send waits"
        if not self.faults:
            stuck = [worker for worker, place in enumerate(self.place) if place < len(self.lists[worker])]
            self.faults = [f"worker {worker} waits for ever at {self._next(worker)}, {how}" for worker in stuck]
        if not self.faults and any(self.queues.values()):
            self.faults.append("a message is never received")
        for chunk in range(self.chunks, self.chunks + self.prefix["next"]):
            if not self.faults and (self.owners[0], ("p", 0, chunk)) not in self.held:
                self.faults.append(f"the output of the frozen units of chunk {chunk} does not reach its worker")
        return self.faults

    def _next(self, worker: int) -> list[Any]:
        place = self.place[worker]
        return self.lists[worker][place] if place < len(self.lists[worker]) else ["end"]

    def _operate(self, worker: int) -> bool:
        """Do the worker's next operation. Returns whether it could."""
        kind, *rest = self._next(worker)
        if kind == "end":
            return False
        done = getattr(self, f"_{kind}", self._compute)(worker, kind, *rest)
        self.place[worker] += done
        return bool(done)

    def _send(self, worker: int, _: str, what: str, span: int, chunk: int, peer: int) -> bool:
        value = what, span, chunk
        giver = span - 1 if what == "a" else span + 1
        known = what == "p" or (giver in range(len(self.owners)) and self.owners[giver] == worker)
        if peer != self.owners[span] or not known:
            self.faults.append(f"worker {worker} sends {value} to worker {peer}, where it does not belong")
        elif (worker, value) not in self.held:
            self.faults.append(f"worker {worker} sends {value} before it has computed it")
        elif not self.rendezvous:
            self.queues[worker, peer].append(value)
            self.held.remove((worker, value))
            return True
        elif self._next(peer) == ["receive", *value, worker]:
            self.held.remove((worker, value))
            self.held.add((peer, value))
            self.place[peer] += 1
            return True
        return False

    def _receive(self, worker: int, _: str, what: str, span: int, chunk: int, peer: int) -> bool:
        if self.rendezvous or not self.queues[peer, worker]:
            return False  # the sender moves both
        got = self.queues[peer, worker].popleft()
        if got != (what, span, chunk):
            self.faults.append(f"worker {worker} takes {got} for {(what, span, chunk)}")
        self.held.add((worker, got))
        return True

    def _P(self, worker: int, _: str, chunk: int, start: int, stop: int) -> bool:
        if stop == self.prefix["units"]:
            self.held.add((worker, ("p", 0, chunk)))
        return True

    def _compute(self, worker: int, kind: str, span: int, chunk: int) -> bool:
        needs, gives = self._needs(kind, span, chunk), self._gives(kind, span, chunk)
        if needs is not None:
            if (worker, needs) not in self.held:
                return False
            self.held.remove((worker, needs))
        if gives is not None:
            self.held.add((worker, gives))
        return True

    def _needs(self, kind: str, span: int, chunk: int) -> _Value | None:
        if kind == "F" and span > 0:
            return "a", span, chunk
        if kind == "F" and self.prefix["units"] and not self.prefix["made"]:
            return "p", 0, chunk
        return (DOWN[kind], span, chunk) if kind in DOWN and span < len(self.owners) - 1 else None

    def _gives(self, kind: str, span: int, chunk: int) -> _Value | None:
        if kind == "F" and span < len(self.owners) - 1:
            return "a", span + 1, chunk
        return (DOWN[kind], span - 1, chunk) if kind in DOWN and span > self.first_trained else None
