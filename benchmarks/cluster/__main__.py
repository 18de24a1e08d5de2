"""`make bench-cluster`: what each way to run elastic jobs costs, by load and by the share of jobs that freeze.

Assumptions: GPUs are alike, links and cache reads are free, nothing fails, and jobs are placed anywhere. Each elastic
job is a pipeline of twelve equal layers of which a GPU trains three, so it never fits one GPU before layers freeze.
Freezing costs no accuracy. A job that waits starts once its GPUs are free; a smaller one may go ahead of it.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.testkit import ROOT
from tests.testkit.results import print_table, write_result

from . import picture
from .delays import Delays, measured
from .metrics import figures, summary
from .policies import AUTO, AUTO_RESIDENT, POLICIES, POLLUX, RELEASE_STARTING, STATIC, WIDEN, Policy
from .simulation import simulate
from .trace import draw

LOADS = (0.7, 0.9, 1.2, 1.5)
SHARES = (0.10, 0.25, 0.50, 1.0)
#: Where one case stands for all.
LOAD, SHARE = 0.9, 0.25
#: All loads at that share, and all shares at that load and at the highest.
CELLS = tuple((share, load) for share in SHARES for load in LOADS if share == SHARE or load in (LOAD, LOADS[-1]))
#: A GPU's model is larger than those that the pauses were measured with.
SLOW = Delays(start=120.0, pause=30.0, checkpoint=60.0, delete=5.0)
_BY_PLAN = (WIDEN, RELEASE_STARTING, AUTO)
#: Figures of the tables.
_SHOWN = (
    "gpu_hours_ratio",
    "jct_hours_all",
    "jct_hours_elastic",
    "jct_p95_hours_all",
    "queue_hours_all",
    "queue_p99_hours_all",
    "slowdown_p99",
    "utilisation",
    "regroups_per_hour",
)


@dataclass(frozen=True, slots=True)
class Case:
    """Jobs, and who runs them.

    Attributes:
        slow: whether changes of layout and starts take as long as with large models.
    """

    policy: Policy
    share: float
    load: float
    seed: int
    jobs: int
    gpus: int
    daily: bool = False
    slow: bool = False
    by_plan: bool = False

    @property
    def name(self) -> str:
        """It in words."""
        ways = [word for word in ("daily", "slow", "by_plan") if getattr(self, word)]
        where = f"share {self.share:g}, load {self.load:g}, seed {self.seed}, {self.jobs} jobs, {self.gpus} GPUs"
        return ", ".join([self.policy.name, where, *ways])

    def run(self) -> tuple[dict[str, float], float]:
        """Its figures, and the processor's seconds that they took."""
        jobs = draw(self.jobs, self.gpus, load=self.load, share_freezing=self.share, seed=self.seed, daily=self.daily)
        before = time.process_time()
        runs = simulate(self.policy, jobs, self.gpus, SLOW if self.slow else measured(), by_plan=self.by_plan)
        return figures(runs, self.gpus), time.process_time() - before


def equal_by_plan(seed: int = 0) -> bool:
    """Whether `plan()` and its parts give 200 jobs, half of them elastic, the same layouts at the same times."""
    jobs = draw(200, 128, load=1.2, share_freezing=0.5, seed=seed, share_elastic=0.5)
    for policy in _BY_PLAN:
        parts, planned = (simulate(policy, jobs, 128, measured(), by_plan=by_plan) for by_plan in (False, True))
        if [run.layouts for run in parts] != [run.layouts for run in planned]:
            return False
    return True


class Results:
    """The figures of all cases: by policy, share, load and seed.

    Args:
        cases: to simulate.
        processes: that simulate them.
        keep: a file of cases that were simulated before by the same code, which more are added to.
    """

    def __init__(self, cases: Sequence[Case], processes: int, keep: Path | None) -> None:
        kept = {} if keep is None or not keep.exists() else dict(map(json.loads, keep.read_text().splitlines()))
        missing = [case for case in cases if case.name not in kept]
        with ProcessPoolExecutor(processes) as pool:
            running = {pool.submit(case.run): case.name for case in missing}
            for done in as_completed(running):
                name = running[done]
                kept[name] = done.result()
                print(f"{name}: {kept[name][1]:.0f} s", file=sys.stderr)
                if keep is not None:
                    with keep.open("a") as file:
                        file.write(json.dumps([name, kept[name]]) + "\n")
        self._found: dict[Case, Mapping[str, float]] = {case: kept[case.name][0] for case in cases}
        self._seconds = {case: float(kept[case.name][1]) for case in cases}

    def slowest_seconds(self, *, by_plan: bool) -> float:
        """Processor's seconds of the longest simulation."""
        return max(seconds for case, seconds in self._seconds.items() if case.by_plan == by_plan)

    def one(self, case: Case) -> Mapping[str, float]:
        """The figures of one case."""
        found: Mapping[str, float] = self._found[_key(case)]
        return found

    def cell(self, policy: Policy, case: Case, seeds: Sequence[int]) -> dict[str, Any]:
        """Means, deviations and ratios of a policy."""
        ours, static, pollux = (
            [self.one(replace(case, policy=one, seed=seed)) for seed in seeds] for one in (policy, STATIC, POLLUX)
        )
        cell: dict[str, Any] = summary(ours)
        for name, figure, rival in (
            ("gpu_hours_ratio", "gpu_hours", static),
            ("gpu_hours_elastic_ratio", "gpu_hours_elastic", static),
            ("jct_ratio", "jct_hours_all", static),
            ("queue_ratio", "queue_hours_all", static),
            ("jct_ratio_to_pollux", "jct_hours_all", pollux),
            ("jct_elastic_ratio_to_pollux", "jct_hours_elastic", pollux),
        ):
            cell[name] = _ratio([one[figure] for one in ours], [one[figure] for one in rival])
            cell[f"{name}_by_seed"] = [
                _ratio([one[figure]], [other[figure]]) for one, other in zip(ours, rival, strict=True)
            ]
        return cell


def _key(case: Case) -> Case:
    """The case, whose share of jobs that freeze matters only to policies under which they do."""
    return case if case.policy.freezes else replace(case, share=0.0)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Our mean over theirs; None if theirs is nothing."""
    return sum(ours) / sum(theirs) if sum(theirs) else None


def _policies(load: float) -> Sequence[Policy]:
    """Those that are compared at a load; what a part of one policy is worth only at one load."""
    return [policy for policy in POLICIES if policy is not AUTO_RESIDENT or load == LOAD]


def cases(seeds: Sequence[int], jobs: int, gpus: int) -> Iterator[Case]:
    """All simulations, each once, and one of them by `plan()`."""
    yield _by_plan(jobs, gpus)
    for seed in seeds:
        for share, load in CELLS:
            for policy in _policies(load):
                if policy.freezes or share == SHARE:
                    yield _key(Case(policy, share, load, seed, jobs, gpus))
        for policy in POLICIES:
            usual = _key(Case(policy, SHARE, LOAD, seed, jobs, gpus))
            yield from (replace(usual, daily=True), replace(usual, slow=True))


def _by_plan(jobs: int, gpus: int) -> Case:
    return Case(AUTO, SHARE, LOAD, 0, jobs, gpus, by_plan=True)


def tables(results: Results, seeds: Sequence[int], jobs: int, gpus: int) -> dict[str, Any]:
    """The cells by share, load and policy, and those of the two special cases."""
    found: dict[str, Any] = {}
    for share, load in CELLS:
        case = Case(STATIC, share, load, seeds[0], jobs, gpus)
        cells = {policy.name: results.cell(policy, case, seeds) for policy in _policies(load)}
        found.setdefault(_share(share), {})[_load(load)] = cells
    usual = Case(STATIC, SHARE, LOAD, seeds[0], jobs, gpus)
    for name, case in (("daily", replace(usual, daily=True)), ("slow", replace(usual, slow=True))):
        found[name] = {policy.name: results.cell(policy, case, seeds) for policy in POLICIES}
    return found


def _share(share: float) -> str:
    return f"share{round(100 * share)}"


def _load(load: float) -> str:
    return f"load{round(10 * load):02}"


def show_all(found: Mapping[str, Any]) -> None:
    """Prints a table for each share and load, and for the special cases."""
    for share, load in CELLS:
        show(f"{_share(share)}, {_load(load)}", found[_share(share)][_load(load)])
    for name in ("daily", "slow"):
        show(name, found[name])


def show(title: str, cells: Mapping[str, Any]) -> None:
    """Prints one table: a row a policy."""
    rows = [[name, *(_shown(cell[figure]) for figure in _SHOWN)] for name, cell in cells.items()]
    print_table(title, ["policy", *_SHOWN], rows)


def _shown(value: Any) -> Any:
    return value["mean"] if isinstance(value, dict) else value


def main() -> int:
    """Simulates all cases and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--gpus", type=int, default=1_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="file of simulations to go on from, made by the same code")
    parser.add_argument("--dry", action="store_true", help="write no result")
    arguments = parser.parse_args()
    seeds, jobs, gpus = range(arguments.seeds), arguments.jobs, arguments.gpus
    results = Results(list(cases(seeds, jobs, gpus)), arguments.processes, arguments.keep)
    equal = equal_by_plan()
    seconds = {name: results.slowest_seconds(by_plan=name == "plan") for name in ("fast", "plan")}
    found = tables(results, seeds, jobs, gpus)
    show_all(found)
    print(f"plan() and its parts give the same layouts: {equal}")
    print(f"the longest simulation took {seconds['fast']:.0f} s, by plan() {seconds['plan']:.0f} s")
    if not arguments.dry:
        checks = {
            "fast_equals_plan": equal,
            **{f"seconds_{name}": taken for name, taken in seconds.items()},
            "by_plan": results.one(_by_plan(jobs, gpus)),
        }
        document = {
            "cluster": {**found, **checks},
            "policies": {policy.name: policy.words for policy in POLICIES},
            "jobs": jobs,
            "gpus": gpus,
            "seeds": list(seeds),
            "delays": asdict(measured()),
            "slow_delays": asdict(SLOW),
            "assumptions": [" ".join(one.split()) for one in (__doc__ or "").split("\n\n")[1:]],
        }
        path = write_result("worth-cluster", document, command="make bench-cluster")
        picture.draw(found, SHARES, LOADS, (_share(SHARE), _load(LOAD)), path.with_suffix(".png"))
        print(f"written to {path.relative_to(ROOT)} and {path.stem}.png")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
