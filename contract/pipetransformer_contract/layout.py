"""The layout of a job: how many workers form a pipeline, and how many pipelines there are."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """`stages` workers a pipeline (K) times `pipelines` (R)."""

    stages: int
    pipelines: int

    @property
    def workers(self) -> int:
        return self.stages * self.pipelines
