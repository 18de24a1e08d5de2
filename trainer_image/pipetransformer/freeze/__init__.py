"""Freeze policies decide when layers stop training. All have one small interface, and each has its file."""

from .explicit import Explicit
from .gradient_norm import GradientNorm
from .guarded_copy import PolicyCopy
from .limits import Limits, always_frozen, limits_of
from .make import make_policy
from .none import NoFreeze
from .norm_change import NormChange
from .paper_schedule import PaperSchedule
from .plasticity import Plasticity
from .policy import FreezeObservation, FreezePolicy, Instants
from .trial import Trial, Verdict

__all__ = [
    "Explicit",
    "FreezeObservation",
    "FreezePolicy",
    "GradientNorm",
    "Instants",
    "Limits",
    "NoFreeze",
    "NormChange",
    "PaperSchedule",
    "Plasticity",
    "PolicyCopy",
    "Trial",
    "Verdict",
    "always_frozen",
    "limits_of",
    "make_policy",
]
