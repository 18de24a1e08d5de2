"""What a plan expects of the cache and of layers that leave the accelerator."""

from pathlib import Path

import pytest

from pipetransformer.library.forecast import Forecast
from pipetransformer.partition import assumed_costs
from tests.testkit.trainer.levels import level_spec


@pytest.mark.parametrize(("family", "leaves"), [("gpt2-untied", True), ("gpt2-tied", False)])
def test_nothing_leaves_above_an_embedding_that_trains_with_the_head(family: str, leaves: bool, tmp_path: Path) -> None:
    """Such an embedding changes at every step, so the cache keeps nothing."""
    freeze = {"policy": "Explicit", "boundaries": [{"step": 2, "boundary": 3}]}
    spec = level_spec(family, tmp_path, training={"steps": 400}, freeze=freeze, multiLevel=None)
    costs = assumed_costs(4).model_copy(update={"host_apart": True})

    forecast = Forecast.of(spec, costs)

    caught_up = 2 + forecast.job.order.steps_per_epoch
    kept = [(0, 0, 0), (2, 3, 0)]
    assert forecast.layout_changes() == ([*kept, (caught_up, 3, 3)] if leaves else kept)
    assert bool(forecast.job.layouts.step_model(costs).cache_bytes) is leaves
