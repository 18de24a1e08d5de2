"""State that outlives every worker: checkpoints by unit, and the finished model."""

from .files import Folder
from .model_folder import load_config, load_model, write_model
from .store import CheckpointInfo, commit, find, latest, load_unit, newest_generation, save_unit

__all__ = [
    "CheckpointInfo",
    "Folder",
    "commit",
    "find",
    "latest",
    "load_config",
    "load_model",
    "load_unit",
    "newest_generation",
    "save_unit",
    "write_model",
]
