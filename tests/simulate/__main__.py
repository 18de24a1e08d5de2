"""Live many lives, and say which rules were broken. Exits 1 if any was."""

import argparse
import gc
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from .draw import draw
from .life import live
from .scenario import Scenario
from .shrink import as_test, shrink

_CHUNK = 20
#: Lives that are lived again in two other processes, to compare their traces.
_TWICE = 6
_SHOWN = 5


def broken(scenario: Scenario) -> list[str]:
    """What is wrong in a life; an error of the simulation itself counts, too."""
    try:
        return live(scenario).violations
    except RuntimeError as error:
        return [f"simulation: {error}"]


def rules(scenario: Scenario) -> set[str]:
    """The rules that are broken in a life."""
    return {violation.partition(":")[0] for violation in broken(scenario)}


def live_some(seeds: range) -> list[tuple[int, list[str]]]:
    """Lives these lives. Returns the seeds of those in which something is wrong, and what."""
    found = [(seed, violations) for seed in seeds if (violations := broken(draw(seed)))]
    gc.collect()
    return found


def digests(seeds: range) -> list[str]:
    """The traces of these lives."""
    return [live(draw(seed)).digest for seed in seeds]


def same_trace(first: int) -> bool:
    """Whether the same seeds give the same traces in two processes whose hashes of texts differ."""
    said = []
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.simulate", "--first", str(first), "--digests"]
        said.append(subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True))
    return said[0].stdout == said[1].stdout


def _chunks(first: int, lives: int) -> Iterator[range]:
    for start in range(first, first + lives, _CHUNK):
        yield range(start, min(start + _CHUNK, first + lives))


def _quiet() -> None:
    logging.disable(logging.CRITICAL)


def _report(found: list[tuple[int, list[str]]]) -> None:
    for seed, violations in found[:_SHOWN]:
        print(f"\nseed {seed}: {violations[0]}\n  again: make simulate LIVES=1 SEED={seed}\n")
        print(as_test(shrink(draw(seed), rules)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--lives", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed; each life has the next one")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--digests", action="store_true", help="only print the traces of a few lives")
    parser.add_argument("--until-found", action="store_true", help="end at the first broken rule, and do not shrink")
    arguments = parser.parse_args()
    _quiet()
    if arguments.digests:
        print("\n".join(digests(range(arguments.first, arguments.first + _TWICE))))
        return 0
    found: list[tuple[int, list[str]]] = []
    began, done = time.monotonic(), 0
    gc.freeze()  # what is imported stays
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        for some in pool.imap_unordered(live_some, _chunks(arguments.first, arguments.lives)):
            done, found = min(done + _CHUNK, arguments.lives), found + some
            print(f"\r{done} of {arguments.lives} lives, {len(found)} with a violation", end="", file=sys.stderr)
            if found and arguments.until_found:
                print(f"\nseed {found[0][0]}: {found[0][1][0]}")
                return 1
    print(file=sys.stderr)
    seconds, same = time.monotonic() - began, same_trace(arguments.first)
    _report(sorted(found))
    figures = {"lives": done, "violations": len(found), "seconds": round(seconds, 1), "same_trace": same}
    print(json.dumps(figures))
    return 0 if same and not found else 1


if __name__ == "__main__":
    sys.exit(main())
