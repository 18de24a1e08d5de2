"""A local run of real workers that chooses its schedules: what the e2e row shows on kubelets."""

import json
from pathlib import Path

import pytest
import yaml

from pipetransformer_contract.api.manifest import read_job
from pipetransformer_contract.api.status import ConditionType, Reason
from pipetransformer_operator.local.run import run_job
from pipetransformer_operator.plan import PlanEvent
from tests.testkit.cluster import auto_job
from tests.testkit.operator.builders import make_job

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


async def test_a_job_names_the_schedule_of_each_layout_as_it_goes_from_four_workers_to_one(tmp_path: Path) -> None:
    events: list[PlanEvent] = []
    file, run_dir = tmp_path / "job.yaml", tmp_path / "run"
    manifest = auto_job.with_auto(make_job().release().manifest(), "tests.testkit.user_code.timed_model")
    file.write_text(yaml.safe_dump(manifest))

    status = await run_job(read_job(file, run_dir), run_dir, on_event=events.append)

    assert status.is_true(ConditionType.COMPLETE), [event.message for event in events]
    generations = json.loads((run_dir / "summary.json").read_text())["generations"]
    assert auto_job.layouts(generations) == [(4, 1), (2, 1), (1, 1)]
    messages = [event.message for event in events if event.reason is Reason.GENERATION_CONFIRMED]
    assert auto_job.untold(generations, messages) == []
    assert status.last_report is not None
    assert (status.last_report.schedule, status.last_report.why_schedule) == (
        "OneForwardOneBackward",
        "one stage leaves Auto nothing to choose",
    )
    assert status.gpus.released == 3
