"""`freeze.never` and `freeze.always` against the whole model, and what a plan knows of freezes."""

import pytest
import torch
from torch import nn

from pipetransformer.errors import SpecError
from pipetransformer.freeze import (
    Explicit,
    FreezeObservation,
    FreezePolicy,
    Limits,
    PolicyCopy,
    always_frozen,
    limits_of,
)
from pipetransformer.job.load import load_job
from pipetransformer.job.script_parts import Parts
from pipetransformer.library.forecast import Forecast
from pipetransformer.models import PipelineModel
from pipetransformer_contract.spec import Freeze, FreezePoint
from tests.testkit.trainer.numerics import ADAMW, make_spec

LAYERS = 4


def model(*, tied: bool = False) -> PipelineModel:
    embedding, head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    if tied:
        head.weight = embedding.weight
    return PipelineModel(embedding, [nn.Linear(3, 3) for _ in range(LAYERS)], head, (3,))


def names(whole: PipelineModel) -> list[str]:
    units = enumerate(whole.units)
    return [f"{whole.unit_name(index)}.{name}" for index, unit in units for name, _ in unit.named_parameters()]


def limits(fields: dict[str, list[str]], *, tied: bool = False) -> Limits:
    spec, whole = Freeze.model_validate(fields), model(tied=tied)
    return limits_of(spec, whole.with_constants(always_frozen(spec, whole)))


@pytest.mark.parametrize(
    ("pattern", "highest"),
    [("blocks.2.bias", 2), ("blocks.2", 2), ("blocks.[13]", 1), ("*.bias", 0), ("embedding.*", 0), ("head", LAYERS)],
)
def test_the_boundary_stays_below_the_first_layer_that_never_freezes(pattern: str, highest: int) -> None:
    assert limits({"never": [pattern]}) == Limits(0, highest)


def test_a_shared_parameter_may_freeze_with_its_last_layer() -> None:
    assert limits({"never": ["embedding.weight"]}, tied=True) == Limits(0, LAYERS)


@pytest.mark.parametrize(
    ("patterns", "lowest"),
    [(["embedding", "blocks.[01]"], 2), (["blocks.[01]"], 0), (["embedding", "blocks.0.weight"], 0), (["*.bias"], 0)],
    ids=["the-front", "without-the-embedding", "half-a-layer", "everywhere"],
)
def test_leading_layers_with_nothing_to_train_are_frozen_from_the_start(patterns: list[str], lowest: int) -> None:
    assert limits({"always": patterns}) == Limits(lowest, None)


def test_what_never_trains_is_no_parameter_but_keeps_its_name_and_value() -> None:
    whole = model()
    before = {name: tensor.clone() for name, tensor in whole.blocks[1].state_dict().items()}
    spec = Freeze(always=["blocks.1.weight"])

    changed = whole.with_constants(always_frozen(spec, whole))

    assert set(names(whole)) - set(names(changed)) == {"blocks.1.weight"}, "the model itself stays unchanged"
    assert changed.blocks[1].state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in changed.blocks[1].state_dict().items())


def test_all_copies_of_a_shared_parameter_never_train() -> None:
    whole = model(tied=True)
    changed = whole.with_constants(always_frozen(Freeze(always=["head.weight"]), whole))
    assert not {"embedding.weight", "head.weight"} & set(names(changed))
    assert not changed.ties.all
    untouched = whole.with_constants(always_frozen(Freeze(always=["blocks.0"]), whole))
    assert untouched.ties == whole.ties and untouched.units[0].weight is untouched.units[-1].weight


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"never": ["block.2"]}, "spec.freeze.never", "'block.2' matches no module or parameter.*blocks.2"),
        ({"always": ["blocks.9.bias"]}, "spec.freeze.always", "the closest names: blocks.0.bias|blocks.[0-3].bias"),
        ({"always": ["*"]}, "spec.freeze.always", "nothing to train"),
        ({"always": ["blocks.1"], "never": ["*.bias"]}, "spec.freeze.always", "blocks.1.bias is in freeze.never, too"),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(fields: dict[str, list[str]], field: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as refusal:
        limits(fields)
    assert refusal.value.field == field


def test_every_policy_keeps_within_the_limits() -> None:
    policy = Explicit([FreezePoint(step=0, boundary=0), FreezePoint(step=5, boundary=LAYERS)])
    copy = PolicyCopy(policy, {}, Limits(1, 3))
    assert [copy.decide(FreezeObservation(step, 0, 0, LAYERS, ())) for step in (0, 4, 5)] == [1, 1, 3]


def test_a_job_freezes_its_constant_front_without_a_policy() -> None:
    spec = make_spec(ADAMW, freeze={"always": ["embedding", "blocks.0", "blocks.1"]})
    job = load_job(spec)
    assert job.freeze_limits == Limits(2, None)
    built = job.build_units([0, 2, 3])
    assert [len(list(built[index].parameters())) for index in (0, 2)] == [0, 0] and list(built[3].parameters())
    assert Forecast(job).boundaries() == [(0, 2)]


class OneMore(FreezePolicy):
    """Freezes one more layer each time it is asked."""

    known_ahead = True

    def next_decision(self, step: int) -> int:
        return step + 7

    def decide(self, observation: FreezeObservation) -> int:
        return min(observation.boundary + 1, observation.num_layers)


def test_a_plan_knows_when_a_policy_of_the_user_freezes_if_the_policy_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec(ADAMW, freeze={"policy": "Script", "never": ["blocks.3.*"]})
    forecast = Forecast(load_job(spec, Parts(freeze=OneMore())))
    assert forecast.boundaries() == [(0, 1), (7, 2), (14, 3)]
    monkeypatch.setattr(OneMore, "known_ahead", False)
    assert forecast.boundaries() is None


@pytest.mark.parametrize("head", [nn.Identity(), nn.Flatten()])
def test_a_head_with_nothing_to_train_leaves_the_last_layer_that_has_something(head: nn.Module) -> None:
    plain = PipelineModel(nn.Linear(3, 3), [nn.Linear(3, 3) for _ in range(LAYERS)], head, (3,))
    assert limits_of(Freeze(), plain) == Limits(0, LAYERS - 1)
    last = PipelineModel(nn.Linear(3, 3), [nn.Linear(3, 3), nn.ReLU(), nn.Identity()], head, (3,))
    assert limits_of(Freeze(), last) == Limits(0, 0)


def test_a_head_that_never_trains_counts_as_one_without_parameters() -> None:
    assert limits({"always": ["head"]}) == Limits(0, LAYERS - 1)
