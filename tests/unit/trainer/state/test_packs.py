"""Small parameters are stepped as one tensor, and nobody who knows them by name can tell."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.state.optimizer import Moments, make_optimizer
from pipetransformer.state.packed_parameters import Pack, packing_order
from pipetransformer_contract.spec import Optimizer

SHAPES: dict[str, tuple[int, ...]] = {
    "weight": (8, 4),
    "bias": (8,),
    "norm.weight": (8,),
    "norm.bias": (8,),
    "gate": (),
}
NO_DECAY = {"bias", "norm.bias"}
ADAMW: dict[str, Any] = {"name": "AdamW", "weightDecay": 0.1}
SGD: dict[str, Any] = {"name": "SGD", "momentum": 0.9, "weightDecay": 0.1}


#: A pack of nothing but scalars, as the gates of ReZero are.
GATES: dict[str, tuple[int, ...]] = {"attention.gate": (), "mlp.gate": ()}


def parameters(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}


def packs_of(named: dict[str, nn.Parameter]) -> list[Pack]:
    packs = []
    for names in packing_order(named, NO_DECAY):
        gradient = torch.zeros(
            sum(named[name].numel() for name in names), dtype=torch.float64, device=named[names[0]].device
        )
        for name, part in zip(names, torch.split(gradient, [named[name].numel() for name in names]), strict=True):
            named[name].grad = part.view_as(named[name])
        packs.append(Pack({name: named[name] for name in names}, gradient))
    return packs


def train(spec: dict[str, Any], named: dict[str, nn.Parameter], moments: Moments, *, steps: int, packed: bool) -> None:
    packs = packs_of(named) if packed else []
    optimizer = make_optimizer(Optimizer.model_validate(spec), named.items(), moments, NO_DECAY, packs)
    assert optimizer is not None
    for step in range(steps):
        for number, parameter in enumerate(named.values()):
            gradient = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) + number + step)
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad.copy_(gradient.view_as(parameter))
        optimizer.step()


def flat(moments: Moments) -> dict[str, Tensor]:
    return {f"{name}@{key}": entry for name, entries in moments.items() for key, entry in entries.items()}


def test_side_by_side_lie_those_that_decay_alike_and_the_large_alone() -> None:
    named = parameters() | {"large": nn.Parameter(torch.zeros(1 << 15))}
    assert packing_order(named, NO_DECAY) == [["large"], ["weight", "norm.weight", "gate"], ["bias", "norm.bias"]]


@pytest.mark.parametrize("spec", [ADAMW, SGD, SGD | {"momentum": 0.0}], ids=["adamw", "momentum", "sgd"])
@pytest.mark.parametrize("shapes", [SHAPES, GATES], ids=["all", "scalars"])
def test_a_packed_step_is_the_step(spec: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    ours, theirs = parameters(shapes), parameters(shapes)
    moments: dict[bool, Moments] = {True: {}, False: {}}

    for _ in range(2):  # the second time as after a freeze or a regroup: the moments are there
        train(spec, ours, moments[True], steps=3, packed=True)
        train(spec, theirs, moments[False], steps=3, packed=False)

    for name in shapes:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-13, atol=0.0)
    found, expected = flat(moments[True]), flat(moments[False])
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-13, atol=0.0) for name in expected)
    assert all(found[name].shape == expected[name].shape for name in expected)


def test_what_is_received_meanwhile_is_packed_again() -> None:
    named, moments = parameters(), dict[str, dict[str, Tensor]]()
    train(ADAMW, named, moments, steps=1, packed=True)
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    copied = {name: {key: entry.clone() for key, entry in entries.items()} for name, entries in moments.items()}

    train(ADAMW, named, moments, steps=2, packed=True)
    train(ADAMW, copies, copied, steps=2, packed=True)

    assert all(torch.equal(named[name], copies[name]) for name in SHAPES)


def test_moments_of_a_scalar_are_where_those_are_that_it_is_packed_with() -> None:
    """Meta in place of an accelerator, which not every machine has."""
    named, moments = (
        {name: nn.Parameter(one.to("meta")) for name, one in parameters().items()},
        dict[str, dict[str, Tensor]](),
    )

    make_optimizer(Optimizer.model_validate(ADAMW), named.items(), moments, NO_DECAY, packs_of(named))

    assert all(
        entry.device.type == ("cpu" if key == "step" else "meta")
        for entries in moments.values()
        for key, entry in entries.items()
    )
