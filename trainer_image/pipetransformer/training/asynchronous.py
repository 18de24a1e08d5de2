"""What a worker does within a round of several steps. It steps when the list says so, and its forwards and backwards
use the weights that the spec's schedule asks for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from pipetransformer.pipeline import RoundHooks
from pipetransformer.state.prediction import predict
from pipetransformer_contract.spec import ScheduleName

from .commit import Committer
from .gradient_reduction import GradientReducer


@dataclass(slots=True)
class Newest(RoundHooks):
    """Every computation uses the newest weights.

    Attributes:
        committer: steps the optimizer.
        reducer: sums each step's gradients over the pipelines.
        first_step: committed steps before the round.
        chunks: number of chunks of each step.
        staleness: of the weights of each chunk's forward, in steps; empty if nothing trains here.
        on_step: called with each step after it.
        norms: by step the squared norms of the units, as `GradientReducer.finish` returns them.
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

    def passed(self, unit: int) -> None:
        self.reducer.passed(unit)

    def step(self, span: int, step: int, weight: Tensor) -> None:
        self.norms.append(self.reducer.finish())
        total = self.reducer.sum_over_pipelines(weight)
        if total:  # otherwise the round is done again
            self.committer.step(self.first_step + step, 1.0 / total)
        self.on_step(self.first_step + step)
        if step + 1 < len(self.chunks):
            self.reducer.begin(self.chunks[step + 1])

    @contextmanager
    def _changed(self, change: Callable[[], None]) -> Iterator[None]:
        """Have `change` write other weights into the memory of the weights, and put the newest ones back afterwards.

        The graph of a forward refers to that memory, so its backward finds what is there by then.
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
    """A forward uses the weights that its step is predicted to find, a backward the newest ones (PipeOptim, Guan et
    al., arXiv 2312.00839). It keeps one copy of the weights during a forward."""

    @contextmanager
    def weights(self, span: int, chunk: int) -> Iterator[None]:
        optimizer, steps = self.committer.optimizer, self.staleness.get(chunk, 0)
        if optimizer is None or not steps:
            yield
            return
        rate = self.committer.rate(self.first_step + len(self.norms) + steps)
        with self._changed(lambda: predict(optimizer, rate * steps)):
            yield


@dataclass(slots=True)
class Stashed(Newest):
    """A backward uses the weights of its forward (PipeDream, Narayanan et al., 2019, section 3.3). It keeps a copy of
    the weights for each step that has changed them while a chunk is in flight.

    Attributes:
        stash: weights by the number of steps of the round before them.
    """

    stash: dict[int, list[Tensor]] = field(default_factory=dict, init=False)

    @contextmanager
    def weights(self, span: int, chunk: int) -> Iterator[None]:
        made = len(self.norms)
        if self.staleness.get(chunk, 0) and made not in self.stash:
            self.stash[made] = [weight.clone() for weight in self.committer.weights]
        yield

    @contextmanager
    def weights_back(self, span: int, chunk: int) -> Iterator[None]:
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


#: What computes with which weights, by the schedule of the layout.
WEIGHTS: Mapping[ScheduleName, type[Newest]] = {
    ScheduleName.PIPE_OPTIM: Predicted,
    ScheduleName.PIPE_DREAM: Stashed,
    ScheduleName.ASYNC_ONE_FORWARD_ONE_BACKWARD: Newest,
}
