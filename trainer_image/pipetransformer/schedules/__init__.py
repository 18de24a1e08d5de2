"""Schedules of a pipeline as data: each worker's list of computations, and the messages between workers in order."""

from .ahead import Ahead, RoundSeconds
from .asynchronous import Asynchronous, staleness
from .flushed import GPipe, OneForwardOneBackward, plain
from .make import make_schedule
from .operations import (
    Action,
    ActionKind,
    MessageKind,
    Operation,
    Receive,
    RoundShape,
    Schedule,
    ScheduleError,
    Send,
    Value,
)
from .order import lists_of, planned
from .owners import Fitted, OwnsSpans, fit, one_each
from .simulate import Program, RoundCosts, Simulated, simulate
from .tera import TeraPipe

__all__ = [
    "Action",
    "ActionKind",
    "Ahead",
    "Asynchronous",
    "Fitted",
    "GPipe",
    "MessageKind",
    "OneForwardOneBackward",
    "Operation",
    "OwnsSpans",
    "Program",
    "Receive",
    "RoundCosts",
    "RoundSeconds",
    "RoundShape",
    "Schedule",
    "ScheduleError",
    "Send",
    "Simulated",
    "TeraPipe",
    "Value",
    "fit",
    "lists_of",
    "make_schedule",
    "one_each",
    "plain",
    "planned",
    "simulate",
    "staleness",
]
