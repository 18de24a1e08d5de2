"""The whole local run of a job of two levels, with real workers: one leaves on the way down, and another comes before
the model grows."""

import json
from pathlib import Path

import pytest
import yaml

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.manifest import read_job
from pipetransformer_contract.api.status import ConditionType, Reason
from pipetransformer_operator.local.run import run_job
from pipetransformer_operator.plan import PlanEvent
from tests.testkit.operator.builders import make_job

pytestmark = pytest.mark.timeout(240)

DOWN, UP, STEPS = 5, 405, 415
#: A worker that announces the larger model a second ahead, which is less than a new one takes to start.
WORKER = """
from pipetransformer.__main__ import main
from pipetransformer.training import leader_reports

leader_reports.LEVEL_LEAD_SECONDS = 1.0
main()
"""


async def test_a_worker_leaves_on_the_way_down_and_another_comes_before_the_model_grows(tmp_path: Path) -> None:
    model = {"name": "vit", "numLayers": 4, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4}
    manifest = (
        make_job()
        .command("python", "-c", WORKER)
        .stages(2)
        .workers(2)
        .release()
        .set("model", model)
        .set("training", {"steps": STEPS, "globalBatchSize": 8})
        .set("evaluation", {"everySteps": STEPS})
        .set("multiLevel", {"descentSteps": DOWN, "ascentSteps": UP - DOWN})
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest.manifest()))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    events: list[PlanEvent] = []
    why_resizing: set[str | None] = set()

    def note(job: PipeTrainingJob) -> None:
        why_resizing.add(job.status.reason(ConditionType.RESIZING))

    status = await run_job(read_job(tmp_path / "job.yaml", run_dir), run_dir, on_event=events.append, on_status=note)

    assert status.is_true(ConditionType.COMPLETE), [event.message for event in events]
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    committed = [line for line in lines if line["kind"] == "GenerationCommitted"]
    layouts = [(line["stages"], line["pipelines"]) for line in committed]
    assert layouts == [(2, 1), (1, 1), (2, 1)], [event.message for event in events]
    assert DOWN <= committed[1]["firstStep"] < UP == committed[2]["firstStep"]
    assert (status.gpus.released, status.next_worker_id) == (1, 3), "one worker left, and a third one came"
    assert Reason.WAITING_FOR_LEVEL in why_resizing
    steps = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    assert [line["level"] for line in steps] == [0] * DOWN + [1] * (UP - DOWN) + [0] * (STEPS - UP)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps_redone"] == summary["samples_lost"] == summary["samples_repeated"] == 0
