"""What asynchronous weights cost: final losses and accuracy on digits, K=4, by replays in one process.

A replay has the losses of the job itself, to 1e-9 (`tests/unit/trainer/elastic/test_asynchronous.py`). Learning rates
are searched for the synchronous run, and all others use the same. Seeds are paired. Each processor has one run at a
time.
"""

import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t

from pipetransformer.data import read_batch
from pipetransformer.job.load import load_job
from pipetransformer.models import MicroBatchContext, run_unit
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.asynchronous_replay import Replay, Round

STAGES, LAYERS, BATCH, STEPS_PER_ROUND = 4, 4, 32, 16
#: Shorter, the synchronous runs still learn. Longer, all losses are about 0, and a ratio of their distances is noise.
EPOCHS, SHORTER, LONGER = 16, 8, 24
#: Micro-batches a step.
ONE, SEVERAL = 1, STAGES
OPTIMIZERS: dict[str, dict[str, Any]] = {"adamw": {"name": "AdamW"}, "sgd": {"name": "SGD", "momentum": 0.9}}
RATES = {"adamw": (1e-3, 2e-3, 3e-3, 5e-3, 1e-2), "sgd": (1e-2, 2e-2, 3e-2, 5e-2)}
#: Ways to train.
SYNCHRONOUS, NEWEST, PREDICTED, FURTHER, STASHED = "synchronous", "newest", "predicted", "predicted, s + 1", "stashed"
#: Their schedules, and how many steps more their predictions look ahead.
WAYS = {
    SYNCHRONOUS: ("OneForwardOneBackward", 0),
    NEWEST: ("AsyncOneForwardOneBackward", 0),
    PREDICTED: ("PipeOptim", 0),
    FURTHER: ("PipeOptim", 1),
    STASHED: ("PipeDream", 0),
}


@dataclass(frozen=True)
class Setting:
    """What all ways of a comparison have in common."""

    optimizer: str
    rate: float
    micro_batches: int
    epochs: int = EPOCHS

    def __str__(self) -> str:
        return f"{self.optimizer} at {self.rate:g}, {self.micro_batches} micro-batches a step, {self.epochs} epochs"


@dataclass(frozen=True)
class Trained:
    """Mean training loss of the last epoch, and held-out accuracy after it."""

    loss: float
    accuracy: float


def processes() -> ProcessPoolExecutor:
    """One process a processor, which trains with one thread."""
    return ProcessPoolExecutor(None, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))


def train(setting: Setting, way: str, seed: int) -> Trained:
    """One run."""
    schedule, extra = WAYS[way]
    job = load_job(
        TrainerSpec.model_validate(
            {
                "model": {
                    "name": "vit", "numLayers": LAYERS, "hiddenSize": 32, "numHeads": 4, "mlpSize": 64, "patchSize": 2,
                },
                "data": {"name": "digits"},
                "training": {
                    "epochs": setting.epochs,
                    "globalBatchSize": BATCH,
                    "optimizer": {**OPTIMIZERS[setting.optimizer], "learningRate": setting.rate},
                    "learningRateSchedule": {"shape": "Cosine", "warmupSteps": 60},  # as in examples/vit-digits.yaml
                    "seed": seed,
                },
                "pipeline": {"stages": STAGES, "schedule": schedule, "microBatchSize": BATCH // setting.micro_batches},
                "workers": STAGES,
            }
        )
    )  # fmt: skip
    spans = job.layouts.cut(0, STAGES, 1, None).spans
    replay, epoch = Replay(job, extra), job.order.steps_per_epoch
    for first, steps in _rounds(epoch * setting.epochs, epoch, 1 if way == SYNCHRONOUS else STEPS_PER_ROUND):
        replay.run(Round(first, steps, 0, 1, spans))
    return Trained(statistics.fmean(replay.losses[-epoch:]), _accuracy(replay))


def _rounds(total: int, epoch: int, most: int) -> Iterator[tuple[int, int]]:
    """First step and number of steps of each round, which ends with an epoch at the latest."""
    step = 0
    while step < total:
        steps = min(most, epoch - step % epoch)
        yield step, steps
        step += steps


@torch.no_grad()
def _accuracy(replay: Replay) -> float:
    test = replay.job.dataset.test
    ids = range(len(test))
    x, labels = read_batch(test, ids, None)
    for index in sorted(replay.units):
        x = run_unit(replay.units[index].eval(), x, MicroBatchContext(0, ids))
    return float((x.argmax(1) == labels).double().mean())


@dataclass(frozen=True)
class Compared:
    """Runs of all ways, by seed."""

    runs: dict[str, list[Trained]]

    def distances(self, way: str) -> list[float]:
        """How far the loss is above the synchronous run's, by seed."""
        return [one.loss - other.loss for one, other in zip(self.runs[way], self.runs[SYNCHRONOUS], strict=True)]

    def ratio(self, way: str) -> float:
        """Mean distance over that of the newest weights."""
        return statistics.fmean(self.distances(way)) / statistics.fmean(self.distances(NEWEST))

    def upper_bound(self, way: str) -> float:
        """The least ratio that the true one is below with 95 % confidence (Fieller's theorem, one-sided); infinite if
        there is none."""
        pairs = list(zip(self.distances(way), self.distances(NEWEST), strict=True))

        def below(ratio: float) -> bool:
            rest = [own - ratio * newest for own, newest in pairs]
            error = statistics.stdev(rest) / math.sqrt(len(rest))
            return statistics.fmean(rest) + float(t.ppf(0.95, len(rest) - 1)) * error < 0

        return next((step / 1000 for step in range(-2000, 5000) if below(step / 1000)), math.inf)

    def accuracy_loss(self, way: str) -> float:
        """Mean accuracy of the synchronous run, less this way's."""
        return statistics.fmean(one.accuracy for one in self.runs[SYNCHRONOUS]) - statistics.fmean(
            one.accuracy for one in self.runs[way]
        )

    def table(self) -> dict[str, dict[str, float]]:
        """Mean and standard deviation of each way."""
        return {
            way: {
                "loss": statistics.fmean(one.loss for one in found),
                "loss_std": statistics.stdev(one.loss for one in found),
                "accuracy": statistics.fmean(one.accuracy for one in found),
                "accuracy_std": statistics.stdev(one.accuracy for one in found),
                "distance": statistics.fmean(self.distances(way)),
            }
            for way, found in self.runs.items()
        }


class Runs:
    """Trains one run a processor, and keeps what came out.

    Args:
        pool: runs `train` (`processes`).
        keep: a file with results of the same code, which more are added to; None keeps no file.
    """

    def __init__(self, pool: Executor, keep: Path | None) -> None:
        self._pool, self._keep = pool, keep
        lines = [] if keep is None or not keep.exists() else keep.read_text().splitlines()
        self._found = {name: Trained(*values) for name, *values in map(json.loads, lines)}

    def compare(self, setting: Setting, ways: Sequence[str], seeds: Sequence[int]) -> Compared:
        """All ways with the same seeds."""
        names = {(way, seed): f"{setting}, {way}, seed {seed}" for way in ways for seed in seeds}
        missing = {key: name for key, name in names.items() if name not in self._found}
        running = {self._pool.submit(train, setting, *key): name for key, name in missing.items()}
        for done in as_completed(running):
            self._note(running[done], done.result())
        return Compared({way: [self._found[names[way, seed]] for seed in seeds] for way in ways})

    def _note(self, name: str, found: Trained) -> None:
        self._found[name] = found
        print(f"{name}: loss {found.loss:.4f}, accuracy {found.accuracy:.4f}", file=sys.stderr)
        if self._keep is not None:
            with self._keep.open("a") as file:
                file.write(json.dumps([name, found.loss, found.accuracy]) + "\n")

    def best_rate(self, optimizer: str, seeds: Sequence[int]) -> float:
        """The rate with the least mean loss of the synchronous run."""

        def loss(rate: float) -> float:
            runs = self.compare(Setting(optimizer, rate, ONE), [SYNCHRONOUS], seeds).runs[SYNCHRONOUS]
            found = statistics.fmean(run.loss for run in runs)
            return found if math.isfinite(found) else math.inf

        return min(RATES[optimizer], key=loss)
