"""Jobs of several levels, for each family of models whose width may change."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.models import MicroBatchContext, set_micro_batch
from pipetransformer_contract.spec import TrainerSpec

LENGTH = 8
HEADS, KEY_HEADS = 8, 4
SMALL = {"hidden_size": 32, "num_attention_heads": HEADS, "intermediate_size": 64}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": HEADS}
LLAMA = {"model_type": "llama", **SMALL, "num_key_value_heads": KEY_HEADS, "attention_bias": True}


def _text(**options: Any) -> dict[str, Any]:
    return {"name": "text", "options": {"packages": ["dbm"], "length": LENGTH, **options}}


def _transformers(options: dict[str, Any], architecture: str) -> dict[str, Any]:
    return {"name": "huggingface", "architecture": architecture, "options": options}


#: Model and data by family.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "own-vit": (
        {"name": "vit", "hiddenSize": 32, "numHeads": HEADS, "mlpSize": 64, "patchSize": 4}, {"name": "digits"},
    ),
    "vit": (
        _transformers({"model_type": "vit", **SMALL, "patch_size": 4}, "ViTForImageClassification"), {"name": "digits"},
    ),
    "bert": (
        _transformers({"model_type": "bert", **SMALL}, "BertForSequenceClassification"),
        _text(packages=["json", "dbm"], task="Class"),
    ),
    "bert-masked": (_transformers({"model_type": "bert", **SMALL}, "BertForMaskedLM"), _text(task="MaskedToken")),
    "gpt2-tied": (_transformers(GPT2, "GPT2LMHeadModel"), _text()),
    "gpt2-untied": (_transformers({**GPT2, "tie_word_embeddings": False}, "GPT2LMHeadModel"), _text()),
    "llama": (_transformers(LLAMA, "LlamaForCausalLM"), _text()),
    "llama-tied": (_transformers({**LLAMA, "tie_word_embeddings": True}, "LlamaForCausalLM"), _text()),
}  # fmt: skip


def level_spec(family: str, folder: Path, *, num_layers: int = 4, training: dict[str, Any] | None = None,
               levels: dict[str, Any] | None = None, **fields: Any) -> TrainerSpec:  # fmt: skip
    """A float64 job of a family whose levels differ as told."""
    model, data = CASES[family]
    return TrainerSpec.model_validate(
        {
            "model": {**model, "numLayers": num_layers},
            "data": data,
            "training": {"steps": 12, "globalBatchSize": 8, "precision": "Float64", **(training or {})},
            "checkpoint": {"location": str(folder / "checkpoints")},
            "multiLevel": {"descentSteps": 2, "ascentSteps": 4, **(levels or {})},
            **fields,
        }
    )


def level_job(family: str, folder: Path, **fields: Any) -> Job:
    """The job of `level_spec`, loaded."""
    return load_job(level_spec(family, folder, **fields))


def random_state(job: Job, seed: int = 0) -> dict[str, Tensor]:
    """Random weights for a job's model by whole-model name; shared parameters are equal."""
    generator = torch.Generator().manual_seed(seed)
    model = job.model
    state = {
        f"{model.unit_name(unit)}.{name}": torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 4
        if tensor.is_floating_point() else torch.zeros_like(tensor, device="cpu")
        for unit, shell in enumerate(model.units) for name, tensor in shell.state_dict().items()
    }  # fmt: skip
    for tie in model.ties.all:
        first, *others = (f"{model.unit_name(unit)}.{name}" for unit, name in tie.places)
        state |= {other: state[first].clone() for other in others}
    return state


def units_of(job: Job, state: dict[str, Tensor]) -> list[nn.Module]:
    """The units of a job's model with these weights, for evaluation."""
    units = []
    for index in range(job.num_layers + 2):
        unit, prefix = job.blank_unit(index), f"{job.model.unit_name(index)}."
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        unit.load_state_dict(own, assign=True)
        units.append(unit.eval())
    return units


def logits(job: Job, state: dict[str, Tensor]) -> Tensor:
    """What the model makes of a few samples with these weights."""
    x, _ = job.dataset.train.batch(range(4))
    set_micro_batch(MicroBatchContext(0, range(len(x)), None))
    with torch.no_grad():
        for unit in units_of(job, state):
            x = unit(x)
    return x
