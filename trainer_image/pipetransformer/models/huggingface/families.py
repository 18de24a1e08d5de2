"""Cuts models of transformers into units, with one short function for each architecture.

A function gets the whole model and returns its embedding, layers and head. These consist of the model's own modules,
and each maps one tensor to one tensor. To add an architecture to this file, decorate such a function with
`@splits("ItsClass", task=Task.CLASS)`. A user's program uses `register_architecture`.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipetransformer.data import Task
from pipetransformer.models.architectures import Architecture, Decorator, FirstRow, Split, Units, register_built_in
from pipetransformer.models.context import current_micro_batch

#: The class of each model type that a job trains, unless it names another class.
DEFAULT_ARCHITECTURES = {
    "bert": "BertForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "roberta": "RobertaForSequenceClassification",
    "vit": "ViTForImageClassification",
}


def splits(
    *architectures: str,
    task: Task,
    first_position: FirstRow = lambda _: 0,
    slices_tokens: bool = False,
) -> Decorator:
    """Register a function for classes of transformers that learn `task`; see `Architecture`."""

    def register(function: Split) -> Split:
        for name in architectures:
            register_built_in(Architecture(name, function, task, first_position, None, slices_tokens))
        return function

    return register


class FirstPosition(nn.Module):
    """(batch, positions, hidden) to (batch, hidden): takes the first position, the class token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class TokensAndPositions(nn.Module):
    """(batch, positions) token ids to (batch, positions, hidden): embeddings of tokens plus those of positions."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding, dropout: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        places = current_micro_batch().places(ids.shape[1], ids.device)
        return self.dropout(self.tokens(ids) + self.positions(places))  # type: ignore[no-any-return]


class RotaryLayer(nn.Module):
    """A layer that computes the rotations (rotary embeddings) of its positions itself.

    `longrope` has one set of frequencies for short samples and one for long samples, and writes the set in use into a
    buffer. It gets a copy of that buffer here, because a forward must not change a buffer.
    """

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        context = current_micro_batch()
        places = context.places(x.shape[1], x.device).unsqueeze(0)
        if self.rotary.rope_type == "longrope":
            copies = {name: buffer.clone() for name, buffer in self.rotary.named_buffers()}
            total = x.shape[1] if context.tokens is None else context.tokens.total
            everywhere = functional_call(self.rotary, copies, (x, torch.arange(total, device=x.device).unsqueeze(0)))
            rotations = tuple(part[:, places[0]] for part in everywhere)  # the whole length decides which set is used
        else:
            rotations = self.rotary(x, places)
        return self.layer(x, position_embeddings=rotations)  # type: ignore[no-any-return]


def _chain(**modules: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(modules))


def _after_padding(config: Any) -> int:
    """The first row of the position table that RoBERTa uses: the one after the padding id."""
    return int(config.pad_token_id) + 1


@splits("ViTForImageClassification", task=Task.CLASS)
def _vit(model: Any) -> Units:
    body = model.vit
    head = _chain(norm=body.layernorm, first=FirstPosition(), classifier=model.classifier)
    return body.embeddings, list(body.layers), head


@splits("BertForSequenceClassification", task=Task.CLASS)
def _bert(model: Any) -> Units:
    body = model.bert
    head = _chain(pooler=body.pooler, dropout=model.dropout, classifier=model.classifier)
    return body.embeddings, list(body.encoder.layer), head


@splits("BertForMaskedLM", task=Task.MASKED_TOKEN)
def _bert_masked(model: Any) -> Units:
    body = model.bert
    return body.embeddings, list(body.encoder.layer), model.cls


@splits("RobertaForSequenceClassification", task=Task.CLASS, first_position=_after_padding)
def _roberta(model: Any) -> Units:
    body = model.roberta
    return body.embeddings, list(body.encoder.layer), model.classifier


@splits("RobertaForMaskedLM", task=Task.MASKED_TOKEN, first_position=_after_padding)
def _roberta_masked(model: Any) -> Units:
    body = model.roberta
    return body.embeddings, list(body.encoder.layer), model.lm_head


@splits("DistilBertForSequenceClassification", task=Task.CLASS)
def _distilbert(model: Any) -> Units:
    body = model.distilbert
    head = _chain(
        first=FirstPosition(),
        pre_classifier=model.pre_classifier,
        activation=nn.ReLU(),
        dropout=model.dropout,
        classifier=model.classifier,
    )
    return body.embeddings, list(body.transformer.layer), head


@splits("DistilBertForMaskedLM", task=Task.MASKED_TOKEN)
def _distilbert_masked(model: Any) -> Units:
    body = model.distilbert
    head = _chain(
        transform=model.vocab_transform,
        activation=model.activation,
        norm=model.vocab_layer_norm,
        output=model.vocab_projector,
    )
    return body.embeddings, list(body.transformer.layer), head


@splits("GPT2LMHeadModel", task=Task.NEXT_TOKEN, slices_tokens=True)
def _gpt2(model: Any) -> Units:
    body = model.transformer
    embedding = TokensAndPositions(body.wte, body.wpe, body.drop)
    return embedding, list(body.h), _chain(norm=body.ln_f, output=model.lm_head)


@splits(
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    task=Task.NEXT_TOKEN,
    slices_tokens=True,
)
def _rotary(model: Any) -> Units:
    body = model.model
    blocks: list[nn.Module] = [RotaryLayer(layer, body.rotary_emb) for layer in body.layers]
    return body.embed_tokens, blocks, _chain(norm=body.norm, output=model.lm_head)
