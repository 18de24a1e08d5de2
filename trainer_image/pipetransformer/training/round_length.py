"""How many steps a round has."""

from pipetransformer.freeze import PolicyCopy
from pipetransformer.job.job import Job
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer_contract.spec import ASYNCHRONOUS


def steps_of_round(job: Job, control: Control, layout: StageLayout, policy: PolicyCopy, first_step: int) -> int:
    """The number of steps in the next round: as many as the spec allows, but only up to the next step that other work
    follows.

    Such work is an evaluation, a checkpoint, a mirror or a decision of the freeze policy. A round also ends with an
    epoch and with the job. It has a single step in these cases:

    - The schedule is synchronous.
    - The pipeline has one stage, which never waits for another.
    - A longer round had a step that was not finite. Its steps are trained again.
    - It is the first round after a regroup or a level change, because its end also ends the pause.

    Args:
        job: the job that trains.
        control: the control state.
        layout: layout of the generation.
        policy: the freeze policy, which tells after which step it decides next.
        first_step: number of committed steps when this worker's membership began (`Membership.first_step`).

    Raises:
        SpecError: the policy failed.
    """
    spec, step = job.spec, control.step
    if layout.schedule not in ASYNCHRONOUS or layout.stages == 1:
        return 1
    if step == first_step or step < control.one_a_round_until:
        return 1
    intervals = [job.order.steps_per_epoch, job.evaluation_steps]
    ends = [step + spec.pipeline.most_steps, job.total_steps]
    if spec.checkpoint is not None and spec.checkpoint.every_steps is not None:
        intervals.append(spec.checkpoint.every_steps)
    if spec.mirror is not None:
        intervals.append(spec.mirror.every_steps)
    if (decision := policy.next_decision(step)) is not None:
        ends.append(decision)
    ends += [step + interval - step % interval for interval in intervals]
    return min(ends) - step
