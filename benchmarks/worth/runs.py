"""Whole runs on virtual devices: ours, its parts, and what a user would pick instead; they alternate round by round.

Without --full one round of the runs that have aims is measured and compared with the committed result. With it all runs
are measured five times, and the result is written. It fails if an efficiency fell.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.testkit import ROOT
from tests.testkit.results import RESULTS, commit, machine, print_table, write_result
from tools.docs.benchmarks import FIGURES, rows

from .whole import product, rivals
from .whole.case import Case
from .whole.figures import BY_NAME, fallen, figures, is_comparable
from .whole.notes import Notes
from .whole.picture import draw
from .whole.took import Took
from .whole.way import DDP_FREEZE_CACHE, ELASTIC, OFFLOAD, OFFLOAD_AUTO, RECUT_CACHE, STATIC, STATIC_AUTO, Way

NAME = "worth-runs"
_MAIN = (STATIC.name, RECUT_CACHE.name, ELASTIC.name, OFFLOAD.name)
_AUTO = (STATIC_AUTO.name, OFFLOAD_AUTO.name)
#: Ways of each case in the short form. The first case has the aims of speed-ups.
SHORT = {
    Case(8, 3): (*_MAIN, *_AUTO, DDP_FREEZE_CACHE.name, rivals.DDP_FREEZE_CACHE.name),
    Case(4, 3): (ELASTIC.name,),
    Case(16, 3): (ELASTIC.name,),
}
FULL = {
    Case(8, 3): tuple(BY_NAME),
    Case(4, 3): (*_MAIN, rivals.DDP_FREEZE_CACHE.name),
    Case(16, 3): (*_MAIN, rivals.DDP_FREEZE_CACHE.name),
    Case(16, 2): _MAIN,
    Case(8, 3, dilate=4): (STATIC.name, ELASTIC.name, *_AUTO),
}
_FULL_ROUNDS = 5
#: Processors that other programs may use during a run.
_MOST_OTHERS = 0.2


def main() -> int:
    """Measure, print, and with --full write the result."""
    asked = _arguments()
    take_precedence()
    notes = Notes(asked.keep)
    until = time.monotonic() + 60 * asked.minutes
    here = commit()
    for case, name in _due(asked, notes):
        if time.monotonic() > until:
            _say("the time is over")
            break
        took = replace(_run(case, name), commit=here)
        notes.add(case.name, name, took)
        _say(f"{case.name} {name}: {took.seconds:.1f} s, {took.gpu_seconds:.0f} GPU-seconds, {took.layout_names}")
        if (took.other_cores or 0) > _MOST_OTHERS:
            _say(f"  other programs used {took.other_cores:.2f} cores meanwhile: this run says little")
    document = {"runs": {case.name: figures(case, notes.ways(case.name)) for case in FULL if notes.ways(case.name)}}
    _print(document)
    committed = RESULTS / f"{NAME}.json"
    earlier = json.loads(committed.read_text()) if committed.exists() else {}
    now = {**document, "machine": machine()}
    problems = list(fallen(now, earlier))
    if not is_comparable(now, earlier):
        _say("no efficiency is compared, because there is no committed result of as many cores")
    if asked.full:
        first = next(iter(FULL))
        runs = {name: of_way[0] for name, of_way in notes.ways(first.name).items()}
        if not runs:
            print(f"nothing is written, because there is no run of {first.name}")
            return 1
        draw(first, runs, {name: BY_NAME[name].about for name in runs}, RESULTS / f"{NAME}.png")
        path = write_result(
            NAME, document, command=shlex.join(["python", "-m", "benchmarks.worth.runs", *sys.argv[1:]])
        )
        print(f"written to {path.relative_to(ROOT)}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def take_precedence() -> None:
    """Let no other program delay a worker that wakes, if the user may. All runs inherit it."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        _say("without root other programs may delay workers")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.worth.runs", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all runs, five rounds; writes the result")
    parser.add_argument("--rounds", type=int, help="runs of each way")
    parser.add_argument("--case", choices=[case.name for case in FULL], action="append", help="may be repeated")
    parser.add_argument("--only", choices=BY_NAME, action="append", help="one way, may be repeated")
    parser.add_argument("--keep", type=Path, help="a file: its runs count, and new ones are added to it")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this many minutes")
    return parser.parse_args()


def _due(asked: argparse.Namespace, notes: Notes) -> Iterator[tuple[Case, str]]:
    """The runs that are not measured yet: round by round, every second round in reverse."""
    cases = FULL if asked.full else SHORT
    for number in range(asked.rounds or (_FULL_ROUNDS if asked.full else 1)):
        for case, names in cases.items():
            if asked.case and case.name not in asked.case:
                continue
            chosen = [name for name in names if name in (asked.only or names)]
            for name in chosen if number % 2 == 0 else reversed(chosen):
                if notes.count(case.name, name) <= number:
                    yield case, name


def _run(case: Case, name: str) -> Took:
    way = BY_NAME[name]
    return product.run(case, way) if isinstance(way, Way) else rivals.run(case, way)


def _print(document: dict[str, Any]) -> None:
    """Each case's runs, then the figures with their aims."""
    for name, case in document["runs"].items():
        ways = [(way, value) for way, value in case.items() if isinstance(value, dict)]
        columns = ("seconds", "gpu_seconds", "ideal_seconds", "efficiency", "speedup_over_best_static", "layouts")
        print_table(
            f"{name}: {case['gpus']} GPUs of {case['trained_layers_that_fit']} layers, {case['rounds']} rounds",
            ["run", "", *(column.replace("_", " ") for column in columns)],
            [[way, value["about"], *(value.get(column, "") for column in columns)] for way, value in ways],
        )
    found = [row for figure in FIGURES[NAME] for row in rows(figure, document)]
    print_table("Figures", ["", "figure", "measured", "aim", ""], found)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
