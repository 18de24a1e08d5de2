"""What the leader tells the operator of its layout."""

from pathlib import Path

import pytest

from pipetransformer.callbacks import Teller
from pipetransformer.job import Job
from pipetransformer.layout import StageLayout
from pipetransformer.leader import Leader
from pipetransformer.state import Control
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from tests.trainer_harness import Reports
from tests.unit.trainer.test_engine_numerics import ADAMW, make_spec


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (ResizeReason.START, 1.0),
        (ResizeReason.PACK, 3600.0),
        (ResizeReason.CLAIM, 3600.0),
        (ResizeReason.FAILURE, 0.75),
        (ResizeReason.DRAIN, 0.75),
        (ResizeReason.UNDO, 0.75),
    ],
)
def test_offers_say_what_a_planned_change_costs(reason: ResizeReason, expected: float, tmp_path: Path) -> None:
    job, reports = Job.load(make_spec(ADAMW)), Reports()
    member = Member(name="w0", uid="w0", address="127.0.0.1:1")
    generation = Generation(
        job_uid="job", layout_generation=1, stages=1, pipelines=1, members=[member], leader="w0", nonce="n",
        reason=reason,
    )  # fmt: skip
    layout = StageLayout(generation, 0, [(0, 0)], [range(job.num_layers + 2)], job.micro_batch_size)
    leader = Leader(job, reports, Teller([]), tmp_path, layout)
    control = Control(step=5)

    phases = {"groups": 0.5, "assemble": 60.0, "first step": 0.25}  # state that nobody had was read from storage
    leader.first_step(control, pause_seconds=3600.0, phases=phases, transfers=[])
    leader.frozen(control)

    assert {offer.pause_seconds for offer in reports.sent[-1].offers} == {expected}
