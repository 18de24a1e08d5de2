"""What a program may do while it trains: it is told on the leader, and decides nothing.

It takes as long as it likes: whoever is told of steps more slowly than they are made has all workers wait between two
rounds, and breaks nothing.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any

from pipetransformer.errors import CallbackError

#: How much may be told late, until training waits for it.
_BACKLOG = 16


class Callback:
    """Methods to override, all called in one thread, which is not that of training. A new leader goes on where the last
    one was; a step that is redone is told again. Once one of them has failed, which ends the run, none is called.

    Values are those of the run's record: `step` counts from 0 in `on_step`, and committed steps elsewhere.
    """

    def on_step(self, line: Mapping[str, Any]) -> None:
        """A step is committed: step, epoch, samples, loss, gradient_norm, learning_rate, samples_per_second,
        generation, frozen_layers. Beside the record's values: total_steps, num_layers, seconds_left (None until the
        step time of the present layout is measured) and held_out, the name and value of `best_metric` at the newest
        evaluation (None before the first)."""

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out samples were evaluated."""

    def on_freeze(self, step: int, frozen_layers: int) -> None:
        """The frozen boundary moved."""

    def on_generation(self, step: int, generation: int, stages: int, pipelines: int) -> None:
        """The workers trained the first step of a generation (the first of all, too)."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The model is durable; `summary` is what `summary.json` says."""


class Teller:
    """Tells one worker's callbacks, in a thread of its own and in order: training goes on meanwhile.

    Args:
        callbacks: of the program.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="callbacks")
        self._told: deque[Future[None]] = deque()
        #: The first that failed: not what waits for a callback tells of it, which may wait for nobody any more.
        self._failure: CallbackError | None = None
        self._closed = False

    def tell(self, method: Callable[..., None], *values: Any) -> None:
        """Have a method of each callback called.

        Args:
            method: of `Callback`.
            values: its arguments.

        Raises:
            CallbackError: one that was called before failed.
        """
        if self._callbacks:
            self._told.append(self._thread.submit(self._call, method.__name__, values))
            while self._told and self._told[0].done():
                self._told.popleft()
            self._check()

    @property
    def behind(self) -> bool:
        """Whether so much is to be told yet that training should wait."""
        return sum(not told.done() for told in self._told) > _BACKLOG

    def catch_up(self) -> None:
        """Wait until all is told; in any thread.

        Raises:
            CallbackError: one failed.
            CancelledError: the teller was closed meanwhile.
        """
        wait(tuple(self._told))
        self._check()
        if self._closed:
            raise CancelledError("not all was told")

    def close(self) -> None:
        """Tell nothing more. What is queued ends without a call: who waits for a future that its executor has cancelled
        waits for ever."""
        self._closed = True
        self._thread.shutdown(wait=False)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _call(self, method: str, values: Sequence[Any]) -> None:
        if self._closed or self._failure is not None:
            return  # the run ends: who waits to be told of it waits for nothing else
        for callback in self._callbacks:
            try:
                getattr(callback, method)(*values)
            except BaseException as error:
                name = f"{type(callback).__name__}.{method}"
                failure = CallbackError(f"{name} failed: {type(error).__name__}: {error}")
                self._failure = self._failure or failure
                raise failure from error
