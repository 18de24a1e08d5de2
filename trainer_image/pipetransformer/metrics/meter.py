"""Metrics that a worker counts while it trains, at two additions a round. Others are read by the collector."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pipetransformer_contract.messages import ResizeReason

from .names import PREFIX

_STEP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PAUSE_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
#: Label values by the names in `ActivationCache.take_counts`.
_OUTCOMES = {"hits": "Hit", "advanced": "Advanced", "computed": "Computed"}
_FAULTS = {"outOfRange": "OutOfRange", "torn": "Torn", "failedWrites": "FailedWrite"}
_TIERS = {"memoryBytes": "Memory", "diskBytes": "Disk"}


class Meter:
    """Counts one worker's metrics, as long as the worker lives. Only the training thread calls it, between rounds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._steps = Histogram(
            f"{PREFIX}_step_seconds",
            "Seconds of a committed step on this worker, from its first forward to its commit.",
            buckets=_STEP_SECONDS,
            registry=self.registry,
        )
        rounds = self._counter(
            "round_seconds",
            "Seconds of rounds on this worker, up to their vote, by activity: Computing (forwards and backwards; on a"
            " GPU by its own clock), Idle (the rest: waits for messages, the sum of gradients, the vote).",
            ("activity",),
        )
        self._computing, self._idle = rounds.labels("Computing"), rounds.labels("Idle")
        self._ahead = Gauge(
            f"{PREFIX}_frozen_ahead_share",
            "Share of the newest step's frozen forwards, in this worker's pipeline, that the step before computed.",
            registry=self.registry,
        )
        self._staleness = Gauge(
            f"{PREFIX}_weight_staleness_steps",
            "Steps that the weights of the newest step's forwards were behind, as a mean over this worker's pipeline.",
            registry=self.registry,
        )
        self._samples = self._counter("samples", "Samples of committed steps; counted by the leader, for all workers.")
        self._skipped = self._counter(
            "skipped_steps",
            "Steps without an update, because loss or gradients were not finite; counted by the leader.",
        )
        trials = self._counter(
            "freeze_trials",
            "Trials of frozen layers that ended, by outcome: Kept, Thawed; counted by the leader.",
            ("outcome",),
        )
        self._trials = {True: trials.labels("Kept"), False: trials.labels("Thawed")}
        self._pauses = Histogram(
            f"{PREFIX}_regroup_seconds",
            "Seconds without training from the last step of a layout to the first step of the next, that step included,"
            f" by reason: {', '.join(reason.value for reason in ResizeReason)}.",
            ("reason",),
            buckets=_PAUSE_SECONDS,
            registry=self.registry,
        )
        self._phases = self._counter(
            "regroup_phase_seconds", "Seconds that this worker spent in each phase of regroups.", ("phase",)
        )
        moved = self._counter(
            "moved_bytes",
            "Bytes of layers and optimizer state that went from worker to worker in regroups, by direction: Sent,"
            " Received.",
            ("direction",),
        )
        self._sent, self._received = moved.labels("Sent"), moved.labels("Received")
        self._broken = self._counter(
            "broken_generations", "Generations that broke on this worker, or that it could not join."
        )
        self._make_cache_metrics()

    def on_steps(self, steps: int, seconds: float, frozen_ahead_share: float) -> None:
        """Count the committed steps of a round, which took `seconds` each. `frozen_ahead_share` is the share of their
        frozen forwards that the round before computed."""
        for _ in range(steps):
            self._steps.observe(seconds)
        self._ahead.set(frozen_ahead_share)

    def on_staleness(self, steps: Sequence[int]) -> None:
        """Set how old the weights of the newest step's forwards were. `steps` has the age for each forward."""
        self._staleness.set(sum(steps) / len(steps) if steps else 0.0)

    def on_round(self, computing: float, seconds: float) -> None:
        """Count a round that ended with its vote. It took `seconds`; this worker computed for `computing` of them."""
        self._computing.inc(computing)
        self._idle.inc(max(0.0, seconds - computing))

    def on_step_committed(self, samples: int, *, skipped: bool) -> None:
        """On the leader, count the samples of a committed step, and whether the step was skipped."""
        self._samples.inc(samples)
        if skipped:
            self._skipped.inc()

    def on_trial(self, *, kept: bool) -> None:
        """On the leader, count a trial that ended. `kept` says whether the layers stay frozen."""
        self._trials[kept].inc()

    def on_regrouped(
        self,
        reason: ResizeReason,
        pause_seconds: float,
        phases: Mapping[str, float],
        transfers: Sequence[tuple[int, int, int]],
        rank: int,
    ) -> None:
        """Count a regroup, after the first step of the new generation.

        Args:
            reason: reason of the generation.
            pause_seconds: seconds without training.
            phases: seconds by phase.
            transfers: (source rank, target rank, bytes) of the state that moved between all workers.
            rank: rank of this worker in `transfers`.
        """
        self._pauses.labels(reason.value).observe(pause_seconds)
        for phase, seconds in phases.items():
            self._phases.labels(phase).inc(seconds)
        self._sent.inc(sum(size for source, _, size in transfers if source == rank))
        self._received.inc(sum(size for _, target, size in transfers if target == rank))

    def on_broken(self) -> None:
        """Count a generation that broke, or that this worker could not enter."""
        self._broken.inc()

    def on_cached(self, counts: Mapping[str, int]) -> None:
        """Count what the cache did since the last call. `counts` comes from `ActivationCache.take_counts`."""
        for name, counter in (*self._cached.items(), *self._faults.items()):
            if counts[name]:
                counter.inc(counts[name])
        for name, gauge in self._held.items():
            gauge.set(counts[name])

    def on_placed(self, bytes_off: int) -> None:
        """Set how many bytes of frozen layers are in host memory instead of on the device."""
        self._off_device.set(bytes_off)

    def _make_cache_metrics(self) -> None:
        cached = self._counter(
            "cache_samples",
            "Samples that entered the frozen layers here, by what became of them: Hit (read), Advanced (read at an"
            " earlier boundary and carried on), Computed.",
            ("outcome",),
        )
        self._cached = {name: cached.labels(outcome) for name, outcome in _OUTCOMES.items()}
        faults = self._counter(
            "cache_faults",
            "Entries that the cache could not keep or use, by fault: OutOfRange of cache.dtype, Torn, FailedWrite.",
            ("fault",),
        )
        self._faults = {name: faults.labels(fault) for name, fault in _FAULTS.items()}
        held = Gauge(
            f"{PREFIX}_cache_bytes",
            "Bytes that the cache of this worker holds, by tier: Memory, Disk.",
            ("tier",),
            registry=self.registry,
        )
        self._held = {name: held.labels(tier) for name, tier in _TIERS.items()}
        self._off_device = Gauge(
            f"{PREFIX}_off_device_bytes",
            "Bytes of frozen layers of this worker that lie in host memory instead of on its accelerator, because the"
            " cache has their outputs.",
            registry=self.registry,
        )

    def _counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"{PREFIX}_{name}", help_text, labels, registry=self.registry)
