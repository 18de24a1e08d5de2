"""Finds the best of all cuts of a layout, to judge the cuts that the trainer's faster search finds.

The trainer balances the seconds of spans and simulates a few cuts. This search goes through all cuts at all
micro-batch sizes. It simulates each cut that may be faster than the best one so far, by its lower bound. A leader has
no time for that.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

from pipetransformer.schedules import ScheduleError, fit

from .candidates import IN_HALVES, ONE_FORWARD_ONE_BACKWARD, Option
from .contiguous import MemoryBoundError
from .cut import Cut
from .predict import Step
from .step_model import StepModel

#: The search stops after this many partial cuts of one layout. With up to 12 layers it is complete before that.
_MOST_PARTS = 20_000


@dataclass(frozen=True, slots=True)
class BestCut:
    """The fastest cut of a layout that fits the memory.

    Attributes:
        cut: the spans, the schedule and the micro-batch size.
        seconds: seconds of a step.
        exact: whether the search was complete, so that no cut is faster. Otherwise the search stopped, and this is the
            best cut that it had found.
    """

    cut: Cut
    seconds: float
    exact: bool


def best_cut(model: StepModel, boundary: int, stages: int, pipelines: int) -> BestCut | None:
    """Search all cuts of a layout. Returns None if no cut fits the memory.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    search = _Search(model, boundary, stages, pipelines)
    search.start()
    ran = False
    for option in model.options if stages > 1 else (ONE_FORWARD_ONE_BACKWARD,):
        ran |= search.option(option)
    if not ran:  # the layout can run none of the schedules, or no cut for them fits the memory
        search.option(ONE_FORWARD_ONE_BACKWARD)
    if search.best is None:
        return None
    return BestCut(search.best, search.seconds, search.parts_left > 0)


class _Search:
    """The search in one layout. `best` is the best cut so far, and `seconds` the seconds of its step."""

    def __init__(self, model: StepModel, boundary: int, stages: int, pipelines: int) -> None:
        self.model, self._boundary = model, boundary
        self._stages, self._pipelines = stages, pipelines
        self.best: Cut | None = None
        self.seconds = math.inf
        self.parts_left = _MOST_PARTS
        bytes_of_worker = model.costs.worker_bytes
        self.limit = math.inf if bytes_of_worker is None else bytes_of_worker

    def start(self) -> None:
        """Begin with the cut that the trainer would choose. Most other cuts can then be ruled out by their bound."""
        try:
            cut = self.model.cut(self._boundary, self._stages, self._pipelines)
        except MemoryBoundError:
            return
        found = self.model.predict(self._boundary, cut, self._pipelines)
        if found.bytes_per_worker <= self.limit:
            self.best, self.seconds = cut, found.seconds

    def option(self, option: Option) -> bool:
        """Look at each cut for one schedule. Returns whether the layout can run it, and `best` is set by now."""
        ran = False
        for size in self.model.sizes(self._stages, self._pipelines):
            step = self.model.step(self._boundary, size, self._pipelines)
            num_layers = len(step.state_bytes) - 2
            fitted = fit(option.schedule, self._stages, option.spans_per_worker, step.micro_batches, num_layers)
            if not fitted.reason:
                _Cuts(self, option, size, step, fitted.owners).extend([])
                ran = True
        return ran and self.best is not None

    def compare(self, option: Option, step: Step, cut: Cut) -> None:
        """Simulate a cut, and keep it if it is the best so far."""
        try:
            found = step.predict(self.model.schedule(option), cut.owners, cut.spans)
        except ScheduleError:  # a program's own schedule may refuse a round
            return
        if found.seconds < self.seconds and found.bytes_per_worker <= self.limit:
            self.best, self.seconds = cut, found.seconds


class _Cuts:
    """Goes through all cuts for one schedule and one micro-batch size. It builds a cut span by span."""

    def __init__(self, search: _Search, option: Option, size: int, step: Step, owners: tuple[int, ...]) -> None:
        self._search, self._option, self._size = search, option, size
        self._step, self._owners = step, owners
        self._load = [0.0, *accumulate(step.units.cached_seconds)]
        self._state = [0.0, *accumulate(step.state_bytes)]
        self._prefix_state = [0.0, *accumulate(step.prefix_bytes)]

    def extend(self, spans: list[range]) -> None:
        """Look at all cuts that begin with these spans."""
        start = spans[-1].stop if spans else 0
        last = len(self._load) - 1
        others = len(self._owners) - len(spans) - 1
        for stop in range(max(start, 1) + 1, last - others) if others else [last]:
            self._search.parts_left -= 1
            if self._search.parts_left < 0 or self._hopeless(start, stop, 1):
                return  # a longer span is slower, and needs more memory
            if others and self._hopeless(stop, last, others):
                continue
            self._try([*spans, range(start, stop)])

    def _hopeless(self, start: int, stop: int, spans: int) -> bool:
        """Whether no good cut has these units in this many spans: they need too many seconds or too many bytes.

        Args:
            start: the first unit.
            stop: the unit after the last one.
            spans: number of spans that hold the units.
        """
        load = (self._load[stop] - self._load[start]) * self._step.micro_batches
        state = self._state if start else self._prefix_state
        return load >= self._search.seconds * spans or state[stop] - state[start] > self._search.limit * spans

    def _try(self, spans: list[range]) -> None:
        work = self._step.units.of_spans(self._owners[: len(spans)], spans)
        bound = work.bound(halves=self._option.schedule in IN_HALVES)
        steps = self._step.steps_of(self._search.model.schedule(self._option))
        if bound.at(self._step.micro_batches * steps) / steps >= self._search.seconds:
            return
        if len(spans) < len(self._owners):
            self.extend(spans)
        else:
            cut = Cut(spans, self._size, self._owners, self._option.schedule)
            self._search.compare(self._option, self._step, cut)
