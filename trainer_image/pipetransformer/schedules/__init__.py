"""Schedules of a pipeline as data: lists of computations, and the order of their messages."""

from .actions import Action, ActionKind, RoundShape, Schedule, ScheduleError
from .flushed import GPipe, OneForwardOneBackward
from .order import MessageKind, Operation, Receive, Send, Value, planned
from .tera import TeraPipe

__all__ = [
    "Action",
    "ActionKind",
    "GPipe",
    "MessageKind",
    "OneForwardOneBackward",
    "Operation",
    "Receive",
    "RoundShape",
    "Schedule",
    "ScheduleError",
    "Send",
    "TeraPipe",
    "Value",
    "planned",
]
