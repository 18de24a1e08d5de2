"""The measurement of one GPU runs on a CPU in small, and what it writes virtual devices read."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.virtual.calibration import profile
from benchmarks.worth.gpu import shared
from benchmarks.worth.gpu.models import SHAPES, TINY, samples_of, whole
from benchmarks.worth.gpu.timing import line_through
from benchmarks.worth.gpu.units import fitted
from tests.testkit import ROOT


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-m", "benchmarks.worth.gpu", "--tiny", "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "calibration.json"


@pytest.fixture(scope="module")
def calibration(written: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(written.read_text())
    return content


def test_it_writes_all_that_it_measures(calibration: dict[str, Any]) -> None:
    assert {"units", "cache", "shared", "pause", "step", "machine", "seconds"} <= calibration.keys()
    assert {row["processes"] for row in calibration["shared"]["rows"]} == {1, 2}
    assert calibration["shared"]["rows"][0]["slowdown"] == 1.0
    assert all(row["wall"] > 0 and row["launch"] > 0 for row in calibration["step"]["whole"])
    assert [row["trained_layers"] for row in calibration["step"]["minilm"]["rows"]] == [2, 1, 0]
    assert all(min(row["pinned"], row["pageable"], row["file"]) > 0 for row in calibration["cache"])
    assert calibration["pause"]["context"] > 0


def test_a_virtual_device_reads_each_model_in_each_precision(written: Path) -> None:
    for name in TINY:
        for precision in ("tf32", "bf16"):
            read = profile(f"{name}-{precision}", written)
            assert read.layer.forward(4) > 0
            assert read.layer.weight_gradient > 0
            assert read.embedding.input_gradient == 0  # samples want no gradient


def test_a_line_is_fitted_with_neither_part_below_zero() -> None:
    assert line_through([1, 2, 4], [3.0, 5.0, 9.0]) == pytest.approx((1.0, 2.0))
    assert line_through([1, 2], [1.0, 4.0]) == pytest.approx((0.0, 9 / 5))
    assert line_through([1, 2], [4.0, 2.0]) == pytest.approx((3.0, 0.0))
    with pytest.raises(ValueError, match="at least one point"):
        line_through([], [])


def test_gradients_are_declared_as_multiples_of_the_forward() -> None:
    rows = [
        {
            "samples": count,
            "forward": 1.0 + count,
            "weight_gradient": 2.0 + 2 * count,
            "input_gradient": 0.5 + count / 2,
        }
        for count in (1, 2, 4)
    ]
    assert fitted(rows) == pytest.approx(
        {"fixed": 1.0, "per_sample": 1.0, "weight_gradient": 2.0, "input_gradient": 0.5}
    )


@pytest.mark.parametrize("name", TINY)
def test_a_model_maps_samples_to_classes(name: str) -> None:
    shape = TINY[name]
    made = samples_of(shape, 3, torch.device("cpu"))
    for unit in whole(shape, torch.device("cpu")):
        made = unit(made)
    assert made.shape == ((3, shape.tokens, shape.classes) if shape.causal else (3, shape.classes))


@pytest.mark.parametrize(("name", "millions"), [("vit-base", 86.6), ("bert-large", 334), ("decoder-1.3b", 1417)])
def test_a_model_has_the_size_of_the_one_that_it_is_named_after(name: str, millions: float) -> None:
    shape = SHAPES[name]
    units = whole(shape, torch.device("meta"))
    count = sum(parameter.numel() for unit in units for parameter in unit.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.02)


def test_processes_that_share_a_gpu_are_compared_with_one_alone_or_not_at_all() -> None:
    one, two = shared.compared({1: [8.0], 2: [5.0, 5.0]})
    assert (one["slowdown"], two["slowdown"], two["sum_over_one"]) == (1.0, 1.6, 1.25)
    failed, two = shared.compared({1: None, 2: [5.0, 5.0]})
    assert "failed" in failed and two == {"processes": 2, "each": 5.0}
