"""An error of one field of a manifest."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with one field. `path` names it as the user wrote it, such as `spec.training.epochs`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"
