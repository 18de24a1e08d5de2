"""What is trained: any list of blocks between an embedding and a head, built unit by unit."""

from .build import build_model, build_unit
from .dropout import KeyedDropout, set_dropout_context
from .model import PipelineModel, unit_name

__all__ = ["KeyedDropout", "PipelineModel", "build_model", "build_unit", "set_dropout_context", "unit_name"]
