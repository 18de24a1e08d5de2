"""Schedules of a pipeline as data: each worker's list of computations, and the messages between workers in order."""

from .ahead import Ahead, RoundSeconds
from .asynchronous import Asynchronous, staleness
from .flushed import GPipe, OneForwardOneBackward, fallback
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
from .owners import OwnsSpans, fit
from .simulate import RoundCosts, RoundGraph, simulate
from .tera import TeraPipe

__all__ = [
    "Action",
    "ActionKind",
    "Ahead",
    "Asynchronous",
    "GPipe",
    "MessageKind",
    "OneForwardOneBackward",
    "Operation",
    "OwnsSpans",
    "Receive",
    "RoundCosts",
    "RoundGraph",
    "RoundSeconds",
    "RoundShape",
    "Schedule",
    "ScheduleError",
    "Send",
    "TeraPipe",
    "Value",
    "fallback",
    "fit",
    "lists_of",
    "make_schedule",
    "planned",
    "simulate",
    "staleness",
]
