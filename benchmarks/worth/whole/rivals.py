"""Plain torch programs that train the job: DistributedDataParallel, and the same with frozen layers and their cache.

They use the job's weights, samples, order and optimizer, so their losses can be compared with ours. Each worker takes
its share of a batch at once, which is the quickest way where the model fits.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.data import read_batch
from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.models import MicroBatchContext, set_micro_batch
from pipetransformer_contract.api import trainer_spec
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.ranks import run_ranks

from .case import LAYERS, STEPS, STEPS_PER_EPOCH, Case
from .took import Took, integral
from .way import Freezing, Way

#: Seconds after which a run has hung.
_HUNG_SECONDS = 400


@dataclass(frozen=True)
class Rival:
    """A program without our product.

    Attributes:
        name: key in the result.
        about: what it is, in the table.
        freezing: what freezes. Outputs of frozen layers are cached.
    """

    name: str
    about: str
    freezing: Freezing = Freezing.NOTHING


DDP = Rival("torch_ddp", "torch DDP, if a GPU held the model")
DDP_FREEZE_CACHE = Rival("torch_ddp_freeze_cache", "torch DDP, freezing, cache, by hand", Freezing.BY_THIRDS)
RIVALS = (DDP, DDP_FREEZE_CACHE)


def run(case: Case, rival: Rival) -> Took:
    """Train the job once, on one process for each GPU."""
    way = Way(rival.name, rival.about, rival.freezing, fits=True)
    return train(trainer_spec(case.spec(way)), case.gpus, rival.freezing.moves(LAYERS, STEPS_PER_EPOCH), STEPS)


def train(spec: TrainerSpec, ranks: int, moves: Sequence[tuple[int, int]], steps: int) -> Took:
    """Train that many steps.

    Args:
        spec: the job.
        ranks: number of processes.
        moves: (step, frozen layers from there on).
        steps: number of steps.
    """
    by_rank = run_ranks(ranks, _train, spec.to_environment(), moves, steps, within=_HUNG_SECONDS)
    seconds = max(seconds for seconds, _ in by_rank)
    losses = [sum(parts) for parts in zip(*(losses for _, losses in by_rank), strict=True)]
    held = [(0.0, ranks)]
    return Took(seconds, integral(held, seconds), losses, held, [(0, 1, ranks)])


def _train(
    group: dist.ProcessGroup, spec: str, moves: Sequence[tuple[int, int]], steps: int
) -> tuple[float, list[float]]:
    """All steps of one rank: seconds from the common start, and its part of each loss."""
    job = load_job(TrainerSpec.model_validate_json(spec))
    trainer = DataParallel(job, group)
    boundaries = dict(moves)
    dist.all_reduce(torch.zeros(1), group=group)
    begun = time.perf_counter()
    losses = []
    for step in range(steps):
        if step in boundaries:
            trainer.freeze(boundaries[step])
        losses.append(trainer.step(step))
    dist.all_reduce(torch.zeros(1), group=group)
    return time.perf_counter() - begun, losses


class DataParallel:
    """The whole model on each rank. Frozen layers run without gradients, and only for samples that the cache lacks."""

    def __init__(self, job: Job, group: dist.ProcessGroup) -> None:
        self._job, self._group = job, group
        built = job.build_units(range(job.num_layers + 2))
        self._units = [built[index] for index in sorted(built)]
        self._frozen: list[nn.Module] = []
        self._cached: dict[int, tuple[int, Tensor]] = {}
        self._begin(0)

    def freeze(self, boundary: int) -> None:
        """Freeze the embedding and this many layers. The optimizer keeps the moments of the others."""
        moments = self._optimizer.state
        for unit in self._units[: boundary + 1]:
            unit.requires_grad_(False)
        self._begin(boundary + 1)
        for parameter in self._trained.parameters():
            self._optimizer.state[parameter] = moments[parameter]

    def step(self, step: int) -> float:
        """One step. Returns this rank's part of the mean loss."""
        ranks = self._group.size()
        share = self._job.dealer.train(step, ranks, self._job.order.global_batch // ranks)
        (batch,) = share[self._group.rank()]
        ids = list(batch.sample_ids)
        inputs, labels = read_batch(self._job.dataset.train, ids, step)
        set_micro_batch(MicroBatchContext(step, tuple(ids)))
        loss = nn.functional.cross_entropy(self._trained(self._after_frozen(ids, inputs)), labels)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item() / ranks

    def _begin(self, frozen: int) -> None:
        self._frozen = self._units[:frozen]
        trained = nn.Sequential(*self._units[frozen:])
        self._trained = DistributedDataParallel(trained, process_group=self._group, gradient_as_bucket_view=True)
        spec = self._job.spec.training.optimizer
        self._optimizer = torch.optim.AdamW(
            self._trained.parameters(),
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.epsilon,
            weight_decay=spec.weight_decay,
        )

    def _after_frozen(self, ids: list[int], inputs: Tensor) -> Tensor:
        """The frozen layers' outputs. All samples of an epoch were last read at one boundary."""
        if not self._frozen:
            return inputs
        done = min(self._cached[one][0] if one in self._cached else 0 for one in ids)
        hidden = torch.stack([self._cached[one][1] for one in ids]) if done else inputs
        with torch.no_grad():
            for unit in self._frozen[done:]:
                hidden = unit(hidden)
        self._cached |= {one: (len(self._frozen), output) for one, output in zip(ids, hidden, strict=True)}
        return hidden
