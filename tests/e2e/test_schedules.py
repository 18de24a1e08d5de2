"""`schedule: Auto` end to end: each layout runs a schedule that measured costs have chosen, and says which."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.testkit import ROOT
from tests.testkit.cluster import auto_job
from tests.testkit.cluster.cluster import Cluster
from tests.testkit.cluster.kube import Kube, has_condition
from tests.testkit.cluster.manifests import STORAGE, digits_job
from tests.testkit.trainer.ledger_checker import check

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.usefixtures("operator")]

JOB = "auto"
MODULE = "timed_model"


@pytest.mark.slow
def test_a_job_names_the_schedule_of_each_layout_as_it_goes_from_four_workers_to_one(
    kube: Kube, cluster: Cluster, shared: Path
) -> None:
    shutil.copy(ROOT / "tests/testkit/user_code" / f"{MODULE}.py", shared)
    job = digits_job(JOB, image=cluster.images["trainer"], shared=str(shared), on_pack="Release", epochs=1)
    (container,) = job["spec"]["podTemplate"]["spec"]["containers"]
    container["env"] = [{"name": "PYTHONPATH", "value": STORAGE}]
    kube.apply(auto_job.with_auto(job, MODULE))

    ended = kube.wait(
        "pipetrainingjob", JOB, has_condition("Complete"), "Complete", seconds=600, never=has_condition("Failed")
    )

    summary = json.loads((shared / "output" / JOB / "summary.json").read_text())
    generations = summary["generations"]
    assert auto_job.layouts(generations) == [(4, 1), (2, 1), (1, 1)]
    messages = [event["message"] for event in kube.list("events") if event["reason"] == "GenerationConfirmed"]
    assert auto_job.untold(generations, messages) == []
    last = generations[-1]
    report = ended["status"]["lastReport"]
    assert (report["schedule"], report["whySchedule"]) == (last["schedule"], last["why_schedule"])
    described = kube.run("describe", "pipetrainingjob", JOB)
    assert re.search(rf"Why Schedule: +{last['why_schedule']}\n", described), described
    events = [line[line.find("Generation ") :] for line in described.splitlines()]
    assert auto_job.untold(generations, events) == [], described
    assert ended["status"]["gpus"]["released"] == 3
    findings = check(shared / "output" / JOB, auto_job.SAMPLES, auto_job.EPOCHS)
    assert findings.clean, findings
