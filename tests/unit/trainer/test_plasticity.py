"""Plasticity is measured wherever the front block lies, and decides the same whatever the layout."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pipetransformer.freeze.plasticity import distance
from pipetransformer.job import Job
from pipetransformer_contract.spec import TrainerSpec
from tests.trainer_harness import Scripted, run_job
from tests.unit.trainer.test_engine_numerics import ADAMW, STAY_ALONE, compare, make_spec

pytestmark = pytest.mark.timeout(180)

REGROUPED = [
    Scripted(3, 1, [0, 1, 2]),
    Scripted(1, 2, [0, 1], at_step=8, leavers=[2]),
    Scripted(2, 1, [1, 0], at_step=19),
]


def spec_of() -> TrainerSpec:
    freeze = {"policy": "Plasticity", "intervalSteps": 1, "windowDecisions": 2, "tolerance": 0.5, "learningRateDrop": 3}
    return make_spec(ADAMW, freeze=freeze, cache={"policy": "Always"})  # probes and training share its entries


def test_decisions_by_plasticity_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    stayed = run_job(spec_of(), STAY_ALONE, tmp_path / "stay")

    run = run_job(spec_of(), REGROUPED, tmp_path / "run")

    compare(run, stayed)
    boundaries = [step["frozenLayers"] for step in run.steps]
    assert max(boundaries[19:]) >= 4, "the front was never on the second stage of the last layout"
    assert any(after < before for before, after in pairwise(boundaries)), "none unfroze"


def test_the_probe_is_the_same_whatever_the_micro_batch() -> None:
    job = Job.load(spec_of())
    probes = [
        [sample for micro_batch in job.probe_micro_batches(size) for sample in micro_batch.real_ids]
        for size in (3, 16, 50)
    ]
    assert probes[0] == probes[1] == probes[2]
    assert len(set(probes[0])) == 16


def test_the_distance_of_similarities_is_the_similarity_preserving_loss() -> None:
    ours, reference = torch.rand(5, 7, dtype=torch.float64), torch.rand(5, 7, dtype=torch.float64)
    by_hand = 0.0
    for row in range(5):
        a = torch.stack([ours[row] @ ours[other] for other in range(5)])
        b = torch.stack([reference[row] @ reference[other] for other in range(5)])
        by_hand += float((a / a.norm() - b / b.norm()).square().sum()) / 25
    flat = [torch.nn.functional.normalize(x @ x.T, dim=1).flatten().tolist() for x in (ours, reference)]
    assert distance(*flat) == pytest.approx(by_hand)
