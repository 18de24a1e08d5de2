"""The V-cycle: a job trains level 0, then each smaller level, then each larger one up to 0, as the spec says."""

from dataclasses import dataclass

from pipetransformer_contract.spec import MultiLevel


@dataclass(frozen=True, slots=True)
class Visit:
    """Consecutive steps in which one level trains.

    Attributes:
        level: the level that trains; 0 is the job's own model.
        first_step: the first of the steps (the job's first step is 0).
        steps: number of steps.
        learning_rate: the highest learning rate in these steps; None to use the optimizer's.
    """

    level: int
    first_step: int
    steps: int
    learning_rate: float | None = None

    @property
    def end(self) -> int:
        """Number of committed steps of the job when the visit ends."""
        return self.first_step + self.steps


def visits_of(spec: MultiLevel | None, total_steps: int) -> tuple[Visit, ...]:
    """The visits of a job, in order. A job without levels has one visit, of level 0.

    Args:
        spec: the job's `multiLevel`; None if it has none.
        total_steps: steps of the whole job.
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
