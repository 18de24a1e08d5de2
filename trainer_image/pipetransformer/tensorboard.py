"""Curves of a run for TensorBoard: `pip install pipetransformer[tensorboard]` and `callbacks=[TensorBoard("logs")]`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from .callbacks import Callback

_CURVES = ("loss", "gradient_norm", "learning_rate", "samples_per_second", "frozen_layers", "generation")


class TensorBoard(Callback):
    """Writes `train/...` at each step and `test/...` at each evaluation into a folder.

    A leader that goes on from an earlier step hides what the one before it wrote of later ones.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self._log_dir = str(log_dir)
        self._writer: SummaryWriter | None = None

    def on_step(self, line: Mapping[str, Any]) -> None:
        step = int(line["step"])
        for name in _CURVES:
            if line[name] is not None:
                self._open(step).add_scalar(f"train/{name}", line[name], step)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._open(step)
        for name, value in metrics.items():
            writer.add_scalar(f"test/{name}", value, step)
        writer.flush()

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> SummaryWriter:
        if self._writer is None:
            self._writer = SummaryWriter(self._log_dir, purge_step=step)
        return self._writer
