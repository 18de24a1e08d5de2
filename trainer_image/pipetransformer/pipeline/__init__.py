"""Runs micro-batches through the stages of a pipeline."""

from pipetransformer.errors import ModelError

from .chunk import Chunk, Loss, Target
from .executor import Executor
from .runner import RoundSums, StageRunner
from .stage import RoundHooks, Span, StageSpec

__all__ = [
    "Chunk",
    "Executor",
    "Loss",
    "ModelError",
    "RoundHooks",
    "RoundSums",
    "Span",
    "StageRunner",
    "StageSpec",
    "Target",
]
