"""Schedules of a pipeline as data: lists of computations, and the order of their messages."""

from .actions import Action, ActionKind, RoundShape, Schedule, ScheduleError
from .flushed import GPipe, OneForwardOneBackward
from .order import MessageKind, Operation, Receive, Send, Value, planned
from .owners import Fitted, fit, one_each

__all__ = [
    "Action",
    "ActionKind",
    "Fitted",
    "GPipe",
    "MessageKind",
    "OneForwardOneBackward",
    "Operation",
    "Receive",
    "RoundShape",
    "Schedule",
    "ScheduleError",
    "Send",
    "Value",
    "fit",
    "one_each",
    "planned",
]
