"""Every example is a job that the operator admits and whose model fits its data."""

from pathlib import Path

import pytest
import yaml

from pipetransformer.job.load import load_job
from pipetransformer_contract.api.job import trainer_spec
from pipetransformer_contract.api.manifest import read_job
from tests.testkit import ROOT

_FILES = sorted((ROOT / "examples").rglob("*.yaml"))
EXAMPLES = [
    file
    for file in _FILES
    if [document["kind"] for document in yaml.safe_load_all(file.read_text())] == ["PipeTrainingJob"]
]


@pytest.mark.parametrize("file", EXAMPLES, ids=[file.stem for file in EXAMPLES])
def test_an_example_can_be_trained(file: Path, tmp_path: Path) -> None:
    manifest = read_job(file, tmp_path)
    job = load_job(trainer_spec(manifest.spec, num_shards=4))
    assert job.num_layers == manifest.spec.model.num_layers
    assert len(job.dataset.train) > len(job.dataset.test) > 50


@pytest.mark.parametrize("file", EXAMPLES, ids=[file.stem for file in EXAMPLES])
def test_an_example_names_its_freeze_policy_and_freezes_nothing_at_first(file: Path) -> None:
    freeze = yaml.safe_load(file.read_text())["spec"]["freeze"]
    assert freeze["policy"] == "PaperSchedule"
    assert freeze.get("startAfterEpochs", 0) + freeze.get("startAfterSteps", 0) > 0
