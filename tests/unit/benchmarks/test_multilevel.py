"""The operations of `make bench-multilevel` are those that torch counts, and its verdicts those of its curves."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.multilevel import (
    BIG,
    CYCLE,
    LARGE,
    LENGTH,
    LITTLE,
    SMALL,
    Curve,
    Curves,
    Plan,
    Size,
    Whole,
    compared,
    draw,
    spec_of,
)
from pipetransformer.job.load import load_job
from pipetransformer.models import MicroBatchContext, set_micro_batch


@pytest.mark.parametrize("size", [BIG, LITTLE])
def test_operations_by_formula_are_those_that_torch_counts(size: Size, tmp_path: Path) -> None:
    """torch does not count attention on a CPU, so that part is left out."""
    job = load_job(spec_of(size, 4, 1e-3, 0, Plan(4, 1, 1), tmp_path, levels=False))
    units = job.build_units(range(size.layers + 2))
    x, target = job.dataset.train.batch([0, 1])
    set_micro_batch(MicroBatchContext(0, range(2), None))

    with FlopCounterMode(display=False) as counter:
        for index in range(size.layers + 2):
            x = units[index](x)
        loss, _ = job.model.loss(x, target, torch.ones(2))
        loss.backward()  # type: ignore[no-untyped-call]

    attention = 3 * size.layers * 4 * LENGTH * size.width
    assert counter.get_total_flops() == 2 * LENGTH * (size.token_flops - attention)


def test_the_budget_of_the_cycle_is_three_quarters_of_the_large_models() -> None:
    plan = Plan(2500, descent=150, ascent=1500)
    cycle = (plan.cycle - plan.ascent) * BIG.step_flops + plan.ascent * LITTLE.step_flops

    assert 0.99 * plan.flops < cycle <= plan.flops
    assert 0.99 * plan.flops < plan.small * LITTLE.step_flops <= plan.flops


def test_a_loss_that_is_never_reached_saves_nothing() -> None:
    plan, whole = Plan(10, 1, 5), 10 * float(BIG.step_flops)
    curves = {
        LARGE: [Curve([whole], [1.0]), Curve([whole], [1.0])],
        SMALL: [Curve([1.0], [1.5]), Curve([1.0], [1.5])],
        CYCLE: [Curve([0.5 * whole, 0.75 * whole], [1.0, 0.9]), Curve([0.5 * whole, 0.75 * whole], [1.3, 1.1])],
    }

    found = compared(curves, plan)

    assert found["flops_savings"] == [0.5, 0.0]
    assert found["loss_difference_mean"] == pytest.approx(0.0)
    assert found["beats_small_alone"]


def test_the_picture_has_the_curves_of_all_runs(tmp_path: Path) -> None:
    curves = {name: [Curve([1e12, 2e12], [2.0, 1.0])] * 2 for name in (LARGE, SMALL, CYCLE)}

    draw(curves, tmp_path / "curves.svg")

    assert (tmp_path / "curves.svg").read_text().count('<g id="line2d_') >= 6


def test_a_run_that_is_kept_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def train(run: Whole) -> Curve:
        trained.append(run.seed)
        return Curve([1.0], [float(run.seed)])

    monkeypatch.setattr(Whole, "curve", train)
    first, second = (Whole(LITTLE, 4, 1e-3, seed, Plan(4, 1, 1)) for seed in (1, 2))
    keep = tmp_path / "runs.jsonl"

    Curves(keep, 1).of([first])
    found = Curves(keep, 2).of([first, second, replace(first, levels=True)])

    assert [curve.final for curve in found] == [1.0, 2.0, 1.0]
    assert sorted(trained) == [1, 1, 2]
