"""Architectures that the trainer does not know, registered as a user's module of the trainer's image does it."""

from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer import register_architecture


@register_architecture("ElectraForSequenceClassification", task="Class")
def electra(model: Any) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    body = model.electra
    widened = nn.Sequential(body.embeddings, body.embeddings_project) if hasattr(body, "embeddings_project") else None
    return widened or body.embeddings, list(body.encoder.layer), model.classifier


class OptEmbedding(nn.Module):
    """Tokens plus learned positions, of which the first two rows stand for nothing."""

    def __init__(self, tokens: nn.Module, positions: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.ones_like(ids))  # type: ignore[no-any-return]


@register_architecture("OPTForCausalLM", task="NextToken")
def opt(model: Any) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    body = model.model.decoder
    head = nn.Sequential(body.final_layer_norm, model.lm_head)
    return OptEmbedding(body.embed_tokens, body.embed_positions), list(body.layers), head


def nothing_registered(model: Any) -> None:
    """What a job may name by mistake."""
