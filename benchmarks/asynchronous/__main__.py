"""Asynchronous schedules against synchronous ones: throughput on virtual devices, and losses and accuracy on digits."""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.testkit.results import print_table, write_result

from . import accuracy, throughput

_SUFFIXES = {accuracy.ONE: "1", accuracy.SEVERAL: "k"}
#: SGD with one micro-batch a step gains little, so its bound says nothing.
_WITHOUT_BOUND = "sgd_1"
#: Ways to train that a distance needs, and the accuracy lost.
_OF_OTHER_LENGTHS = (accuracy.SYNCHRONOUS, accuracy.NEWEST, accuracy.PREDICTED)


def main() -> None:
    """Run both parts, and write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.asynchronous", description=__doc__)
    parser.add_argument("--only", choices=("throughput", "accuracy"), help="one part; nothing is written")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of blocks, at least 5")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="file that keeps the runs of this code, so a later command goes on")
    asked = parser.parse_args()
    document: dict[str, Any] = {}
    if asked.only != "throughput":
        document |= _accuracy(range(asked.seeds), asked.keep)
    if asked.only != "accuracy":
        figures, table = throughput.run(asked.pairs)
        _print("seconds of a step, K=4, M=8", table)
        document |= figures | {"step_seconds": table}
    rows = [[key, value] for key, value in document.items() if not key.endswith(("cases", "epochs", "seconds"))]
    print_table("Figures", ["key", "measured"], rows)
    if not asked.only:
        write_result("async", document)


def _accuracy(seeds: range, keep: Path | None) -> dict[str, Any]:
    """Figures of all cases: `distance_OPTIMIZER_1` has one micro-batch a step, `..._k` has K."""
    rates: dict[str, float] = {}
    found: dict[str, accuracy.Compared] = {}
    others: dict[int, dict[str, accuracy.Compared]] = {accuracy.SHORTER: {}, accuracy.LONGER: {}}
    with accuracy.processes() as pool:
        runs = accuracy.Runs(pool, keep)
        for optimizer in accuracy.OPTIMIZERS:
            rates[optimizer] = rate = runs.best_rate(optimizer, seeds[:2])
            for micro_batches, suffix in _SUFFIXES.items():
                setting = accuracy.Setting(optimizer, rate, micro_batches)
                found[f"{optimizer}_{suffix}"] = _compared(runs, setting, list(accuracy.WAYS), seeds)
            for epochs, compared in others.items():
                setting = accuracy.Setting(optimizer, rate, accuracy.SEVERAL, epochs)
                compared[f"{optimizer}_k"] = _compared(runs, setting, _OF_OTHER_LENGTHS, seeds)
    losses = {name: case.accuracy_loss(accuracy.PREDICTED) for name, case in found.items()}
    bounded = {name: case for name, case in found.items() if name != _WITHOUT_BOUND}
    return {
        **{f"distance_{name}": case.ratio(accuracy.PREDICTED) for name, case in found.items()},
        "accuracy_loss_k": max(loss for name, loss in losses.items() if name.endswith("_k")),
        "upper_bounds": {name: case.upper_bound(accuracy.PREDICTED) for name, case in bounded.items()},
        "distances_further": {name: case.ratio(accuracy.FURTHER) for name, case in found.items()},
        "distances_stashed": {name: case.ratio(accuracy.STASHED) for name, case in found.items()},
        "accuracy_losses": losses,
        "distances_after_epochs": {
            epochs: {name: case.ratio(accuracy.PREDICTED) for name, case in compared.items()}
            for epochs, compared in others.items()
        },
        "accuracy_losses_after_epochs": {
            epochs: {name: case.accuracy_loss(accuracy.PREDICTED) for name, case in compared.items()}
            for epochs, compared in others.items()
        },
        "learning_rates": rates,
        "epochs": accuracy.EPOCHS,
        "seeds": list(seeds),
        "cases": {name: case.table() for name, case in found.items()},
        "cases_after_epochs": {
            epochs: {name: case.table() for name, case in compared.items()} for epochs, compared in others.items()
        },
    }


def _compared(
    runs: accuracy.Runs, setting: accuracy.Setting, ways: Sequence[str], seeds: Sequence[int]
) -> accuracy.Compared:
    """The comparison, printed."""
    found = runs.compare(setting, ways, seeds)
    _print(f"{setting}, digits, K=4", found.table())
    return found


def _print(title: str, table: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(itertools.chain.from_iterable(table.values())))
    print_table(title, ["", *columns], [[name, *row.values()] for name, row in table.items()])


if __name__ == "__main__":
    main()
