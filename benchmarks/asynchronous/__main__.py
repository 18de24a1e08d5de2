"""Asynchronous schedules against synchronous ones: throughput on virtual devices, and losses and accuracy on digits."""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from tests.testkit.results import print_table, write_result

from . import accuracy, throughput

_SUFFIXES = {accuracy.ONE: "1", accuracy.SEVERAL: "k"}
#: SGD with one micro-batch a step gains little, so its bound says nothing.
_WITHOUT_BOUND = "sgd_1"


def main() -> None:
    """Run both parts, and write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.asynchronous", description=__doc__)
    parser.add_argument("--only", choices=("throughput", "accuracy"), help="one part; nothing is written")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of blocks, at least 5")
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    document: dict[str, Any] = {}
    if asked.only != "throughput":
        document |= _accuracy(range(asked.seeds))
    if asked.only != "accuracy":
        figures, table = throughput.run(asked.pairs)
        _print("seconds of a step, K=4, M=8", table)
        document |= figures | {"step_seconds": table}
    rows = [[key, value] for key, value in document.items() if not key.endswith(("cases", "seconds"))]
    print_table("Figures", ["key", "measured"], rows)
    if not asked.only:
        write_result("async", document)


def _accuracy(seeds: range) -> dict[str, Any]:
    """Figures of all cases: `distance_OPTIMIZER_1` has one micro-batch a step, `..._k` has K."""
    rates: dict[str, float] = {}
    found: dict[str, accuracy.Compared] = {}
    short: dict[str, accuracy.Compared] = {}
    with accuracy.processes() as pool:
        for optimizer in accuracy.OPTIMIZERS:
            rates[optimizer] = rate = accuracy.best_rate(pool, optimizer, seeds[:2])
            settings = {
                f"{optimizer}_{suffix}": accuracy.Setting(optimizer, rate, micro_batches)
                for micro_batches, suffix in _SUFFIXES.items()
            }
            found |= _compared(pool, settings, list(accuracy.WAYS), seeds)
            ends = {name: replace(setting, epochs=accuracy.SHORT_EPOCHS) for name, setting in settings.items()}
            short |= _compared(pool, ends, [accuracy.SYNCHRONOUS, accuracy.NEWEST, accuracy.PREDICTED], seeds)
    losses = {name: case.accuracy_loss(accuracy.PREDICTED) for name, case in found.items()}
    bounded = {name: case for name, case in found.items() if name != _WITHOUT_BOUND}
    return {
        **{f"distance_{name}": case.ratio(accuracy.PREDICTED) for name, case in found.items()},
        "accuracy_loss_k": max(loss for name, loss in losses.items() if name.endswith("_k")),
        "upper_bounds": {name: case.upper_bound(accuracy.PREDICTED) for name, case in bounded.items()},
        "distances_further": {name: case.ratio(accuracy.FURTHER) for name, case in found.items()},
        "distances_stashed": {name: case.ratio(accuracy.STASHED) for name, case in found.items()},
        "accuracy_losses": losses,
        "distances_short": {name: case.ratio(accuracy.PREDICTED) for name, case in short.items()},
        "accuracy_losses_short": {name: case.accuracy_loss(accuracy.PREDICTED) for name, case in short.items()},
        "learning_rates": rates,
        "seeds": list(seeds),
        "cases": {name: case.table() for name, case in found.items()},
        "short_cases": {name: case.table() for name, case in short.items()},
    }


def _compared(
    pool: Executor, settings: Mapping[str, accuracy.Setting], ways: Sequence[str], seeds: Sequence[int]
) -> dict[str, accuracy.Compared]:
    """Each setting's comparison, printed."""
    found = accuracy.compare(pool, list(settings.values()), ways, seeds)
    for setting, compared in zip(settings.values(), found, strict=True):
        _print(f"{setting}, digits, K=4", compared.table())
    return dict(zip(settings, found, strict=True))


def _print(title: str, table: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(itertools.chain.from_iterable(table.values())))
    print_table(title, ["", *columns], [[name, *row.values()] for name, row in table.items()])


if __name__ == "__main__":
    main()
