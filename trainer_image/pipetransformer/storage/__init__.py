"""Files that outlive the workers: checkpoints by unit, and the finished model."""

from .files import Folder
from .model_folder import Kind, ModelConfig, importing_for_model, load_config, load_model, local_copy, write_model
from .store import CheckpointInfo, commit, find, latest, load_unit, newest_generation, save_unit

__all__ = [
    "CheckpointInfo",
    "Folder",
    "Kind",
    "ModelConfig",
    "commit",
    "find",
    "importing_for_model",
    "latest",
    "load_config",
    "load_model",
    "load_unit",
    "local_copy",
    "newest_generation",
    "save_unit",
    "write_model",
]
