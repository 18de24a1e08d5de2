"""The V-cycle: from level 0 down to the smallest level, and up again. The spec alone fixes every step of it."""

from dataclasses import dataclass

from pipetransformer_contract.spec import MultiLevel


@dataclass(frozen=True, slots=True)
class Visit:
    """Consecutive steps of one level.

    Attributes:
        level: the level that trains; 0 is the job's own model.
        first_step: step (from 0) that it begins with.
        steps: number of its steps.
        learning_rate: highest learning rate; None for the optimizer's.
    """

    level: int
    first_step: int
    steps: int
    learning_rate: float | None = None

    @property
    def end(self) -> int:
        """Committed steps at its end."""
        return self.first_step + self.steps


def visits_of(spec: MultiLevel | None, total_steps: int) -> tuple[Visit, ...]:
    """The visits of a job, in order. A job without levels has one visit, of level 0.

    Args:
        spec: the job's `multiLevel`.
        total_steps: global steps of the whole job.
    """
    if spec is None:
        return (Visit(0, 0, total_steps),)
    smallest = spec.levels - 1
    planned: list[tuple[int, int, float | None]] = [
        *((level, spec.descent_steps, None) for level in range(smallest)),
        *((level, spec.ascent_steps, spec.ascent_learning_rate) for level in range(smallest, 0, -1)),
        (0, total_steps - spec.cycle_steps, None),
    ]
    visits: list[Visit] = []
    for level, steps, rate in planned:
        visits.append(Visit(level, visits[-1].end if visits else 0, steps, rate))
    return tuple(visits)
