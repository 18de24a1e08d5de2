"""Which worker holds which units in one generation, as all its workers know it."""

from dataclasses import dataclass

from pipetransformer_contract.messages import Generation


@dataclass(frozen=True, slots=True)
class StageLayout:
    """A generation with its roles.

    Attributes:
        generation: the generation as the operator published it.
        rank: this worker's rank among the members.
        roles: (pipeline, stage) by rank.
        spans: the contiguous units of each stage.
        micro_batch_size: samples in a micro-batch.
    """

    generation: Generation
    rank: int
    roles: list[tuple[int, int]]
    spans: list[range]
    micro_batch_size: int

    @property
    def number(self) -> int:
        """The layout generation."""
        return self.generation.layout_generation

    @property
    def stages(self) -> int:
        return self.generation.stages

    @property
    def pipelines(self) -> int:
        return self.generation.pipelines

    @property
    def pipeline(self) -> int:
        """This worker's pipeline."""
        return self.roles[self.rank][0]

    @property
    def stage(self) -> int:
        """This worker's stage."""
        return self.roles[self.rank][1]

    @property
    def span(self) -> range:
        """This worker's units."""
        return self.spans[self.stage]

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader_rank

    @property
    def leader_rank(self) -> int:
        return [member.name for member in self.generation.members].index(self.generation.leader)

    def holder(self, pipeline: int, stage: int) -> int:
        """The rank that has a role."""
        return self.roles.index((pipeline, stage))
