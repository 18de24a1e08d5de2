"""One fine-tuning by the product's `train` in this process, and the file that keeps finished runs.

The file has one line of JSON for each run, so a stop loses at most the run in progress. A line counts only for the
settings that it was made with.
"""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipetransformer import Callback, Evaluation, Model, Pipeline, PipelineModel, train
from pipetransformer.data.order import EpochOrder

from .policies import Policy
from .tasks import Task
from .work import work


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        settings: digest of all that decides its outcome, except the code.
        accuracy: of the held-out samples at the end.
        boundaries: (step, frozen layers) wherever their number changed, the first at step 0.
        work: block forwards, as a share of those of the whole run with nothing frozen.
        work_cached: the same with the cache.
        thaws: how often layers trained again.
        seconds: of this process, cache included.
    """

    task: str
    policy: str
    seed: int
    settings: str
    accuracy: float
    steps: int
    boundaries: tuple[tuple[int, int], ...]
    work: float
    work_cached: float
    thaws: int
    seconds: float


class _Boundaries(Callback):
    """Notes the frozen layers of each step; a step that is redone counts once."""

    def __init__(self) -> None:
        self._by_step: dict[int, int] = {}

    def on_step(self, line: Mapping[str, Any]) -> None:
        self._by_step[line["step"]] = line["frozen_layers"]

    @property
    def in_order(self) -> list[int]:
        return [self._by_step[step] for step in range(len(self._by_step))]


def fine_tune(task: Task, policy: Policy, seed: int) -> Run:
    """Train and evaluate once."""
    noted = _Boundaries()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="worth-accuracy-") as folder:
        done = train(
            model=_model(task, policy, seed),
            data=task.samples().drawn(seed, task.count),
            training=task.training(seed, policy.share, policy.rate),
            freeze=policy.spec(task),
            pipeline=Pipeline(micro_batch_size=task.batch),
            evaluation=Evaluation(every_steps=task.whole_steps),  # and after the last step
            callbacks=[noted],
            run_dir=folder,
            progress=False,
        )
    order = EpochOrder(seed=seed, num_samples=task.count, global_batch=task.batch, num_shards=1)
    counted = work(
        noted.in_order,
        order,
        num_layers=task.model.num_layers,
        whole_steps=task.whole_steps,
        weights=not policy.adapters,
    )
    changes = tuple(_changes(noted.in_order))
    return Run(
        task=task.name,
        policy=policy.name,
        seed=seed,
        settings=settings(task, policy),
        accuracy=done.metrics["accuracy"],
        steps=done.steps,
        boundaries=changes,
        work=counted.plain,
        work_cached=counted.cached,
        thaws=sum(later[1] < earlier[1] for earlier, later in pairwise(changes)),
        seconds=time.monotonic() - began,
    )


def settings(task: Task, policy: Policy) -> str:
    """Digest of the task, its pretrained weights and the policy."""
    said = {  # without defaults, so that a new field of the spec changes nothing
        "model": task.model.model_dump(mode="json", exclude={"path"}, exclude_defaults=True),
        "weights": _digest(task.weights_file()),
        "count": task.count,
        "training": task.training(0, policy.share, policy.rate).model_dump(mode="json", exclude_defaults=True),
        "freeze": policy.spec(task).model_dump(mode="json", exclude_defaults=True),
        "adapters": policy.adapters,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


class Kept:
    """The finished runs in a file.

    Args:
        path: of the file, which is created with the first run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: dict[tuple[str, str, int, str], Run] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                fields = json.loads(line)
                self._keep(Run(**fields | {"boundaries": tuple(map(tuple, fields["boundaries"]))}))

    def find(self, task: Task, policy: Policy, seed: int) -> Run | None:
        """The run with the present settings."""
        return self._runs.get((task.name, policy.name, seed, settings(task, policy)))

    def add(self, run: Run) -> None:
        """Append a run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        self._keep(run)

    def _keep(self, run: Run) -> None:
        self._runs[run.task, run.policy, run.seed, run.settings] = run


def _model(task: Task, policy: Policy, seed: int) -> Model | Callable[[], PipelineModel]:
    """The spec where the product loads the weights itself; otherwise a function that builds the model."""
    if task.weights is None and not policy.adapters:
        return task.model
    return partial(task.build, seed, adapters=policy.adapters)


def _changes(boundaries: list[int]) -> Iterator[tuple[int, int]]:
    last = None
    for step, boundary in enumerate(boundaries):
        if boundary != last:
            yield step, boundary
        last = boundary


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
