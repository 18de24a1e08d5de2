"""Multi-Level training: which level trains when, and the operators that make the weights of one level from another.

A level is a size of the job's model. Level 0 is the model itself; each further level has fewer layers, or is narrower.
Source: Zou et al., "A Multi-Level Framework for Accelerating Training Transformer Models" (arXiv 2404.07999).
"""

from .axes import Family, Heads, family_of
from .level_map import EarlierWeights, LevelMap, Levels
from .operators import Groups
from .visits import Visit, visits_of

__all__ = ["EarlierWeights", "Family", "Groups", "Heads", "LevelMap", "Levels", "Visit", "family_of", "visits_of"]
