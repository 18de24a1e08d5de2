"""The state from which a round of several steps began, in host memory, because the steps change it before the vote."""

import torch

from pipetransformer.device_copies import HostCopies


class RoundStart:
    """What an optimizer steps, with its moments, as it was when this was made. It can be exchanged with what the steps
    have made of it, bit for bit."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        """
        Args:
            optimizer: all its moments exist already; None if nothing trains.
        """
        self._live = [] if optimizer is None else _tensors(optimizer)
        self._host = HostCopies()
        self._kept = [self._host.copy(tensor) for tensor in self._live]
        #: Whether what the steps have made is in place, and not the start.
        self.has_steps = True

    def go_back(self) -> None:
        """Put the start in place, and keep what the steps have made."""
        if self.has_steps:
            self._swap()

    def go_on(self) -> None:
        """Put in place what the steps have made."""
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
