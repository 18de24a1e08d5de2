"""With which step `releaseDownTo: StartingStep` compares."""

from pipetransformer.job.load import load_job
from pipetransformer.partition import assumed_costs
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.spec import TrainerSpec

LAYERS = 8
SPEC = TrainerSpec.model_validate(
    {
        "model": {"name": "vit", "numLayers": LAYERS, "hiddenSize": 16, "numHeads": 2, "patchSize": 4},
        "data": {"name": "digits"},
        "training": {"steps": 4, "globalBatchSize": 16},
        "freeze": {"policy": "None"},
        "pipeline": {"stages": 4, "packing": "Measured"},
        "numShards": 2,
        "workers": 8,
    }
)


def test_a_job_that_began_smaller_is_compared_with_its_slower_start() -> None:
    job, costs = load_job(SPEC), assumed_costs(LAYERS)
    asked = job.layouts.starting_step_seconds(costs, None)
    began = job.layouts.starting_step_seconds(costs, Layout(4, 1))
    assert asked is not None and began is not None
    assert asked == job.layouts.starting_step_seconds(costs, Layout(4, 2))
    assert began > 1.5 * asked


def test_a_start_that_fits_only_with_frozen_layers_is_compared_with_the_layout_of_the_spec() -> None:
    job, costs = load_job(SPEC), assumed_costs(LAYERS)
    model = job.layouts.choice_model(costs)
    fits_four_stages = model.bytes_per_worker(0, model.cut(0, 4, 2), 2)
    small = costs.model_copy(update={"worker_bytes": fits_four_stages})
    asked = job.layouts.starting_step_seconds(small, None)
    assert asked is not None
    assert job.layouts.starting_step_seconds(small, Layout(1, 2)) == asked
    tiny = costs.model_copy(update={"worker_bytes": 1})
    assert job.layouts.starting_step_seconds(tiny, Layout(1, 2)) is None
