"""Plasticity is measured wherever the front block lies, and decides the same whatever the layout."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.data import TensorSplit, deal
from pipetransformer.elastic.transport.groups import ensure_default_group
from pipetransformer.freeze.plasticity import distance
from pipetransformer.job.load import load_job
from pipetransformer.models import PipelineModel
from pipetransformer.pipeline import StageRunner, StageSpec
from pipetransformer.schedules import GPipe
from pipetransformer.training.similarity import similarities
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Scripted, run_job
from tests.testkit.trainer.numerics import ADAMW, STAY_ALONE, compare, make_spec

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
    job = load_job(spec_of())
    probes = [
        [sample for micro_batch in job.dealer.probe(size) for sample in micro_batch.real_ids] for size in (3, 16, 50)
    ]
    assert probes[0] == probes[1] == probes[2]
    assert len(set(probes[0])) == 16


class Shifting(nn.Linear):
    """Changes its input in place; or a copy, as a worker that was sent it does."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__(8, 8)
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.clone() if self.copies else x).add_(1.0).relu_())


@pytest.mark.parametrize("copies", [False, True], ids=["in place", "of a copy"])
def test_the_front_block_is_looked_at_as_it_is_whatever_the_next_one_does_with_its_output(copies: bool) -> None:
    inputs, labels = torch.randn(4, 3, 8), torch.zeros(4, dtype=torch.long)
    head = nn.Sequential(nn.Flatten(), nn.Linear(24, 2))
    model = PipelineModel(nn.Linear(8, 8), [nn.Linear(8, 8), Shifting(copies=copies)], head, (3, 8))
    ensure_default_group()
    assert dist.group.WORLD is not None
    spec = StageSpec(0, [range(4)], (0,), 0, GPipe(), dist.group.WORLD, torch.device("cpu"), torch.float32)
    runner, front = StageRunner(spec, model, model.units), model.units[1]

    [micro_batches] = deal([[0, 1, 2, 3]], 1, 4)
    found = similarities(runner, front, micro_batches, TensorSplit(inputs, labels), tells=True)

    features = front(model.units[0](inputs)).flatten(1).double()
    expected = nn.functional.normalize(features @ features.T, dim=1)
    assert found == pytest.approx(expected.flatten().tolist(), rel=1e-5)


def test_the_distance_of_similarities_is_the_similarity_preserving_loss() -> None:
    ours, reference = torch.rand(5, 7, dtype=torch.float64), torch.rand(5, 7, dtype=torch.float64)
    by_hand = 0.0
    for row in range(5):
        a = torch.stack([ours[row] @ ours[other] for other in range(5)])
        b = torch.stack([reference[row] @ reference[other] for other in range(5)])
        by_hand += float((a / a.norm() - b / b.norm()).square().sum()) / 25
    flat = [torch.nn.functional.normalize(x @ x.T, dim=1).flatten().tolist() for x in (ours, reference)]
    assert distance(*flat) == pytest.approx(by_hand)
