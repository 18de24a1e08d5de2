"""The layout of a job: how many workers form a pipeline, and how many pipelines there are."""

from dataclasses import dataclass

from .words import counted


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of `pipelines` pipelines (R) with `stages` workers each (K)."""

    stages: int
    pipelines: int

    @property
    def workers(self) -> int:
        return self.stages * self.pipelines

    @property
    def words(self) -> str:
        """The layout in words for messages, such as `1 pipeline of 4 stages`."""
        return f"{counted(self.pipelines, 'pipeline')} of {counted(self.stages, 'stage')}"
