"""Runs micro-batches through the stages of a pipeline."""

from pipetransformer.errors import ModelError

from .actions import Action, ActionKind, AllForwardAllBackward, Chunk, InOrder, Schedule
from .choice import ScheduleClass, one_forward_one_backward, schedule_class
from .executor import ChunkIO, Executor, PlainHooks, RoundHooks, SpanModule
from .runner import RoundSums, StageRunner
from .stage import StageSpec

__all__ = [
    "Action",
    "ActionKind",
    "AllForwardAllBackward",
    "Chunk",
    "ChunkIO",
    "Executor",
    "InOrder",
    "ModelError",
    "PlainHooks",
    "RoundHooks",
    "RoundSums",
    "Schedule",
    "ScheduleClass",
    "SpanModule",
    "StageRunner",
    "StageSpec",
    "one_forward_one_backward",
    "schedule_class",
]
