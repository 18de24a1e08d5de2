"""What `schedule: Auto` runs where it cannot choose, and the reason that status and record show."""

import pytest

from pipetransformer.job.load import load_job
from pipetransformer.partition import ModelCosts, assumed_costs
from pipetransformer_contract.spec import TrainerSpec

LAYERS = 8
COSTS = assumed_costs(LAYERS)
TINY = COSTS.model_copy(update={"worker_bytes": 1})


@pytest.mark.parametrize(
    ("stages", "costs", "why"),
    [
        (4, None, "Auto chooses once costs are measured"),
        (4, TINY, "no schedule that Auto knows fits the memory"),
        (1, None, "one stage leaves Auto nothing to choose"),
        (1, COSTS, "one stage leaves Auto nothing to choose"),
    ],
)
def test_without_a_choice_1f1b_runs_and_the_cut_says_why(stages: int, costs: ModelCosts | None, why: str) -> None:
    cut = load_job(make_spec("Auto")).layouts.cut(0, stages, 1, costs)
    assert (cut.schedule, cut.why_schedule) == ("OneForwardOneBackward", why)


def test_a_choice_and_a_schedule_of_the_spec_need_no_reason() -> None:
    assert load_job(make_spec("Auto")).layouts.cut(0, 4, 1, COSTS).why_schedule == ""
    assert load_job(make_spec("OneForwardOneBackward")).layouts.cut(0, 4, 1, None).why_schedule == ""


def test_checkpointed_activations_leave_nothing_to_gain_by_halves_of_backwards() -> None:
    """The executor computes both halves at once then."""
    chosen = [
        load_job(make_spec("Auto", activationCheckpointing=each)).layouts.cut(0, 4, 1, COSTS).schedule
        for each in (False, True)
    ]
    assert chosen == ["ZeroBubble", "Interleaved"]


def make_spec(schedule: str, **training: bool) -> TrainerSpec:
    return TrainerSpec.model_validate(
        {
            "model": {"name": "vit", "numLayers": LAYERS, "hiddenSize": 16, "numHeads": 2, "patchSize": 4},
            "data": {"name": "digits"},
            "training": {"steps": 4, "globalBatchSize": 16, **training},
            "freeze": {"policy": "None"},
            "pipeline": {"stages": 4, "schedule": schedule, "packing": "Measured"},
        }
    )
