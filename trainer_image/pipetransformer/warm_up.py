"""Does once, before a worker says that it is ready, what torch does at the first step of a process: start the threads
of autograd, load kernels, import the optimizers. A joiner's first step is in everybody's pause."""

import torch
from torch import nn

from pipetransformer_contract.spec import Optimizer

from .optimizer import make_optimizer

_WIDTH = 64


def warm_up(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> None:
    """Train a small layer for one step."""
    layer = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU()).to(device, dtype)
    made = make_optimizer(optimizer, layer.named_parameters(), {})
    assert made is not None
    layer(torch.ones(_WIDTH, _WIDTH, device=device, dtype=dtype)).sum().backward()
    made.step()
