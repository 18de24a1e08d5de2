"""Predicts weights some steps ahead, from the optimizer's state (PipeOptim, Guan et al., arXiv 2312.00839).

A step moves the weights W by `-rate * dW`. The next steps are assumed to use the same dW, and one learning rate:

- SGD: dW is the momentum buffer; without momentum the last gradient.
- Adam, AdamW: dW = m / (sqrt(v) + epsilon), with bias-corrected moments m and v. Weight decay of AdamW is not in it.
- RMSprop: dW = g / (sqrt(v) + epsilon) with the last gradient g.

Before the first step of a weight, dW is 0.
"""

from typing import Any

import torch
from torch import Tensor

#: The key of the last step's gradient in a weight's optimizer state. Weight decay is included, as an L2 term. torch's
#: optimizers do not keep this entry.
LAST_GRADIENT = "last_gradient"


@torch.no_grad()
def keep_last_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Store the gradients of the coming step in the optimizer's state, for weights that have the key `LAST_GRADIENT`.
    Call it before each step."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            kept = optimizer.state[weight].get(LAST_GRADIENT)
            if kept is not None and weight.grad is not None:
                torch.add(weight.grad, weight, alpha=group["weight_decay"], out=kept)


@torch.no_grad()
def predict(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Move all weights by `-factor * dW`, in place. `factor` is the learning rate times the number of steps."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.state[weight]
            if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
                _by_moments(weight, state, group, factor)
            elif isinstance(optimizer, torch.optim.RMSprop):
                weight.addcdiv_(state[LAST_GRADIENT], state["square_avg"].sqrt().add_(group["eps"]), value=-factor)
            else:
                weight.sub_(state["momentum_buffer" if group["momentum"] else LAST_GRADIENT], alpha=factor)


def _by_moments(weight: Tensor, state: dict[str, Tensor], group: dict[str, Any], factor: float) -> None:
    steps = float(state.get("step", 0.0))
    if not steps:
        return
    beta1, beta2 = group["betas"]
    spread = (state["exp_avg_sq"] / (1 - beta2**steps)).sqrt_().add_(group["eps"])
    weight.addcdiv_(state["exp_avg"], spread, value=-factor / (1 - beta1**steps))
