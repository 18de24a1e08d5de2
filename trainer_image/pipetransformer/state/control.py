"""The control state: what every worker of a job knows alike between rounds."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pipetransformer_contract.spec import Evaluation, Goal


@dataclass
class Control:
    """What every worker knows alike between rounds.

    Attributes:
        step: global steps committed so far.
        last_generation: lasting layout generation that committed the last of them, 0 before the first.
        boundary: frozen blocks.
        boundary_step: step before which the boundary was last changed.
        fell_step: step before which it last fell, 0 for never: what was frozen then and is now has not changed since.
        policy: state of the freeze policy.
        metrics: values of the newest evaluation, by name.
        best: those of the best one, empty before the first.
        best_step: steps that were committed at the best one.
        kept_step: steps that were committed at the one whose model is kept, 0 for none.
        evaluations_since_best: how many in a row were not better.
        round_ended_at: wall clock at the end of the last round, 0 before the first: a pause is counted from it.
        costs: what the units cost, `ModelCosts` by field name; None before it was measured.
        skipped_steps: steps in a row, up to now, that were not finite.
        last_vote: the vote that committed the last step; lets a worker that missed it commit the same.
        last_similarities: those that came with that vote.
        decided_step: steps that were committed when the freeze policy was last asked.
        last_step: the last step's line in the run's record, in case that the leader died before it was written.
        evaluated_step: steps that were committed at the newest evaluation.
        job_uid: of the job that trains.
        earlier_job: of the one whose checkpoint it went on from, its own where it began from the start; empty where
            nobody knows.
        earlier_generations: the highest layout generation of earlier jobs when this one began.
    """

    step: int = 0
    last_generation: int = 0
    boundary: int = 0
    boundary_step: int = 0
    fell_step: int = 0
    policy: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    best_step: int = 0
    kept_step: int = 0
    evaluations_since_best: int = 0
    round_ended_at: float = 0.0
    costs: dict[str, Any] | None = None
    skipped_steps: int = 0
    last_vote: list[float] = field(default_factory=list)
    last_similarities: list[float] = field(default_factory=list)
    decided_step: int = -1
    last_step: dict[str, Any] = field(default_factory=dict)
    evaluated_step: int = 0
    job_uid: str = ""
    earlier_job: str = ""
    earlier_generations: int = 0

    def begin_job(self, uid: str, earlier_generations: int) -> None:
        """A generation of the job `uid` goes on from here; another job may have come so far."""
        if self.job_uid != uid:
            self.earlier_job = self.job_uid or (uid if self.step == 0 else "")
            self.job_uid, self.earlier_generations = uid, earlier_generations

    def lasting_generation(self, number: int) -> int:
        """The layout generation `number` of this job, in what outlives it: above those of earlier jobs."""
        return self.earlier_generations + number

    @property
    def point(self) -> tuple[int, int]:
        """Which committed state this is. Two generations that do the same step sum gradients in another order, so
        their states differ in the last bits."""
        return self.step, self.last_generation

    @property
    def best_is_kept(self) -> bool:
        """Whether the model of the best evaluation is kept."""
        return 0 < self.best_step == self.kept_step

    def is_better(self, values: dict[str, float], spec: Evaluation) -> bool:
        """Whether what an evaluation gave is the best so far; where the best model is to be kept, of what is kept."""
        value, best = values[spec.best_metric], self.best.get(spec.best_metric)
        if spec.keep_best and not self.best_is_kept:
            best = None
        return math.isfinite(value) and (best is None or (value > best if spec.goal is Goal.HIGHEST else value < best))

    def note_evaluation(self, values: dict[str, float], *, better: bool) -> None:
        """Keep what an evaluation after `step` steps gave."""
        self.metrics, self.evaluated_step = values, self.step
        self.evaluations_since_best = 0 if better else self.evaluations_since_best + 1
        if better:
            self.best, self.best_step = values, self.step

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Control":
        """From what `to_dict` gave, here or elsewhere: a newer trainer may have written more than this one knows."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})
