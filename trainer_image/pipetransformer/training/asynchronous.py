"""Hooks for rounds of several steps, which asynchronous schedules have: step the optimizer within the round, and put
the weights in place that the schedule wants for each forward and backward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from pipetransformer.pipeline import RoundHooks
from pipetransformer.state.prediction import predict
from pipetransformer_contract.spec import ScheduleName

from .commit import Committer
from .gradients import GradientReducer


@dataclass(slots=True)
class Newest(RoundHooks):
    """Each forward and backward uses the newest weights.

    Attributes:
        committer: steps the optimizer.
        reducer: sums each step's gradients over the pipelines.
        first_step: number of committed steps before the round.
        chunks: number of chunks (micro-batches) of this pipeline in each step of the round.
        staleness: staleness of this worker's forwards by chunk, in steps; empty if nothing trains on this worker.
        on_step: called with the number of each step, once the optimizer has stepped.
        norms: for each step so far, the squared gradient norms that `GradientReducer.finish` returns.
    """

    committer: Committer
    reducer: GradientReducer
    first_step: int
    chunks: Sequence[int]
    staleness: Mapping[int, int]
    on_step: Callable[[int], None]
    norms: list[list[float]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.reducer.begin(self.chunks[0])

    def awaits(self, unit: int) -> bool:
        return self.reducer.awaits(unit)

    def passed(self, unit: int) -> None:
        self.reducer.passed(unit)

    def step(self, span: int, step: int, weight: Tensor) -> None:
        self.norms.append(self.reducer.finish())
        total = self.reducer.sum_over_pipelines(weight)
        if total:  # otherwise the step has no targets, and the round will be refused
            self.committer.step(self.first_step + step, 1.0 / total)
        self.on_step(self.first_step + step)
        if step + 1 < len(self.chunks):
            self.reducer.begin(self.chunks[step + 1])

    @contextmanager
    def _changed(self, change: Callable[[], None]) -> Iterator[None]:
        """Let `change` overwrite the weights, and restore the newest weights when the context ends.

        The memory of the weights stays the same. The autograd graph of a forward refers to this memory, so its backward
        uses the weights that are there when it runs.
        """
        weights = self.committer.weights
        newest = [weight.clone() for weight in weights]
        change()
        try:
            yield
        finally:
            for weight, one in zip(weights, newest, strict=True):
                weight.copy_(one)


@dataclass(slots=True)
class Predicted(Newest):
    """Implements PipeOptim (Guan et al., arXiv 2312.00839). A forward uses predicted weights: those that will be there
    when its gradient is used. A backward uses the newest weights. During a forward there is one extra copy of the
    weights.

    The weights after v steps are predicted s steps ahead, by s times the learning rate of step v + s, which uses the
    gradient. The s steps in between have their own rates, v to v + s - 1. The paper has one rate for all steps. The
    difference is small if the rate changes little within s steps.
    """

    @contextmanager
    def forward_weights(self, span: int, chunk: int) -> Iterator[None]:
        optimizer, steps = self.committer.optimizer, self.staleness.get(chunk, 0)
        if optimizer is None or not steps:
            yield
            return
        rate = self.committer.rate(self.first_step + len(self.norms) + steps)
        with self._changed(lambda: predict(optimizer, rate * steps)):
            yield


@dataclass(slots=True)
class Stashed(Newest):
    """Implements PipeDream (Narayanan et al., 2019, section 3.3). A backward uses the weights that its forward used.
    If steps change the weights between a forward and its backward, a copy is kept.

    Attributes:
        stash: copies of the weights. The key is the number of steps of the round before them.
    """

    stash: dict[int, list[Tensor]] = field(default_factory=dict, init=False)

    @contextmanager
    def forward_weights(self, span: int, chunk: int) -> Iterator[None]:
        made = len(self.norms)
        if self.staleness.get(chunk, 0) and made not in self.stash:
            self.stash[made] = [weight.clone() for weight in self.committer.weights]
        yield

    @contextmanager
    def backward_weights(self, span: int, chunk: int) -> Iterator[None]:
        made = len(self.norms) - self.staleness[chunk]  # backwards come in the order of steps
        self.stash = {version: weights for version, weights in self.stash.items() if version >= made}
        if not self.staleness[chunk]:
            yield
            return

        def put_stashed() -> None:
            for weight, one in zip(self.committer.weights, self.stash[made], strict=True):
                weight.copy_(one)

        with self._changed(put_stashed):
            yield


#: The hooks for each asynchronous schedule, by the weights that its forwards and backwards use.
ROUND_HOOKS: Mapping[ScheduleName, type[Newest]] = {
    ScheduleName.PIPE_OPTIM: Predicted,
    ScheduleName.PIPE_DREAM: Stashed,
    ScheduleName.ASYNC_ONE_FORWARD_ONE_BACKWARD: Newest,
}
