"""Says which worker holds which units in a generation. All its workers know the same."""

from dataclasses import dataclass

from pipetransformer.partition import Cut
from pipetransformer_contract.messages import Generation
from pipetransformer_contract.spec import ScheduleName


@dataclass(frozen=True, slots=True)
class StageLayout:
    """A generation, with the pipeline and the stage of each member.

    Attributes:
        generation: the generation as the operator published it.
        rank: this worker's rank among the members.
        roles: (pipeline, stage) of each member, by rank.
        cut: the spans of the model, the stages that own them, and the schedule.
    """

    generation: Generation
    rank: int
    roles: list[tuple[int, int]]
    cut: Cut

    @property
    def number(self) -> int:
        """Number of the generation."""
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
    def spans(self) -> list[range]:
        """All spans, in the order of the model."""
        return self.cut.spans

    @property
    def owners(self) -> tuple[int, ...]:
        """Stage of each span."""
        return self.cut.owners

    @property
    def schedule(self) -> ScheduleName:
        """The schedule that runs in this layout."""
        return self.cut.schedule

    @property
    def micro_batch_size(self) -> int:
        """Samples in a micro-batch."""
        return self.cut.micro_batch_size

    @property
    def units(self) -> list[int]:
        """The units that this worker's stage owns, ascending."""
        return self.cut.units_of(self.stage)

    @property
    def is_first(self) -> bool:
        """Whether this worker owns the first span, which reads the samples."""
        return self.stage == self.owners[0]

    @property
    def is_last(self) -> bool:
        """Whether this worker owns the last span, which computes the loss."""
        return self.stage == self.owners[-1]

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader_rank

    @property
    def leader_rank(self) -> int:
        return [member.name for member in self.generation.members].index(self.generation.leader)

    def holder(self, pipeline: int, unit: int) -> int:
        """Rank of the member of a pipeline whose stage owns a unit."""
        owner = next(owner for span, owner in zip(self.spans, self.owners, strict=True) if unit in span)
        return self.roles.index((pipeline, owner))
