"""Runs micro-batches through the stages of a pipeline."""

from .chunk import Chunk, Loss, Target
from .executor import Executor
from .runner import StageRunner
from .stage import RoundHooks, Span, StageSpec

__all__ = [
    "Chunk",
    "Executor",
    "Loss",
    "RoundHooks",
    "Span",
    "StageRunner",
    "StageSpec",
    "Target",
]
