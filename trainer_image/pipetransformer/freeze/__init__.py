"""Freeze policies: they decide when layers stop training. One small interface, one policy per file."""

from .explicit import Explicit
from .gradient_norm import GradientNorm
from .guarded_copy import PolicyCopy
from .make import make_policy
from .none import NoFreeze
from .norm_change import NormChange
from .paper_schedule import PaperSchedule
from .plasticity import Plasticity
from .policy import FreezeObservation, FreezePolicy, Instants

__all__ = [
    "Explicit",
    "FreezeObservation",
    "FreezePolicy",
    "GradientNorm",
    "Instants",
    "NoFreeze",
    "NormChange",
    "PaperSchedule",
    "Plasticity",
    "PolicyCopy",
    "make_policy",
]
