"""Callbacks of a program: the leader calls them while it trains; they decide nothing.

A callback may take any time. If it is slower than the steps, all workers wait between two rounds.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any

from pipetransformer.errors import CallbackError

#: Calls that may be outstanding before training waits.
_BACKLOG = 16


class Callback:
    """Methods to override. All are called in one thread, which is not the training thread.

    A new leader continues where the last one stopped; a step that is redone is reported again. If a method fails, the
    run ends and no more methods are called. Values are those of the run's record: `step` counts from 0 in `on_step`,
    and is the number of committed steps in the other methods.
    """

    def on_step(self, line: Mapping[str, Any]) -> None:
        """A step was committed.

        Args:
            line: the step's line of the record (`steps.jsonl`), with keys in snake_case: step, epoch, samples, loss,
                gradient_norm, learning_rate, samples_per_second, idle_share, generation, frozen_layers,
                frozen_ahead_share, staleness, staleness_largest and level. A step whose loss or gradients are not
                finite is skipped: its loss and gradient_norm are None. Also total_steps, num_layers, seconds_left (None
                until the layout's step time is measured, and before the last visit of multiLevel) and held_out: name
                and value of `best_metric` in the newest evaluation (None before it).
        """

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out samples were evaluated."""

    def on_freeze(self, step: int, frozen_layers: int) -> None:
        """The frozen boundary moved."""

    def on_generation(self, step: int, generation: int, stages: int, pipelines: int) -> None:
        """The workers trained the first step of a generation, including the run's first generation."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The model is durable; `summary` holds the contents of `summary.json`."""


class Teller:
    """Calls a worker's callbacks in order, in its own thread, while training goes on.

    Args:
        callbacks: the program's callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="callbacks")
        self._told: deque[Future[None]] = deque()
        #: The first failure, kept because the future that failed may already be gone from the queue.
        self._failure: CallbackError | None = None
        self._closed = False

    def tell(self, method: Callable[..., None], *values: Any) -> None:
        """Queue a call of each callback's method.

        Args:
            method: a method of `Callback`.
            values: its arguments.

        Raises:
            CallbackError: an earlier call failed.
        """
        if self._callbacks:
            self._told.append(self._thread.submit(self._call, method.__name__, values))
            while self._told and self._told[0].done():
                self._told.popleft()
            self._check()

    @property
    def behind(self) -> bool:
        """Whether too many calls are outstanding, so that training should wait."""
        return sum(not told.done() for told in self._told) > _BACKLOG

    def catch_up(self) -> None:
        """Wait for all queued calls. Any thread may call this.

        Raises:
            CallbackError: a call failed.
            CancelledError: the teller was closed meanwhile.
        """
        wait(tuple(self._told))
        self._check()
        if self._closed:
            raise CancelledError("not all callbacks were called")

    def close(self) -> None:
        """Make no more calls. Queued calls end without effect instead of being cancelled, because a wait for a future
        that its executor cancelled would never end."""
        self._closed = True
        self._thread.shutdown(wait=False)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _call(self, method: str, values: Sequence[Any]) -> None:
        if self._closed or self._failure is not None:
            return
        for callback in self._callbacks:
            try:
                # A callback may change its dict, such as by `line.pop("step")`, so each gets its own.
                getattr(callback, method)(*(dict(value) if isinstance(value, dict) else value for value in values))
            except BaseException as error:
                name = f"{type(callback).__name__}.{method}"
                failure = CallbackError(f"{name} failed: {type(error).__name__}: {error}")
                self._failure = self._failure or failure
                raise failure from error
