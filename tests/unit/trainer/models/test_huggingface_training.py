"""Models of transformers train through changing layouts, freezes and dropout as in one layout, and go back to
transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pipetransformer.data import lengths_of, load_dataset
from pipetransformer.library.predict import accuracy
from pipetransformer.models import MicroBatchContext, set_micro_batch
from pipetransformer.storage import load_model
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Scripted, run_job

pytestmark = pytest.mark.timeout(240)

LENGTH = 24
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2}
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
BERT = {"model_type": "bert", **SMALL}
LLAMA = {"model_type": "llama", **SMALL, "num_key_value_heads": 2, "attention_dropout": 0.1}
VIT = {"model_type": "vit", **SMALL, "patch_size": 4, "hidden_dropout_prob": 0.1}


def text(*packages: str, **options: Any) -> dict[str, Any]:
    return {"name": "text", "options": {"packages": list(packages), "length": LENGTH, **options}}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "gpt2": (GPT2, text("curses", "dbm"), transformers.GPT2LMHeadModel),
    "bert": (BERT, text("json", "dbm", task="Class"), transformers.BertForSequenceClassification),
    "llama": (LLAMA, text("curses", "dbm"), transformers.LlamaForCausalLM),
    "vit": (VIT, {"name": "digits"}, transformers.ViTForImageClassification),
}
#: Of the newer families, each through pipelines of three, two and one.
SHORT_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "roberta-masked-tied": (
        {"model_type": "roberta", **SMALL},
        text("dbm", task="MaskedToken"),
        transformers.RobertaForMaskedLM,
    ),
    "distilbert": (
        {"model_type": "distilbert", "dim": 16, "n_heads": 2, "hidden_dim": 32},
        text("json", "dbm", task="Class"),
        transformers.DistilBertForSequenceClassification,
    ),
    "mistral-window": (
        {"model_type": "mistral", **SMALL, "num_key_value_heads": 1, "sliding_window": 5, "attention_dropout": 0.1},
        text("dbm"),
        transformers.MistralForCausalLM,
    ),
    "qwen3-tied": (
        {"model_type": "qwen3", **SMALL, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True,
         "attention_bias": True, "attention_dropout": 0.1},
        text("dbm"),
        transformers.Qwen3ForCausalLM,
    ),
}  # fmt: skip
EPOCHS = 2


def make_spec(model: dict[str, Any], data: dict[str, Any], **training: Any) -> TrainerSpec:
    return TrainerSpec.model_validate(
        {
            "model": {"name": "huggingface", "numLayers": 4, "options": model},
            "data": data,
            "training": {
                "epochs": EPOCHS,
                "globalBatchSize": 16,
                "optimizer": {
                    "name": "AdamW",
                    "learningRate": 0.003,
                    "weightDecay": 0.1,
                    "noDecay": ["*norm*.weight" if model["model_type"] in ("llama", "mistral") else "*.bias", "head.*"],
                },
                "maxGradientNorm": 1.0,
                "precision": "Float64",
                **training,
            },
            "freeze": {"policy": "Explicit", "boundaries": [{"step": 3, "boundary": 1}, {"step": 9, "boundary": 2}]},
            "pipeline": {"stages": 2, "microBatchSize": 4},
            "numShards": 2,
            "workers": 2,
        }
    )


@pytest.mark.parametrize("family", CASES)
def test_two_epochs_through_three_layouts_give_a_model_that_transformers_loads(family: str, tmp_path: Path) -> None:
    model, data, cls = CASES[family]
    spec = make_spec(model, data)
    script = [
        Scripted(2, 1, [0, 1]),
        Scripted(1, 2, [0, 1], at_step=5),
        Scripted(1, 1, [1], leavers=[0], at_step=10),
    ]
    run = run_job(make_spec(model, data, activationCheckpointing=True), script, tmp_path / "elastic")
    stayed = run_job(spec, [Scripted(1, 1, [0])], tmp_path / "stayed")

    assert len(run.steps) == len(stayed.steps) > 10
    for ours, theirs in zip(run.steps, stayed.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9), ours["step"]
        assert ours["gradientNorm"] == pytest.approx(theirs["gradientNorm"], rel=1e-9), ours["step"]

    dataset = load_dataset(spec.data, dtype=torch.float64)
    ids = range(len(dataset.test))
    inputs, _ = dataset.test.batch(ids)
    lengths = lengths_of(dataset.test, ids, torch.device("cpu"))
    mask = {} if lengths is None else {"attention_mask": (torch.arange(LENGTH) < lengths[:, None]).long()}
    trained = load_model(str(tmp_path / "elastic" / "model"))
    loaded = cls.from_pretrained(tmp_path / "elastic" / "model", dtype=torch.float64).eval()
    with torch.no_grad():
        set_micro_batch(MicroBatchContext(0, ids, lengths))
        x = inputs
        for unit in trained.units:
            x = unit(x)
        torch.testing.assert_close(x, loaded(inputs, **mask).logits, rtol=1e-9, atol=1e-9)
    assert accuracy(trained, dataset.test) == pytest.approx(run.summary["test_accuracy"], abs=1e-9)


@pytest.mark.parametrize("family", SHORT_CASES)
def test_pipelines_of_three_two_and_one_compute_the_losses_of_one_worker(family: str, tmp_path: Path) -> None:
    model, data, cls = SHORT_CASES[family]
    spec = make_spec(model, data, epochs=None, steps=6, globalBatchSize=8)
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"architecture": cls.__name__})})
    script = [
        Scripted(3, 1, [0, 1, 2]),
        Scripted(2, 1, [0, 1], leavers=[2], at_step=2),
        Scripted(1, 1, [1], leavers=[0], at_step=4),
    ]
    run = run_job(spec, script, tmp_path / "elastic")
    stayed = run_job(spec, [Scripted(1, 1, [0])], tmp_path / "stayed")

    assert len(run.steps) == len(stayed.steps) == 6
    for ours, theirs in zip(run.steps, stayed.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9), ours["step"]
        assert ours["gradientNorm"] == pytest.approx(theirs["gradientNorm"], rel=1e-9), ours["step"]
    loaded = cls.from_pretrained(tmp_path / "elastic" / "model", dtype=torch.float64)
    again = cls.from_pretrained(tmp_path / "stayed" / "model", dtype=torch.float64)
    for (name, one), (_, other) in zip(loaded.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9, msg=name)
