"""How many copies of its weights a worker keeps within a round of several steps."""

from unittest.mock import Mock

import torch

from pipetransformer.training.asynchronous import Stashed


def test_pipe_dream_drops_the_weights_that_no_backward_needs_any_more() -> None:
    """The worker's list is F0 F1 B0 S0 F2 B1 S1 F3 B2 S2 F4 and so on, with one micro-batch a step."""
    weight, steps = torch.zeros(1), 6
    staleness = {0: 0} | dict.fromkeys(range(1, steps), 1)
    hooks = Stashed(Mock(weights=[weight]), Mock(), 0, [1] * steps, staleness, on_step=Mock())
    kept, used = [], []

    def forward(chunk: int) -> None:
        with hooks.forward_weights(0, chunk):
            kept.append(len(hooks.stash))

    forward(0)
    for chunk in range(steps):
        if chunk + 1 < steps:
            forward(chunk + 1)
        with hooks.backward_weights(0, chunk):
            used.append(float(weight))
        weight += 1
        hooks.norms.append([])

    assert used == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0], "those of each forward"
    assert kept == [0, 1, 2, 3, 3, 3]
    assert float(weight) == steps
