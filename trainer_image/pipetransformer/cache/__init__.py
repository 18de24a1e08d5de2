"""Caches the outputs of frozen layers for later epochs (PipeTransformer, section 3.4: AutoCache)."""

from .cache import ActivationCache
from .prefix import FrozenPrefix, PrefixOutputs, inputs_of, run_frozen

__all__ = ["ActivationCache", "FrozenPrefix", "PrefixOutputs", "inputs_of", "run_frozen"]
