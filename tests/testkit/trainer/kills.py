"""Jobs that lose workers at random, and how long each takes to its next step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.chaos import Chaos
from tests.testkit.trainer.harness import Ran, run_job
from tests.testkit.trainer.numerics import ADAMW, make_spec

STEPS = 15  # one epoch


#: What a job keeps besides its replicas in memory. Where nothing is kept, one whose last replica dies begins anew.
KEPT: list[list[str]] = [[], ["checkpoint"], ["mirror"], ["checkpoint", "mirror"]]


def spec(folder: Path, kept: Sequence[str] = ()) -> TrainerSpec:
    """One epoch; a block freezes before step 3, two more before step 8. What is kept is kept every second step."""
    keeps: dict[str, Any] = {
        "checkpoint": {"location": str(folder), "everySteps": 2},
        "mirror": {"everySteps": 2},
    }
    base = make_spec(
        ADAMW,
        freeze={"policy": "Explicit", "boundaries": [{"step": 3, "boundary": 1}, {"step": 8, "boundary": 3}]},
        **{name: keeps[name] for name in kept},
    )
    return base.model_copy(update={"training": base.training.model_copy(update={"epochs": 1})})


def seconds_to_the_next_step(run: Ran) -> list[float]:
    """From each death to the end of the first step after those that still stand from before it."""
    found = []
    for lost in run.lost_at.values():
        before = max((step["step"] for step in run.steps if step["time"] <= lost), default=-1)
        later = [step["time"] for step in run.steps if step["time"] > lost and step["step"] > before]
        found += [min(later) - lost] if later else []
    return found


def run_chaos(chaos: Chaos, seed: int, folder: Path, kept: Sequence[str]) -> Ran:
    print(f"seed {seed}, kept: {', '.join(kept) or 'nothing'}: {chaos}")
    return run_job(spec(folder / "checkpoint", kept), chaos.script, folder / "run", faults=chaos.faults)
