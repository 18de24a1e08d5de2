"""A worker's cache of frozen layers' outputs, through all generations: logs how it is used, and sends entries to the
workers that need them next."""

import datetime
import logging
from pathlib import Path

from pipetransformer.cache import ActivationCache
from pipetransformer.data import shards_of
from pipetransformer.elastic.transport.groups import Store
from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.job.job import Job
from pipetransformer.job.make_cache import make_cache, warn_of_changes
from pipetransformer.metrics import Meter
from pipetransformer.record import CacheLog
from pipetransformer.state.layout import StageLayout

logger = logging.getLogger(__name__)

#: A leaver waits at most this long for the addresses of other workers, and again as long until its entries are sent.
_HANDOVER_TIMEOUT = datetime.timedelta(seconds=10)


class WorkerCache:
    """One worker's cache. If the job has no cache, it keeps and sends no entries.

    Attributes:
        activations: the cache itself, which the runner of a first stage reads and fills; None if the job has none.
    """

    def __init__(self, job: Job, worker: str, run_dir: Path, meter: Meter) -> None:
        self._job = job
        self._meter = meter
        self._log = CacheLog(run_dir, worker)
        self.activations: ActivationCache | None = make_cache(job)

    def close_if_inputs_change(self) -> None:
        """Close the cache if another worker saw inputs change. Otherwise only some pipelines would cache."""
        if self.activations is not None and self._job.inputs_change:
            warn_of_changes()
            self.close()
            self.activations = None

    def listen(self, layout: StageLayout, store: Store, address: str) -> None:
        """Accept cache entries from other workers. The first worker of each pipeline calls this.

        Args:
            layout: layout of the generation.
            store: gets the host and port where this worker listens, by pipeline; empty if the job has no cache.
            address: the host to listen on.
        """
        listens_at = "" if self.activations is None else self.activations.listen(address)
        store.set(f"cache/{layout.pipeline}", listens_at)

    def holds_epoch(self, layout: StageLayout, layers: int) -> bool:
        """Whether the cache makes the first `layers` layers unnecessary on the device.

        For that, it must hold the outputs of at least `layers` layers for all samples that the pipeline uses in an
        epoch. Reading them must also have been measured to be quicker than computing.
        """
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
        """Measure again how long computing takes, because frozen layers moved to host memory or back."""
        if self.activations is not None:
            self.activations.measure_again()

    def note(self, step: int, layout: StageLayout) -> None:
        """Log how the cache was used since the last call, under `step`, the newest committed step (from 0)."""
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
        """Send each entry to the pipeline that uses its sample in the new layout. Call this when the first worker of
        each pipeline has called `listen`."""
        self._send(layout.pipelines, layout.pipeline if layout.is_first else None, store)

    def leave(self, pipelines: int, store: Store) -> None:
        """Send all entries to the pipelines that use their samples. A leaver calls this; no other worker waits for it.

        It takes at most about 20 seconds. Entries that are not sent by then are lost.

        Args:
            pipelines: number of pipelines in the new layout.
            store: has the addresses of their first workers.
        """
        if self.activations is None:
            return
        try:
            store.wait([f"cache/{pipeline}" for pipeline in range(pipelines)], _HANDOVER_TIMEOUT)
            self._send(pipelines, None, store)
        except RuntimeError as error:
            logger.warning("cached activations are lost: %s", error)
        self.activations.wait_until_handed_over(_HANDOVER_TIMEOUT.total_seconds())

    def close(self) -> None:
        """Stop the cache and delete all entries."""
        if self.activations is not None:
            self.activations.close()

    def _send(self, pipelines: int, own: int | None, store: Store) -> None:
        if self.activations is None:
            return
        self.activations.hand_over(
            lambda key: self._job.dealer.pipeline_of(key.split, key.sample, pipelines),
            own,
            lambda pipeline: store.get(f"cache/{pipeline}").decode(),
        )
