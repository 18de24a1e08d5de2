"""Elastic pipeline training: layers freeze, pipelines shrink, and free workers widen the layout or are released.

Names are imported on first use, because torch imports `worker.torchrun_entry` during its own import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipetransformer_contract.spec import (
        Cache,
        Checkpoint,
        Data,
        Evaluation,
        Freeze,
        Goal,
        LearningRateSchedule,
        Model,
        Optimizer,
        Pipeline,
        Training,
    )

    from .callbacks.callback import Callback
    from .data import AugmentedSplit, DataInfo, Dataset, PaddedSplit, Split
    from .errors import SpecError
    from .freeze import FreezeObservation, FreezePolicy
    from .library.finished_model import Prediction, TrainedModel, load_model
    from .library.train import Result, train
    from .models import KeyedDropout, PipelineModel, current_micro_batch, register_architecture, with_earlier

_HOMES = {
    "pipetransformer_contract.spec": (
        "Cache",
        "Checkpoint",
        "Data",
        "Evaluation",
        "Freeze",
        "Goal",
        "LearningRateSchedule",
        "Model",
        "Optimizer",
        "Pipeline",
        "Training",
    ),
    "pipetransformer.data": ("AugmentedSplit", "DataInfo", "Dataset", "PaddedSplit", "Split"),
    "pipetransformer.callbacks.callback": ("Callback",),
    "pipetransformer.errors": ("SpecError",),
    "pipetransformer.freeze": ("FreezeObservation", "FreezePolicy"),
    "pipetransformer.library.train": ("Result", "train"),
    "pipetransformer.models": (
        "KeyedDropout",
        "PipelineModel",
        "current_micro_batch",
        "register_architecture",
        "with_earlier",
    ),
    "pipetransformer.library.finished_model": ("Prediction", "TrainedModel", "load_model"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AugmentedSplit",
    "Cache",
    "Callback",
    "Checkpoint",
    "Data",
    "DataInfo",
    "Dataset",
    "Evaluation",
    "Freeze",
    "FreezeObservation",
    "FreezePolicy",
    "Goal",
    "KeyedDropout",
    "LearningRateSchedule",
    "Model",
    "Optimizer",
    "PaddedSplit",
    "Pipeline",
    "PipelineModel",
    "Prediction",
    "Result",
    "SpecError",
    "Split",
    "TrainedModel",
    "Training",
    "current_micro_batch",
    "load_model",
    "register_architecture",
    "train",
    "with_earlier",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
