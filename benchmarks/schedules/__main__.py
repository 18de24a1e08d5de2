"""Schedules against what one would run without them, on virtual devices; baselines alternate in the same run.

A bound is of the median over pairs of blocks, at 95 %: the lower one where more is better, else the upper one.
"""

import argparse
import importlib
import time
from typing import Any

from tests.testkit.results import print_table, write_result

from .part import Found

#: Modules of this room with `run(pairs) -> Found`, and the pairs that each runs. Five are the fewest for a bound.
PARTS = {"proofs": 0, "stock": 30, "zero_bubble": 8, "ahead": 8, "terapipe": 8, "auto": 5}


def main() -> None:
    """Run the parts; with all of them, write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.schedules", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="one part, may be repeated; nothing is written")
    parser.add_argument("--pairs", type=int, help="pairs of blocks in each part, at least 5")
    asked = parser.parse_args()
    found = [_run(name, asked.pairs or pairs) for name, pairs in PARTS.items() if name in (asked.only or PARTS)]
    document = merged(found)
    print_table("Figures", ["key", "measured"], [[key, value] for key, value in document.items() if key != "ways"])
    if not asked.only:
        write_result("schedules", document)


def merged(found: list[Found]) -> dict[str, Any]:
    """One document: figures by key, the worst error of prediction, and what each way took."""
    errors = {name: error for part in found for name, error in part.errors.items()}
    document: dict[str, Any] = {key: value for part in found for key, value in part.figures.items()}
    if errors:
        document["prediction_error"] = max(errors.values())
        document["prediction_errors"] = errors
    document["ways"] = {case: ways for part in found for case, ways in part.ways.items()}
    return document


def _run(name: str, pairs: int) -> Found:
    """Run a part and print what it found."""
    begun = time.perf_counter()
    print(f"{name}: {pairs} pairs ...", flush=True)
    found: Found = importlib.import_module(f".{name}", __package__).run(pairs)
    for case, ways in found.ways.items():
        columns = list(next(iter(ways.values())))
        print_table(f"{name}: {case}, seconds", ["", *columns], [[way, *row.values()] for way, row in ways.items()])
    print(f"{name}: done in {time.perf_counter() - begun:.0f} s", flush=True)
    for key, value in found.figures.items():
        print(f"  {key} {value:.3f}", flush=True)
    return found


if __name__ == "__main__":
    main()
