"""What ends a job whoever trains it: the user's spec, model or storage is wrong. A worker exits with code 2."""


class SpecError(ValueError):
    """A field of the job's spec cannot be trained.

    Attributes:
        field: path of the field, such as `spec.model.name`.
        reason: CamelCase reason for the job's condition, such as `InvalidSpec` or `DataUnreadable`.
    """

    def __init__(self, field: str, message: str, *, reason: str = "InvalidSpec") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = reason


class CallbackError(RuntimeError):
    """A callback of the user's program failed."""


class WorkersDifferError(Exception):
    """Workers of one job do not see the same data."""


class StorageError(Exception):
    """A checkpoint or the model cannot be written where the spec says."""


class ModelError(RuntimeError):
    """The model itself failed, which no other worker can repair."""
