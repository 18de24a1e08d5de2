"""Records how each worker uses its cache, in `cache/<worker>.jsonl` with a line per step, and sums it up for a run."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipetransformer.errors import storing

from . import lines


class CacheLog:
    """Appends to `cache/<worker>.jsonl` of one worker."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        self.path = run_dir / "cache" / f"{worker}.jsonl"

    def append(
        self, *, step: int, epoch: int, layout_generation: int, pipelines: int, counts: Mapping[str, int]
    ) -> None:
        """Append a line.

        Args:
            step: the committed step, from 0.
            epoch: the epoch of this step, from 0.
            layout_generation: the generation that committed the step.
            pipelines: number of pipelines (R).
            counts: samples since the last line by outcome, from `ActivationCache.take_counts`.
        """
        with storing(f"the run's record in {self.path}"):
            self.path.parent.mkdir(exist_ok=True)
        place = {"step": step, "epoch": epoch, "layoutGeneration": layout_generation, "pipelines": pipelines}
        lines.append(self.path, {**place, **counts})


def cache_summary(run_dir: Path) -> list[dict[str, Any]]:
    """Sum up the cache's use: for each epoch and number of pipelines, the samples by outcome and the share of hits."""
    sums: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for path in (run_dir / "cache").glob("*.jsonl"):
        for line in lines.read(path):
            sums[line["epoch"], line["pipelines"]].update(
                {count: line[count] for count in ("hits", "advanced", "computed")}
            )
    return [
        {"epoch": epoch, "pipelines": pipelines, **counts, "hit_rate": counts["hits"] / max(1, counts.total())}
        for (epoch, pipelines), counts in sorted(sums.items())
    ]
