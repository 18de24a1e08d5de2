"""How many steps a round has."""

from pipetransformer.freeze import PolicyCopy
from pipetransformer.job.job import Job
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer_contract.spec import ASYNCHRONOUS


def steps_of_round(job: Job, control: Control, layout: StageLayout, policy: PolicyCopy, first_step: int) -> int:
    """Steps of the next round: as many as the spec wants, up to the next step after which something is due.

    A round has one step under a synchronous schedule, on a lone stage, which never waits for others, where a longer
    round was not finite, and at the begin of a generation, which ends the pause.

    Args:
        job: that trains.
        control: the control state.
        layout: of the generation.
        policy: may decide after some step.
        first_step: steps that were committed before the generation.

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
