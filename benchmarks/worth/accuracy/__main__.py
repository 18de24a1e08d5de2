"""Run what is missing, then print the tables; with `--full` also write the results.

The short form has three seeds of few policies of the near and the far task. The full form has everything, and takes
about two hours of one core. It may be stopped any time: finished runs are kept in the user's cache folder. With
`--tasks` it only keeps runs, because the results have all tasks.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import torch
import transformers

from benchmarks.worth import data
from tests.testkit import ROOT
from tests.testkit.results import RESULTS, print_table, write_result

from .picture import draw
from .plan import CHOOSING, CONFIRMING, PARTS, Part, short
from .policies import FEWER_EPOCHS, NONE, PAPER, TOP, Policy
from .report import Row, Table, over_tasks
from .runs import Kept, fine_tune
from .tasks import Task


class Bench:
    """Runs what the file lacks, until the time is over.

    Args:
        kept: the finished runs.
        deadline: `time.monotonic()` after which no run begins.
    """

    def __init__(self, kept: Kept, deadline: float) -> None:
        self._kept = kept
        self._deadline = deadline

    def run(self, task: Task, policy: Policy, seed: int) -> None:
        if self._kept.find(task, policy, seed) is not None or time.monotonic() > self._deadline:
            return
        run = fine_tune(task, policy, seed)
        self._kept.add(run)
        print(
            f"{task.name} {policy.name} seed {seed}: {run.accuracy:.2%}, work {run.work:.2f}, with cache"
            f" {run.work_cached:.2f}, {run.seconds:.0f} s",
            flush=True,
        )

    def table(self, part: Part, task: Task, seeds: Sequence[int]) -> Table:
        """The runs that there are."""
        rows = []
        for policy in part.policies(task):
            found = {seed: self._kept.find(task, policy, seed) for seed in seeds}
            rows.append(Row(policy, {seed: run for seed, run in found.items() if run is not None}))
        return Table([row for row in rows if row.runs], part.work_limit, CHOOSING, CONFIRMING)

    def confirm(self, part: Part, task: Task) -> None:
        """Run what confirms the recommended setting: it, its rivals, and the paper's own schedule, on new seeds."""
        table = self.table(part, task, CHOOSING)
        best = table.recommended() if NONE in table.rows else None
        if best is None:
            return
        wanted = [row.policy for row in table.rows.values() if _confirms(row, best)]
        for seed in CONFIRMING:
            for policy in wanted:
                self.run(task, policy, seed)


def _confirms(row: Row, best: Row) -> bool:
    """Whether the row is run on the confirming seeds, too: top-n only where its work is near the recommended one's."""
    near = abs(row.work_cached - best.work_cached) < 0.2
    return (
        row.policy.name in (best.policy.name, NONE, PAPER)
        or row.policy.family == FEWER_EPOCHS
        or (row.policy.family == TOP and near)
    )


def _made(part: Part) -> Task | None:
    """The task, or None with a word on why there is none."""
    try:
        task = part.make()
        task.samples()
        task.weights_file()
    except data.UnreachableError as error:
        print(f"{part.name} is skipped: {error}", flush=True)
        return None
    return task


def _print(part: Part, table: Table) -> None:
    names = [policy for policy in table.rows if policy != NONE]
    figures = table.figures()
    rows = [
        [
            name,
            len(figures[name]["seeds"]),
            f"{figures[name]['mean']:.2f} ± {figures[name]['std']:.2f}",
            f"{figures[name]['difference']:+.2f}",
            "-" if figures[name]["difference_low95"] is None else f"{figures[name]['difference_low95']:+.2f}",
            f"{figures[name]['work']:.2f}",
            f"{figures[name]['work_cached']:.2f}",
            figures[name]["thaws"],
        ]
        for name in (NONE, *names)
    ]
    columns = ["policy", "seeds", "accuracy %", "difference", "low 95 %", "work", "cached", "thaws"]
    print_table(f"{part.name}: accuracy of held-out samples", columns, rows)
    for key, found in figures.items():
        if key == "recommended":
            print(f"recommended: {found['policy']}, confirmed: {found['confirmed']}, {found['difference']:+.2f} points")
        elif "_at_equal_work" in key:
            low = found["low95"]
            print(f"{key}: {found['mean']:+.2f}, low 95 % {'-' if low is None else f'{low:+.2f}'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all policies, tasks and seeds, and write the results")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run later than that")
    parser.add_argument("--tasks", nargs="+", choices=[part.name for part in PARTS], help="only these")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # a sum does not depend on the number of cores
    kept = Kept(data.folder() / "accuracy.jsonl")
    bench = Bench(kept, time.monotonic() + 60 * arguments.minutes)
    parts = [(part, CHOOSING) for part in PARTS] if arguments.full else list(short())
    made = [
        (part, task, seeds)
        for part, seeds in parts
        if (not arguments.tasks or part.name in arguments.tasks) and (task := _made(part)) is not None
    ]
    for seed in CHOOSING:  # all tasks have a seed before any has the next one
        for part, task, seeds in made:
            for policy in part.policies(task)[: len(part.core)]:
                if seed in seeds:
                    bench.run(task, policy, seed)
    if arguments.full:
        for part, task, _ in made:
            bench.confirm(part, task)
            for seed in CHOOSING:
                for policy in part.policies(task)[len(part.core) :]:
                    bench.run(task, policy, seed)
    tables = {}
    for part, task, seeds in made:
        table = bench.table(part, task, (*CHOOSING, *CONFIRMING) if arguments.full else seeds)
        if NONE in table.rows:
            _print(part, table)
            tables[part] = (task, table)
    if not tables:
        print("nothing was run, so there is nothing to compare")
        return 1
    if arguments.full and not arguments.tasks:
        draw({part.name: table for part, (_, table) in tables.items()}, RESULTS / "worth-accuracy.png")
        accuracy = {part.name: _said(part, *tables[part]) for part in tables}
        path = write_result(
            "worth-accuracy",
            {"accuracy": accuracy, "over_tasks": over_tasks(accuracy)},
            command="make bench-worth-accuracy FULL=1",
        )
        print(f"written to {path.relative_to(ROOT)}")
    return 0


def _said(part: Part, task: Task, table: Table) -> dict[str, object]:
    missing = [policy.name for policy in part.policies(task) if policy.name not in table.rows]
    return table.figures() | {
        "minus_fewer_epochs_at_equal_work": table.equal_work(),
        "not_run": missing,
        "setting": {
            "layers": task.model.num_layers,
            "training_samples": task.count,
            "held_out_samples": int(task.samples().held_out.sum()),
            "epochs": task.epochs,
            "batch": task.batch,
            "learning_rate": task.learning_rate,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
