"""The operators equal the paper's matrices, which are built here with numpy by Kronecker products."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipetransformer.job.job import Job
from pipetransformer.job.levels import level_map
from pipetransformer_contract.spec import Grouping
from tests.testkit.trainer.levels import CASES, HEADS, KEY_HEADS, level_job, random_state

Matrix = np.ndarray[Any, np.dtype[np.floating[Any]]]


def group_matrix(small: int, factor: int, grouping: str, heads: int, parts: int) -> Matrix:
    """F (small x large): rows sum to 1. `heads` are those of the small level."""
    row = np.full((1, factor), 1 / factor)
    one = small // parts
    if grouping == Grouping.HALVES:
        return np.kron(np.eye(parts), np.kron(row, np.eye(one)))
    return np.kron(np.eye(parts * heads), np.kron(row, np.eye(one // heads)))


def copies(groups: Matrix) -> Matrix:
    """T: the rows of F' normalised to 1."""
    return groups.T / groups.T.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]


def outputs_and_inputs(module: nn.Module, dims: int) -> str:
    """Of each axis of a weight whether it is an output or an input, by the kind of its module."""
    if isinstance(module, nn.Linear):
        return "oi"[:dims]
    if isinstance(module, Conv1D):
        return "io" if dims == 2 else "o"
    return "-" * (dims - 1) + "o" if not isinstance(module, nn.Conv2d) else "o---"[:dims]


def dense(family: str, job: Job, unit: int, name: str, small: tuple[int, ...], grouping: str) -> list[Matrix | None]:
    """For each axis of a parameter the matrix that makes it as long as in the small level; None for an equal axis."""
    shell = job.shells[unit]
    module, shape = shell.get_submodule(name.rpartition(".")[0]), shell.state_dict()[name].shape
    tied = any((unit, name) in tie.places for tie in job.model.ties.all)
    parts = 3 if "qkv" in name or "c_attn" in name else 1
    heads = KEY_HEADS if family.startswith("llama") and ("k_proj" in name or "v_proj" in name) else HEADS
    matrices: list[Matrix | None] = []
    for kind, length, wanted in zip(outputs_and_inputs(module, len(shape)), shape, small, strict=True):
        if length == wanted:
            matrices.append(None)
            continue
        factor, reads = length // wanted, kind == "i" and not tied
        groups = group_matrix(wanted, factor, grouping, (HEADS if kind == "i" else heads) // factor,
                              parts if kind == "o" else 1)  # fmt: skip
        matrices.append(copies(groups).T if reads else groups)
    return matrices


def applied(matrices: list[Matrix | None], value: Matrix) -> Matrix:
    for dim, matrix in enumerate(matrices):
        if matrix is not None:
            value = np.moveaxis(np.tensordot(matrix, value, axes=(1, dim)), 0, dim)
    return value


def backwards(matrix: Matrix | None) -> Matrix | None:
    """Of F the T that widens again, and the other way round."""
    if matrix is None:
        return None
    return copies(matrix) if np.allclose(matrix.sum(axis=1), 1) else matrix.T / matrix.T.sum(axis=0, keepdims=True)


def gain(family: str, job: Job, unit: int, name: str) -> float:
    """The final norm of a model whose output and embedding share a table."""
    final = unit == job.num_layers + 1 and "norm" in name.lower()
    return 2.0 if final and job.model.ties.all else 1.0


def mean_of(job: Job, small: Job, unit: int, name: str, state: dict[str, Tensor], grouping: str) -> Matrix:
    """The mean of the layers that become one."""
    if unit in (0, small.num_layers + 1):
        return state[f"{'embedding' if unit == 0 else 'head'}.{name}"].numpy()
    half = job.num_layers // 2
    pair = (unit - 1, unit - 1 + half) if grouping == Grouping.HALVES else (2 * unit - 2, 2 * unit - 1)
    first, second = (state[f"blocks.{layer}.{name}"].numpy() for layer in pair)
    return (first + second) / 2  # type: ignore[no-any-return]


@pytest.mark.parametrize("grouping", list(Grouping))
@pytest.mark.parametrize("family", CASES)
def test_every_parameter_is_what_dense_matrices_make_of_it(family: str, grouping: Grouping, tmp_path: Path) -> None:
    job = level_job(family, tmp_path, levels={"grouping": grouping.value, "alpha": 1.0})
    small = job.at(1)
    down, up = level_map(job, 0, None), level_map(job, 1, None)
    large_state, small_state = random_state(job), random_state(small, seed=1)

    compared = 0
    for unit, shell in enumerate(small.shells):
        made = down.make(unit, large_state)
        source = down.sources(unit)[0]
        for name, parameter in shell.named_parameters():
            matrices = dense(family, job, source, name, tuple(parameter.shape), grouping)
            wanted = applied(matrices, mean_of(job, small, unit, name, large_state, grouping))
            wanted = wanted * gain(family, job, source, name)
            full = f"{small.model.unit_name(unit)}.{name}"
            np.testing.assert_allclose(made[full].numpy(), wanted, rtol=1e-12, atol=1e-14, err_msg=full)
            compared += 1
    for unit, shell in enumerate(job.shells):
        made, (source,) = up.make(unit, small_state), up.sources(unit)
        assert unit in down.sources(source), "copies go where the means came from"
        for name, parameter in shell.named_parameters():
            before = small_state[f"{small.model.unit_name(source)}.{name}"]
            matrices = dense(family, job, unit, name, tuple(before.shape), grouping)
            wanted = applied([backwards(matrix) for matrix in matrices], before.numpy())
            wanted = wanted / gain(family, job, unit, name)
            assert made[f"{job.model.unit_name(unit)}.{name}"].shape == parameter.shape
            np.testing.assert_allclose(made[f"{job.model.unit_name(unit)}.{name}"].numpy(), wanted, rtol=1e-12,
                                       atol=1e-14, err_msg=name)  # fmt: skip
            compared += 1
    assert compared > 40


@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("grouping", list(Grouping))
def test_up_and_down_again_changes_nothing(grouping: Grouping, factor: int, tmp_path: Path) -> None:
    """F T = 1, in the depth as well."""
    levels = {"grouping": grouping.value, "alpha": 1.0, "widthFactor": factor, "depthFactor": factor}
    job = level_job("gpt2-tied", tmp_path, levels=levels)
    small = job.at(1)
    down, up = level_map(job, 0, None), level_map(job, 1, None)
    state = random_state(small)

    large = {name: tensor for unit in range(job.num_layers + 2) for name, tensor in up.make(unit, state).items()}
    again = {name: tensor for unit in range(small.num_layers + 2) for name, tensor in down.make(unit, large).items()}

    assert again.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-15, atol=1e-16, msg=name)


def test_a_width_that_is_no_multiple_of_the_heads_is_merged_channel_by_channel(tmp_path: Path) -> None:
    """As the MLP of Llama 13B, of 13,824 channels beside 40 heads."""
    model, levels = CASES["own-vit"][0], {"grouping": "Adjacent", "alpha": 1.0}
    job = level_job("own-vit", tmp_path, levels=levels, model={**model, "numLayers": 4, "mlpSize": 60})
    down, up, state = level_map(job, 0, None), level_map(job, 1, None), random_state(job)

    made = down.make(1, state)
    again = down.make(1, {name: tensor for unit in (1, 2) for name, tensor in up.make(unit, made).items()})

    merged = (state["blocks.0.mlp.0.bias"] + state["blocks.1.mlp.0.bias"]) / 2
    torch.testing.assert_close(made["blocks.0.mlp.0.bias"], merged.view(30, 2).mean(1))
    for name, tensor in made.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-15, atol=1e-16, msg=name)
