"""Thirty jobs of eight workers on fake nodes behind a real scheduler: the small form of `make bench-scale`."""

from pathlib import Path

import pytest

from tests.testkit.operator.scale.run import STAGES, run_scale

JOBS = 30


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_thirty_jobs_run_freeze_and_release_within_the_budget_of_requests(tmp_path: Path) -> None:
    figures = await run_scale(JOBS, tmp_path / "operator.log", print)

    assert figures.workers == JOBS * STAGES  # `run_scale` returns only once all of them trained and were through
    assert figures.lists == 0, "somebody listed pods or jobs while jobs changed their layouts"
    start, freeze = figures.calls_per_job, figures.calls_per_freeze
    assert start["create pods"] == start["create tokenreviews"] == STAGES
    assert start["update pipetrainingjobs/status"] <= 6
    assert start["create events"] <= 3
    assert freeze.get("create pods", 0) == 0
    assert freeze["delete pods"] == STAGES / 4, "half of the jobs release half of their workers"
    assert freeze["update pipetrainingjobs/status"] <= 4 + STAGES / 4
    assert not [call for call in (*start, *freeze) if call.startswith(("get", "list"))]
