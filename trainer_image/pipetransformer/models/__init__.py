"""The models that can be trained: any list of layers between an embedding and a head. They are built unit by unit."""

from .architectures import register_architecture
from .build import (
    HUGGINGFACE,
    VIT,
    build_model,
    build_units,
    check_model_spec,
    import_huggingface,
    name_of,
)
from .context import MicroBatchContext, TokenSlice, current_micro_batch, set_micro_batch
from .model import PipelineModel, fix_constants, target_weights, unit_name
from .randomness.dropout import KeyedDropout, SamplesFirstError
from .randomness.keyed import is_keyed
from .run import run_unit
from .script_model import ModelFunction, ScriptModel
from .slices import with_earlier
from .ties import Tie, Ties
from .unchanged import Unchanged, check_loss
from .widths import narrowed, widths_of

__all__ = [
    "HUGGINGFACE",
    "VIT",
    "KeyedDropout",
    "MicroBatchContext",
    "ModelFunction",
    "PipelineModel",
    "SamplesFirstError",
    "ScriptModel",
    "Tie",
    "Ties",
    "TokenSlice",
    "Unchanged",
    "build_model",
    "build_units",
    "check_loss",
    "check_model_spec",
    "current_micro_batch",
    "fix_constants",
    "import_huggingface",
    "is_keyed",
    "name_of",
    "narrowed",
    "register_architecture",
    "run_unit",
    "set_micro_batch",
    "target_weights",
    "unit_name",
    "widths_of",
    "with_earlier",
]
