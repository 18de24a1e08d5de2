"""Shows progress on standard error: on a terminal as one line that is redrawn, otherwise as one line a minute."""

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TextIO

from pipetransformer.callbacks.callback import Callback
from pipetransformer_contract.progress import Progress

logger = logging.getLogger(__name__)

REDRAW_SECONDS = 0.1
LINE_SECONDS = 60.0
#: Terminal codes: move to the start of the line; clear from there to its end.
_BEGIN, _CLEAR = "\r", "\x1b[K"


class ProgressLine(Callback):
    """Writes the progress line. A failure, such as a closed stream, is logged once and does not stop training.

    Args:
        stream: where to write; None for the `sys.stderr` of the time of the first step.
        clock: returns seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._layout: tuple[int, int] | None = None
        self._progress: Progress | None = None
        self._text = ""
        #: The line that was written last, and when.
        self._written, self._written_at = "", -float("inf")
        self._failed = False
        self._lock = threading.Lock()  # the training thread calls `close`

    def on_step(self, line: Mapping[str, Any]) -> None:
        stages, pipelines = self._layout or (None, None)
        self._progress = Progress(
            step=line["step"] + 1,
            total_steps=line["total_steps"],
            seconds_left=line["seconds_left"],
            loss=line["loss"],
            held_out=line["held_out"],
            stages=stages,
            pipelines=pipelines,
            frozen_layers=line["frozen_layers"],
            num_layers=line["num_layers"],
            samples_per_second=line["samples_per_second"],
        )
        self._text = self._progress.line()
        self._show(REDRAW_SECONDS, LINE_SECONDS)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """The last line shows the newest evaluation, although no step follows it."""
        if self._progress is not None and self._progress.held_out is not None:
            name, _ = self._progress.held_out
            self._text = replace(self._progress, held_out=(name, metrics[name])).line()

    def on_generation(self, step: int, generation: int, stages: int, pipelines: int) -> None:
        self._layout = stages, pipelines

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._show(0.0, 0.0)
        self.close()

    def close(self) -> None:
        """End the line, so that other output starts on a new one."""
        with self._lock:
            if self._written and not self._failed and _is_terminal(self._stream):
                self._write("\n")
            self._failed = True  # a late step must not overwrite other output

    def _show(self, on_terminal: float, elsewhere: float) -> None:
        """Write the line if it has changed and the last one was written at least that many seconds ago."""
        with self._lock:
            self._stream = self._stream or sys.stderr
            terminal = _is_terminal(self._stream)
            since = self._clock() - self._written_at
            if self._failed or self._text == self._written or since < (on_terminal if terminal else elsewhere):
                return
            self._written, self._written_at = self._text, self._clock()
            if terminal:
                self._write(f"{_BEGIN}{self._text[: shutil.get_terminal_size().columns - 1]}{_CLEAR}")
            else:
                self._write(f"{self._text}\n")

    def _write(self, text: str) -> None:
        try:
            assert self._stream is not None
            self._stream.write(text)
            self._stream.flush()
        except Exception as error:  # noqa: BLE001 - training is worth more than its progress
            self._failed = True
            logger.warning("progress is no longer shown: %s: %s", type(error).__name__, error)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # the stream is closed
        return False
