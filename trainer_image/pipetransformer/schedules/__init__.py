"""Schedules of a pipeline as data: lists of computations, and the order of their messages."""

from .actions import Action, ActionKind, RoundShape, Schedule, ScheduleError
from .ahead import Ahead, RoundSeconds
from .flushed import GPipe, OneForwardOneBackward
from .order import MessageKind, Operation, Receive, Send, Value, planned
from .simulate import RoundCosts, Simulated, simulate

__all__ = [
    "Action",
    "ActionKind",
    "Ahead",
    "GPipe",
    "MessageKind",
    "OneForwardOneBackward",
    "Operation",
    "Receive",
    "RoundCosts",
    "RoundSeconds",
    "RoundShape",
    "Schedule",
    "ScheduleError",
    "Send",
    "Simulated",
    "Value",
    "planned",
    "simulate",
]
