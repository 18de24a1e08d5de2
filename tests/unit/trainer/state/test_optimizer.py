"""Which parameters decay."""

from typing import Any

import pytest
import torch
from torch import nn

from pipetransformer.errors import SpecError
from pipetransformer.models import PipelineModel
from pipetransformer.state.optimizer import learning_rate, make_optimizer, names_without_decay
from pipetransformer_contract.spec import LearningRateSchedule, Optimizer
from tests.testkit.user_code.tied_model import make_data, make_model


def model() -> PipelineModel:
    return make_model(make_data("", torch.float64).info, num_layers=2)


def test_patterns_are_of_whole_model_names() -> None:
    found = names_without_decay(["*.bias", "blocks.?.norm.*", "embedding.positions"], model())
    blocks = {f"blocks.{block}.{name}" for block in (0, 1) for name in ("norm.weight", "norm.bias", "mix.bias")}
    assert found == blocks | {"embedding.positions", "head.norm.bias", "head.output.bias"}


def test_a_tied_parameter_decays_under_none_of_its_names() -> None:
    assert names_without_decay(["head.output.weight"], model()) == {"head.output.weight", "embedding.tokens.weight"}


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match=r"noDecay: '\*\.biases' matches no parameter"):
        names_without_decay(["*.bias", "*.biases"], model())


@pytest.mark.parametrize("spec", [{"name": "AdamW"}, {"name": "SGD"}], ids=["adamw", "sgd"])
@pytest.mark.parametrize("no_decay", [(), ("a",), ("a", "b")])
def test_only_the_others_decay(spec: dict[str, Any], no_decay: tuple[str, ...]) -> None:
    named = {name: nn.Parameter(torch.ones(2)) for name in "ab"}
    optimizer = make_optimizer(
        Optimizer.model_validate(spec | {"weightDecay": 0.5, "learningRate": 0.1}), named.items(), {}, no_decay
    )
    assert optimizer is not None
    for parameter in named.values():
        parameter.grad = torch.zeros(2)
    optimizer.step()
    for name, parameter in named.items():
        assert parameter[0].item() == pytest.approx(1.0 if name in no_decay else 0.95)


@pytest.mark.parametrize(
    ("spec", "kind", "options"),
    [
        ({"name": "AdamW", "beta1": 0.7, "beta2": 0.8, "epsilon": 0.3}, torch.optim.AdamW, {"betas": (0.7, 0.8)}),
        ({"name": "Adam", "beta1": 0.7, "beta2": 0.8, "epsilon": 0.3}, torch.optim.Adam, {"betas": (0.7, 0.8)}),
        ({"name": "RMSprop", "alpha": 0.7, "epsilon": 0.3}, torch.optim.RMSprop, {"alpha": 0.7}),
        ({"name": "SGD", "momentum": 0.7}, torch.optim.SGD, {"momentum": 0.7}),
    ],
    ids=["adamw", "adam", "rmsprop", "sgd"],
)
def test_an_optimizer_has_all_that_the_spec_says(
    spec: dict[str, Any], kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    asked = Optimizer.model_validate(spec | {"learningRate": 0.25, "weightDecay": 0.5})

    optimizer = make_optimizer(asked, {"a": nn.Parameter(torch.ones(2))}.items(), {})

    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    expected = options | {"lr": 0.25, "weight_decay": 0.5} | ({"eps": 0.3} if "epsilon" in spec else {})
    assert {name: group[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("shape", "rates"),
    [
        ("Constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("Linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("Cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5, 0.0]),
    ],
)
def test_the_learning_rate_warms_up_to_its_value_and_falls_to_zero_by_its_shape(shape: str, rates: list[float]) -> None:
    optimizer = Optimizer.model_validate({"learningRate": 1.0})
    schedule = LearningRateSchedule.model_validate({"shape": shape, "warmupSteps": 4})

    assert [learning_rate(optimizer, schedule, step, 8) for step in range(9)] == pytest.approx(rates)
