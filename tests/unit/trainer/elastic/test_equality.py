"""Random scenarios of layouts, freezes, unfreezes and deaths compute what one worker that stays alone does."""

from pathlib import Path

import pytest

from tests.testkit.trainer.equality import (
    BAR_FLOAT32,
    BAR_FLOAT64,
    BOUNDARIES_FLOAT32,
    SCHEDULES,
    compare,
    draw,
    worst_gradient,
)

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 50))])
def test_a_random_scenario_computes_what_one_worker_does(seed: int, tmp_path: Path) -> None:
    scenario = draw(seed)
    print(scenario)
    few = [SCHEDULES[(seed + other) % len(SCHEDULES)] for other in (0, 2)]  # each schedule has four of ten scenarios

    for schedule, worst in compare(scenario, tmp_path, schedules=few if seed < 10 else SCHEDULES).worst().items():
        assert worst <= BAR_FLOAT64, schedule


@pytest.mark.parametrize(("seed", "boundary"), list(enumerate(BOUNDARIES_FLOAT32)))
def test_each_layers_float32_gradient_is_the_same_in_every_layout(seed: int, boundary: int, tmp_path: Path) -> None:
    assert worst_gradient(seed, boundary, tmp_path) <= BAR_FLOAT32
