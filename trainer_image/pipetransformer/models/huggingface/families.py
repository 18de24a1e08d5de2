"""Which part of a model of transformers is which unit: one short function for each architecture.

A function gets the whole model and gives its embedding, blocks and head, made of the model's own modules, each a
module from one tensor to one tensor. Names of weights need no care: they are found by identity. To add an
architecture, write such a function under `@splits("ItsClass", Task.CLASS)`.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...data import Task

#: Embedding, blocks and head.
Units = tuple[nn.Module, list[nn.Module], nn.Module]

_SPLITS: dict[str, Callable[[Any], Units]] = {}
_TASKS: dict[str, Task] = {}

#: The class that a model type is trained as, unless the job names another.
DEFAULT_ARCHITECTURES = {
    "vit": "ViTForImageClassification",
    "bert": "BertForSequenceClassification",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
}


def splits(architecture: str, task: Task) -> Callable[[Callable[[Any], Units]], Callable[[Any], Units]]:
    """Register a function for a class of transformers, and what that learns."""

    def register(function: Callable[[Any], Units]) -> Callable[[Any], Units]:
        _SPLITS[architecture] = function
        _TASKS[architecture] = task
        return function

    return register


def known_architectures() -> list[str]:
    """Names of the classes that can be split."""
    return sorted(_SPLITS)


def task_of(architecture: str) -> Task:
    """What a class of transformers learns."""
    return _TASKS[architecture]


def split(model: Any) -> Units:
    """The units of a model of a known architecture."""
    return _SPLITS[type(model).__name__](model)


class FirstPosition(nn.Module):
    """(batch, positions, hidden) to (batch, hidden): the class token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class TokensAndPositions(nn.Module):
    """(batch, positions) ids to (batch, positions, hidden): learned tokens plus learned positions."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding, dropout: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.dropout(self.tokens(ids) + self.positions(places))  # type: ignore[no-any-return]


class RotaryLayer(nn.Module):
    """A layer that needs the rotations of its positions, and makes them itself.

    `longrope` has one set of frequencies for short samples and one for long ones, and writes the set that it takes into
    a buffer. Here that is a copy, since a forward may change none.
    """

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        if self.rotary.rope_type == "longrope":
            copies = {name: buffer.clone() for name, buffer in self.rotary.named_buffers()}
            rotations = functional_call(self.rotary, copies, (x, places))
        else:
            rotations = self.rotary(x, places)
        return self.layer(x, position_embeddings=rotations)  # type: ignore[no-any-return]


def _chain(**modules: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(modules))


@splits("ViTForImageClassification", Task.CLASS)
def _vit(model: Any) -> Units:
    body = model.vit
    head = _chain(norm=body.layernorm, first=FirstPosition(), classifier=model.classifier)
    return body.embeddings, list(body.layers), head


@splits("BertForSequenceClassification", Task.CLASS)
def _bert(model: Any) -> Units:
    body = model.bert
    head = _chain(pooler=body.pooler, dropout=model.dropout, classifier=model.classifier)
    return body.embeddings, list(body.encoder.layer), head


@splits("BertForMaskedLM", Task.MASKED_TOKEN)
def _bert_masked(model: Any) -> Units:
    body = model.bert
    return body.embeddings, list(body.encoder.layer), model.cls


@splits("GPT2LMHeadModel", Task.NEXT_TOKEN)
def _gpt2(model: Any) -> Units:
    body = model.transformer
    embedding = TokensAndPositions(body.wte, body.wpe, body.drop)
    return embedding, list(body.h), _chain(norm=body.ln_f, output=model.lm_head)


@splits("LlamaForCausalLM", Task.NEXT_TOKEN)
def _llama(model: Any) -> Units:
    body = model.model
    blocks: list[nn.Module] = [RotaryLayer(layer, body.rotary_emb) for layer in body.layers]
    return body.embed_tokens, blocks, _chain(norm=body.norm, output=model.lm_head)
