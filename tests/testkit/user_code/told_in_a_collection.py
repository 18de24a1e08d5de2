"""Digits for a worker that is told to stop while it gives its memory back: Python drops what a collection raises."""

import gc
import os
import signal
import sys
from typing import Any

from pipetransformer.data import Dataset
from pipetransformer.data.digits import load_digits


def load(**arguments: Any) -> Dataset:
    """As an imported dataset."""
    gc.callbacks.append(_tell)
    return load_digits(**arguments)


def _tell(phase: str, _: dict[str, int]) -> None:
    collects = sys._getframe(1)
    if phase == "start" and collects.f_code.co_name == "_give_back_memory":
        os.kill(os.getpid(), signal.SIGTERM)
