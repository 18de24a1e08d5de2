"""Activations of frozen layers, kept for the next epoch (PipeTransformer, section 3.4: AutoCache)."""

from .cache import ActivationCache
from .prefix import FrozenPrefix, Source

__all__ = ["ActivationCache", "FrozenPrefix", "Source"]
