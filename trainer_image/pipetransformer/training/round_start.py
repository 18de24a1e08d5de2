"""Copies in host memory of the state before a round of several steps, because the steps change it before the vote."""

import torch

from pipetransformer.device_copies import HostCopies


class RoundStart:
    """Copies of the weights and moments of an optimizer from before a round of several steps.

    `go_back` and `go_forward` exchange them with the values after the steps, bit for bit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        """
        Args:
            optimizer: steps the weights. All its moments must exist already. None if nothing trains.
        """
        self._live = [] if optimizer is None else _tensors(optimizer)
        self._host = HostCopies()
        self._kept = [self._host.copy(tensor) for tensor in self._live]
        #: Whether the optimizer's tensors hold the values after the steps; otherwise they hold those from before.
        self.has_steps = True

    def go_back(self) -> None:
        """Restore the values from before the round, and keep those after its steps."""
        if self.has_steps:
            self._swap()

    def go_forward(self) -> None:
        """Restore the values after the steps of the round."""
        if not self.has_steps:
            self._swap()

    def _swap(self) -> None:
        now = HostCopies()
        copies = [now.copy(tensor) for tensor in self._live]
        self._host.wait()
        for live, kept in zip(self._live, self._kept, strict=True):
            live.copy_(kept)
        self._host, self._kept, self.has_steps = now, copies, not self.has_steps


def _tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [tensor for weight in weights for tensor in (weight.detach(), *optimizer.state[weight].values())]
