"""A worker's cache through the generations of its job: logs its use, and hands entries to workers that need them."""

import datetime
import logging
from pathlib import Path

from pipetransformer.data import shards_of
from pipetransformer.elastic.transport.groups import Store
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.job.job import Job
from pipetransformer.job.make_cache import make_cache
from pipetransformer.metrics import Meter
from pipetransformer.record import CacheLog
from pipetransformer.state.layout import StageLayout

logger = logging.getLogger(__name__)

#: A leaver keeps its accelerator at most this long to save others a computation.
_HANDOVER_TIMEOUT = datetime.timedelta(seconds=10)


class WorkerCache:
    """One worker's cache. It does nothing if the job has none.

    Attributes:
        activations: for the runner of a first stage; None without a cache.
    """

    def __init__(self, job: Job, worker: str, run_dir: Path, meter: Meter) -> None:
        self._job = job
        self._meter = meter
        self._log = CacheLog(run_dir, worker)
        self.activations = make_cache(job, worker)

    def listen(self, layout: StageLayout, store: Store, address: str) -> None:
        """As the first worker of a pipeline, receive entries of its samples at `address`, and tell the others where."""
        listens_at = "" if self.activations is None else self.activations.listen(address)
        store.set(f"cache/{layout.pipeline}", listens_at)

    def holds_epoch(self, layout: StageLayout, layers: int) -> bool:
        """Whether the cache of this pipeline's first worker has what the first `layers` layers, or more, make of every
        sample that the pipeline uses in an epoch, and reading was measured to be quicker."""
        if self.activations is None:
            return False
        order, shards = self._job.order, shards_of(layout.pipeline, layout.pipelines, self._job.order.num_shards)
        return self.activations.holds(
            "train",
            sum(map(order.shard_size, shards)),
            first_trainable(layers),
            lambda sample: order.shard(sample) in shards,
        )

    def measure_again(self) -> None:
        """Measure computing again, because the frozen layers now lie elsewhere."""
        if self.activations is not None:
            self.activations.measure_again()

    def note(self, step: int, layout: StageLayout) -> None:
        """Log the use of the cache in the newest committed step."""
        counts = self.activations.take_counts() if self.activations is not None else {}
        if counts:
            self._meter.on_cached(counts)
            self._log.append(
                step=step,
                epoch=self._job.order.epoch(step),
                layout_generation=layout.number,
                pipelines=layout.pipelines,
                counts=counts,
            )

    def hand_over(self, layout: StageLayout, store: Store) -> None:
        """Send entries to the pipelines that now use their samples. All of these listen already."""
        self._send(layout.pipelines, layout.pipeline if layout.is_first else None, store)

    def leave(self, pipelines: int, store: Store) -> None:
        """As a leaver, hand over all entries. No worker waits for this, and it takes seconds at most."""
        if self.activations is None:
            return
        try:
            store.wait([f"cache/{pipeline}" for pipeline in range(pipelines)], _HANDOVER_TIMEOUT)
            self._send(pipelines, None, store)
        except RuntimeError as error:
            logger.warning("cached activations are lost: %s", error)
        self.activations.wait_until_handed_over(_HANDOVER_TIMEOUT.total_seconds())

    def close(self) -> None:
        """Delete all entries."""
        if self.activations is not None:
            self.activations.close()

    def _send(self, pipelines: int, own: int | None, store: Store) -> None:
        if self.activations is None:
            return
        self.activations.hand_over(
            lambda key: self._job.user(key.split, key.sample, pipelines),
            own,
            lambda pipeline: store.get(f"cache/{pipeline}").decode(),
        )
