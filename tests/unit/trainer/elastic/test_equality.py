"""Random scenarios of layouts, freezes, unfreezes and deaths compute what one worker that stays alone does."""

from pathlib import Path

import pytest

from tests.testkit.trainer.equality import (
    BAR_FLOAT32,
    BAR_FLOAT64,
    BOUNDARIES_FLOAT32,
    ROWS,
    compare,
    draw,
    worst_gradient,
)

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 50))])
def test_a_random_scenario_computes_what_one_worker_does(seed: int, tmp_path: Path) -> None:
    scenario = draw(seed)
    print(scenario)
    few = [ROWS[(seed + other) % len(ROWS)] for other in (0, 3)]  # each schedule has two of ten scenarios

    for schedule, worst in compare(scenario, tmp_path, rows=few if seed < 10 else ROWS).worst().items():
        assert worst <= BAR_FLOAT64, schedule


@pytest.mark.parametrize(("seed", "boundary"), list(enumerate(BOUNDARIES_FLOAT32)))
def test_each_layers_float32_gradient_is_the_same_in_every_layout(seed: int, boundary: int, tmp_path: Path) -> None:
    assert worst_gradient(seed, boundary, tmp_path) <= BAR_FLOAT32
