"""The figures of a task: each policy against the run with nothing frozen, and the recommended one at equal work."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .paired import Difference, Point, at_equal_work, difference
from .policies import FEWER_EPOCHS, NONE, TOP, TRIAL, Policy
from .runs import Run


@dataclass(frozen=True)
class Row:
    """The runs of one policy, by seed."""

    policy: Policy
    runs: Mapping[int, Run]

    def accuracy(self, seeds: Collection[int] | None = None) -> dict[int, float]:
        """In percent, by seed."""
        return {seed: 100 * run.accuracy for seed, run in self.runs.items() if seeds is None or seed in seeds}

    @property
    def work(self) -> float:
        """Mean of the runs, without cache."""
        return statistics.mean(run.work for run in self.runs.values())

    @property
    def work_cached(self) -> float:
        """Mean of the runs, with cache."""
        return self.work_cached_of(self.runs)

    def work_cached_of(self, seeds: Collection[int]) -> float:
        """The same of some seeds."""
        return statistics.mean(run.work_cached for seed, run in self.runs.items() if seed in seeds)

    def figures(self, none: "Row", seeds: Sequence[int] | None = None) -> dict[str, Any]:
        """Accuracy and its standard deviation in percent, and the paired difference to `none` in points.

        Work is the mean of all runs of the policy; everything else is of `seeds`.
        """
        found = self.accuracy(seeds)
        paired = difference(found, none.accuracy(seeds))
        return {
            "mean": statistics.mean(found.values()),
            "std": statistics.stdev(found.values()) if len(found) > 1 else 0.0,
            "seeds": sorted(found),
            "difference": paired.mean,
            "difference_low95": finite(paired.low95),
            "work": self.work,
            "work_cached": self.work_cached,
            "thaws": sum(self.runs[seed].thaws for seed in found),
        }


class Table:
    """All rows of a task.

    Args:
        rows: rows that have runs.
        work_limit: the most work, with cache, of a setting that may be recommended.
        choosing: seeds that the recommended setting is chosen on.
        confirming: seeds whose figures are then reported for it, if they were run.
    """

    def __init__(
        self, rows: Sequence[Row], work_limit: float, choosing: Sequence[int], confirming: Sequence[int]
    ) -> None:
        self.rows = {row.policy.name: row for row in rows}
        self._work_limit = work_limit
        self._choosing, self._confirming = choosing, confirming

    @property
    def none(self) -> Row:
        return self.rows[NONE]

    def recommended(self) -> Row | None:
        """The freeze policy with the best mean of the choosing seeds, among those within the limit of work."""
        wanted = self.none.accuracy(self._choosing).keys()
        candidates = [
            row
            for row in self.rows.values()
            if row.policy.family in ("freeze", "trial")
            and row.accuracy(self._choosing).keys() >= wanted
            and row.work_cached_of(wanted) <= self._work_limit
        ]
        return max(
            candidates, key=lambda row: (statistics.mean(row.accuracy(wanted).values()), -row.work_cached_of(wanted)),
            default=None,
        )  # fmt: skip

    def rivals(self, row: Row, family: str, *, cached: bool = True) -> dict[int, float]:
        """The best accuracies of a family, by seed, with as much work as the row's."""
        seeds = sorted(self._reported(row))
        curve = [
            Point(other.work_cached if cached else other.work, other.accuracy(seeds))
            for other in self.rows.values()
            if other.policy.family in (family, NONE)
        ]
        return at_equal_work(curve, row.work_cached if cached else row.work, seeds)

    def figures(self) -> dict[str, Any]:
        """All figures of the task."""
        found: dict[str, Any] = {name: row.figures(self.none) for name, row in self.rows.items()}
        found["trial_minus_no_trial"] = self._trials()
        best = self.recommended()
        if best is None:
            return found
        seeds = self._reported(best)
        found["recommended"] = {
            "policy": best.policy.name,
            "confirmed": set(seeds) <= set(self._confirming),
            **best.figures(self.none, seeds),
        }
        for name, family in (("fewer_epochs", FEWER_EPOCHS), ("best_top_n", TOP)):
            for suffix, cached in (("", True), ("_without_cache", False)):
                rival = self.rivals(best, family, cached=cached)
                if rival:
                    key = f"recommended_minus_{name}_at_equal_work{suffix}"
                    found[key] = said(difference(best.accuracy(seeds), rival))
        return found

    def equal_work(self) -> dict[str, Any]:
        """Each freeze policy less fewer epochs at equal work, with cache, over all its seeds."""
        found = {}
        for name, row in self.rows.items():
            if row.policy.family not in ("freeze", "trial", TOP, "lora"):
                continue
            seeds = sorted(row.runs.keys() & self.none.runs.keys())
            curve = [
                Point(other.work_cached, other.accuracy(seeds))
                for other in self.rows.values()
                if other.policy.family in (FEWER_EPOCHS, NONE)
            ]
            rival = at_equal_work(curve, row.work_cached, seeds)
            if rival:
                found[name] = said(difference(row.accuracy(), rival))
        return found

    def _reported(self, row: Row) -> Sequence[int]:
        """The confirming seeds, if the row, nothing frozen and fewer epochs were run with all of them; otherwise those
        it was chosen on. Top-n policies that lack one of these seeds are no rivals."""
        wanted = set(self._confirming)
        shorter = [other for other in self.rows.values() if other.policy.family in (FEWER_EPOCHS, NONE)]
        done = all(other.runs.keys() >= wanted for other in (row, *shorter) if other.runs)
        return sorted(wanted if wanted and done else row.runs.keys() & set(self._choosing))

    def _trials(self) -> dict[str, Any]:
        """Each policy on trial less the same without, and the mean of all."""
        pairs = {}
        for name, row in self.rows.items():
            on_trial = self.rows.get(f"{name}{TRIAL}")
            if on_trial is not None:
                pairs[name] = (on_trial, row)
        if not pairs:
            return {}
        seeds = set.intersection(*(set(a.runs) & set(b.runs) for a, b in pairs.values()))
        means = [
            {seed: statistics.mean(pair[side].accuracy()[seed] for pair in pairs.values()) for seed in seeds}
            for side in (0, 1)
        ]
        by_policy = {
            name: said(difference(one.accuracy(), other.accuracy()))
            | {
                "thaws": sum(run.thaws for run in one.runs.values()),
                "work_cached": one.work_cached,
                "work_cached_no_trial": other.work_cached,
            }
            for name, (one, other) in pairs.items()
            if one.runs.keys() & other.runs.keys()
        }
        whole = said(difference(*means)) if seeds else {}
        return whole | {"thaws": sum(one["thaws"] for one in by_policy.values()), "by_policy": by_policy}


def over_tasks(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """For each rival at equal work: the best bound of a task, which says whether freezing wins anywhere, and the worst
    mean, which says what it can cost."""
    found = {}
    for rival in ("fewer_epochs", "best_top_n"):
        key = f"recommended_minus_{rival}_at_equal_work"
        tasks = [task[key] for task in figures.values() if key in task and task[key]["low95"] is not None]
        if tasks:
            found[key] = {"best_low95": max(t["low95"] for t in tasks), "worst_mean": min(t["mean"] for t in tasks)}
    return found


def said(found: Difference) -> dict[str, Any]:
    """A difference in points, as the results have it."""
    return {"mean": found.mean, "low95": finite(found.low95), "seeds": list(found.seeds)}


def finite(value: float) -> float | None:
    """None for a bound that too few seeds give."""
    return value if math.isfinite(value) else None
