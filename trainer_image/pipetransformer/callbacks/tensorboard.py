"""Writes a run's curves for TensorBoard.

Install `pipetransformer[tensorboard]` and pass `callbacks=[TensorBoard("logs")]`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from .callback import Callback

_CURVES = ("loss", "gradient_norm", "learning_rate", "samples_per_second", "idle_share", "frozen_layers", "generation")


class TensorBoard(Callback):
    """Writes `train/...` at each step, from 0, and `test/...` at the last step before an evaluation.

    If a run goes back to an earlier step, the curves of later steps are hidden, whichever leader wrote them.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self._log_dir = str(log_dir)
        self._writer: SummaryWriter | None = None
        self._last = -1

    def on_step(self, line: Mapping[str, Any]) -> None:
        step = int(line["step"])
        writer = self._writer_at(step)
        for name in _CURVES:
            if line[name] is not None:
                writer.add_scalar(f"train/{name}", line[name], step)
        self._last = step

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._writer or self._writer_at(step)
        for name, value in metrics.items():
            writer.add_scalar(f"test/{name}", value, step - 1)
        writer.flush()

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()

    def _writer_at(self, step: int) -> SummaryWriter:
        """A writer for `step`. A new writer hides that step and later ones."""
        if self._writer is None or step <= self._last:
            if self._writer is not None:
                self._writer.close()
            self._writer = SummaryWriter(self._log_dir, purge_step=step)
        return self._writer
