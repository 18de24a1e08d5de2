"""TeraPipe is refused with the field and the reason where a model or its data cannot run slices of tokens."""

from typing import Any

import pytest

from pipetransformer.errors import SpecError
from pipetransformer.job.load import load_job
from pipetransformer.partition import Cut
from pipetransformer.partition.slice_costs import SliceCost, SliceCosts
from pipetransformer.state.control import Control
from pipetransformer_contract.spec import ScheduleName, TrainerSpec

CAUSAL = {
    "name": "tests.testkit.user_code.causal_model:make_model",
    "numLayers": 2,
    "options": {"num_layers": 2},
}
TOKENS = {"name": "tests.testkit.user_code.causal_model:make_data"}  # of 16 tokens
BERT = {"model_type": "bert", "hidden_size": 16, "num_attention_heads": 2}


def make_spec(model: dict[str, Any], data: dict[str, Any], **pipeline: Any) -> TrainerSpec:
    return TrainerSpec.model_validate(
        {
            "model": model,
            "data": data,
            "training": {"steps": 4, "globalBatchSize": 4},
            "freeze": {"policy": "None"},
            "pipeline": {"stages": 2, "microBatchSize": 2, "schedule": "TeraPipe"} | pipeline,
        }
    )


@pytest.mark.parametrize(
    ("model", "data", "pipeline", "field", "words"),
    [
        (
            {"name": "huggingface", "numLayers": 2, "architecture": "BertForMaskedLM", "options": BERT},
            {"name": "text", "options": {"task": "MaskedToken", "length": 16, "packages": ["http"]}},
            {},
            "spec.pipeline.schedule",
            "TeraPipe needs a model whose positions see only earlier ones: BertForMaskedLM is bidirectional",
        ),
        (
            {"name": "vit", "numLayers": 2, "hiddenSize": 16, "numHeads": 2, "patchSize": 4},
            {"name": "digits"},
            {},
            "spec.pipeline.schedule",
            "TeraPipe needs a model whose positions see only earlier ones: vit reads pictures, whose patches have no "
            "order",
        ),
        (
            {"name": "tests.testkit.user_code.tied_model:make_model", "numLayers": 6},
            {"name": "tests.testkit.user_code.tied_model:make_data"},
            {},
            "spec.pipeline.schedule",
            "TeraPipe needs a model whose positions see only earlier ones: "
            r"tests.testkit.user_code.tied_model:make_model does not promise it with slices_tokens=True",
        ),
        (CAUSAL, TOKENS, {"tokenSlices": 17}, "spec.pipeline.tokenSlices", "is 17, but samples have 16 tokens"),
        (
            CAUSAL,
            TOKENS,
            {"tokenSlices": 5, "sliceMultiple": 4},
            "spec.pipeline.tokenSlices",
            "5 slices of multiples of 4 tokens do not fit samples of 16 tokens",
        ),
    ],
)
def test_what_cannot_run_slices_is_refused(
    model: dict[str, Any], data: dict[str, Any], pipeline: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        load_job(make_spec(model, data, **pipeline))
    assert refused.value.field == field


CUT = Cut([range(2), range(2, 4)], 2, schedule=ScheduleName.TERA_PIPE)


@pytest.mark.parametrize(
    ("pipeline", "lengths"),
    [
        ({"tokenSlices": 4}, (4, 4, 4, 4)),
        ({"tokenSlices": 3, "sliceMultiple": 4}, (4, 4, 8)),
        ({"tokenSlices": 16}, (1,) * 16),
        ({"sliceMultiple": 5}, (5, 5, 5, 1)),
        ({}, (8, 8)),
    ],
)
def test_slices_follow_the_spec_until_costs_are_measured(pipeline: dict[str, Any], lengths: tuple[int, ...]) -> None:
    job = load_job(make_spec(CAUSAL, TOKENS, **pipeline))
    assert job.layouts.token_slices(Control(), CUT, 1) == lengths
    assert job.layouts.token_slices(Control(), Cut([range(4)], 2, schedule=CUT.schedule), 1) == ()


def test_measured_costs_plan_slices_unless_the_spec_counts_them() -> None:
    cost = SliceCost(fixed=1e-3, token=1e-4, pair=1e-3, square=5e-4)
    costs = SliceCosts(forward=[cost] * 4, backward=[cost + cost] * 4)
    control = Control(slice_costs=costs.model_dump())
    planned = load_job(make_spec(CAUSAL, TOKENS, sliceMultiple=1)).layouts.token_slices(control, CUT, 1)
    assert sum(planned) == 16
    assert planned[0] > planned[-1]
    counted = load_job(make_spec(CAUSAL, TOKENS, tokenSlices=2))
    assert not counted.layouts.plans_slices
    assert counted.layouts.token_slices(control, CUT, 1) == (8, 8)


def test_other_schedules_run_whole_samples() -> None:
    job = load_job(make_spec(CAUSAL, TOKENS, schedule="GPipe"))
    assert job.layouts.token_slices(Control(), Cut(CUT.spans, 2, schedule=ScheduleName.GPIPE), 1) == ()
