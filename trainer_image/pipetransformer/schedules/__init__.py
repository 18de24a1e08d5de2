"""Schedules of a pipeline as data: lists of computations, and the order of their messages."""

from .actions import Action, ActionKind, RoundShape, Schedule, ScheduleError
from .flushed import GPipe, OneForwardOneBackward
from .make import make_schedule
from .order import MessageKind, Operation, Receive, Send, Value, planned

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
    "Value",
    "make_schedule",
    "planned",
]
