"""Runs micro-batches through the stages of a pipeline."""

from .chunk import Chunk
from .executor import Executor
from .runner import StageRunner
from .span_probes import SpanProbes
from .stage import RoundHooks, Span, StageSpec
from .target import Loss, Target

__all__ = [
    "Chunk",
    "Executor",
    "Loss",
    "RoundHooks",
    "Span",
    "SpanProbes",
    "StageRunner",
    "StageSpec",
    "Target",
]
