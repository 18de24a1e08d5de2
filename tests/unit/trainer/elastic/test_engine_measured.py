"""Packing by measurements: what was measured is known alike, cuts follow it, and the numbers stay those of the paper's
packing."""

from pathlib import Path

import pytest

from pipetransformer.job.load import load_job
from pipetransformer.partition import assumed_costs
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Ran, run_job
from tests.testkit.trainer.ledger_checker import check
from tests.testkit.trainer.numerics import (
    ADAMW,
    EPOCHS,
    STAY_ALONE,
    TRAINING_SAMPLES,
    WIDEN,
    compare,
    layouts,
    make_spec,
)

pytestmark = pytest.mark.timeout(180)

PIPELINE = {"stages": 4, "packing": "Measured"}


@pytest.fixture(scope="module")
def spec() -> TrainerSpec:
    return make_spec(ADAMW, pipeline=PIPELINE)


@pytest.fixture(scope="module")
def run(spec: TrainerSpec, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_job(spec, WIDEN, tmp_path_factory.mktemp("measured"))


def test_a_run_cut_by_measurements_computes_what_one_that_stays_does(run: Ran, tmp_path: Path) -> None:
    compare(run, run_job(make_spec(ADAMW), STAY_ALONE, tmp_path))
    assert layouts(run) == [(4, 1), (2, 2), (1, 4)]
    assert check(run.run_dir, TRAINING_SAMPLES, EPOCHS).clean


def test_every_length_and_width_is_offered_as_soon_as_it_is_measured(run: Ran) -> None:
    unmeasured = [report for report in run.reports if report.step < 5]
    assert unmeasured
    assert not any(offer.step_seconds for report in unmeasured for offer in report.offers)
    for report in run.reports:
        assert [offer.stages for offer in report.offers] == [4, 3, 2, 1]
        if report.step_seconds is not None:
            assert all([time.pipelines for time in offer.step_seconds] == [1, 2, 3, 4] for offer in report.offers)
            assert all(offer.bytes_per_worker > 0 for offer in report.offers)
    assert {report.layout_generation for report in run.reports if report.step_seconds} == {1, 2, 3}
    assert {report.total_steps for report in run.reports} == {30}


def test_a_cut_in_a_pause_reads_no_samples(spec: TrainerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job(spec)
    assert not job.dataset.inputs_change, "as its cache asks before the first step"

    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(type(job.dataset.train), "batch", fail)
    job.layouts.cut(0, 2, 2, assumed_costs(job.num_layers))


def test_the_present_layout_cut_by_the_same_measurements_promises_no_gain(run: Ran) -> None:
    """So a job does not regroup for nothing."""
    for generation, stages, pipelines in [(2, 2, 2), (3, 1, 4)]:
        report = next(r for r in run.reports if r.layout_generation == generation and r.step_seconds)
        offer = next(offer for offer in report.offers if offer.stages == stages)
        promised = next(time.seconds for time in offer.step_seconds if time.pipelines == pipelines)
        assert promised == pytest.approx(report.step_seconds)
