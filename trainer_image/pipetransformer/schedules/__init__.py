"""How micro-batches flow through the stages of a pipeline."""

from .runner import ModelError, RoundSums, StageRunner, StageSpec

__all__ = ["ModelError", "RoundSums", "StageRunner", "StageSpec"]
