"""Cached activations: the same bits, hits by epoch and width, when reading pays, and whether `Auto` saw it.

The first two parts run whole jobs and hold them against the same job without a cache: losses, samples, hits. The third
takes a stage's frozen prefix alone and times an epoch of it both ways, computed and read, in turns.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipetransformer.cache import ActivationCache, FrozenPrefix
from pipetransformer.data import MicroBatch, Split, load_dataset
from pipetransformer.models import MicroBatchContext, build_model
from pipetransformer_contract.spec import Cache, CachePolicy, Data, Model, TrainerSpec
from tests.testkit import ROOT
from tests.testkit.differences import relative_difference, worst_relative_difference
from tests.testkit.results import print_table, write_result
from tests.testkit.trainer.harness import Ran, Scripted, run_job
from tests.testkit.trainer.ledger_checker import check

TOLERANCE = 1e-9
SAMPLES, STEPS_PER_EPOCH, EPOCHS = 1433, 15, 4
MICRO_BATCH = 16
#: Where computing and reading take the same time within this factor, either choice is right.
MARGIN = 1.25
#: From this epoch on nothing freezes any longer, and the cache has what it has room for.
FILLED_EPOCH = 2
#: The least hit rate from then on, by case. An entry takes a little more than its sample's share of the memory.
LEAST_HITS = {"all in memory": 1.0, "all on disk": 1.0, "a tenth in memory": 0.05, "widen, then release": 0.9}
STAY = [Scripted(2, 1, [0, 1])]
RESIZED = [
    Scripted(2, 1, [0, 1]),
    Scripted(1, 2, [0, 1], at_step=2 * STEPS_PER_EPOCH),
    Scripted(1, 1, [1], at_step=3 * STEPS_PER_EPOCH, leavers=[0]),
]
#: Bytes a second of a disk that is not worth reading from.
SLOW_DISK = 1 << 20


def make_spec(cache: dict[str, Any], *, precision: str = "Float64") -> TrainerSpec:
    """Four epochs of digits; one block freezes within the first, three of six at the second's start."""
    return TrainerSpec.model_validate(
        {
            "model": {"name": "vit", "numLayers": 6, "hiddenSize": 32, "numHeads": 2, "mlpSize": 64, "patchSize": 4},
            "data": {"name": "digits"},
            "training": {"epochs": EPOCHS, "globalBatchSize": 100, "precision": precision},
            "freeze": {
                "policy": "Explicit",
                "boundaries": [{"step": 5, "boundary": 1}, {"step": STEPS_PER_EPOCH, "boundary": 3}],
            },
            "pipeline": {"stages": 2, "microBatchSize": MICRO_BATCH},
            "cache": cache,
            "numShards": 4,
            "workers": 2,
        }
    )


def entry_bytes(precision: str = "Float64") -> int:
    return 4 * 32 * (8 if precision == "Float64" else 4)


def worst_difference(run: Ran, reference: Ran) -> float:
    """Largest relative difference of a step's loss."""
    return worst_relative_difference(*([step["loss"] for step in one.steps] for one in (run, reference)))


def least_hit_rate(hits: Sequence[Mapping[str, Any]]) -> float:
    """The least hit rate once the cache has been filled; 0 if no later epoch is there.

    A cache that is never read changes no loss, so equal losses alone do not show that it works.
    """
    return min((float(entry["hit_rate"]) for entry in hits if entry["epoch"] >= FILLED_EPOCH), default=0.0)


def run_jobs(folder: Path) -> tuple[dict[str, Any], bool]:
    """Whole jobs under several limits against the same one without a cache: figures, and whether all is right."""
    tenth = SAMPLES // 10 * entry_bytes()
    cases: list[tuple[str, Sequence[Scripted], dict[str, Any]]] = [
        ("all in memory", STAY, {}),
        ("all on disk", STAY, {"memoryBytes": 0, "diskBytes": 1 << 30}),
        ("a tenth in memory", STAY, {"memoryBytes": tenth}),
        ("widen, then release", RESIZED, {}),
    ]
    print("without a cache ...", flush=True)
    reference = run_job(make_spec({"policy": "Never"}), STAY, folder / "never")
    rows, figures, right = [], {}, True
    for name, script, limits in cases:
        print(f"{name} ...", flush=True)
        run = run_job(make_spec({"policy": "Always"} | limits), script, folder / name.replace(" ", "-"))
        difference = worst_difference(run, reference)
        findings = check(run.run_dir, SAMPLES, EPOCHS)
        hits = [
            {"epoch": entry["epoch"], "pipelines": entry["pipelines"], "hit_rate": entry["hit_rate"]}
            for entry in run.summary["cache"]
        ]
        right = right and difference <= TOLERANCE and findings.clean and least_hit_rate(hits) >= LEAST_HITS[name]
        figures[name] = {"hits": hits, "worst_relative_difference": difference, "exactly_once": findings.clean}
        shown = ", ".join(f"{hit['epoch']} (R={hit['pipelines']}): {hit['hit_rate']:.0%}" for hit in hits)
        rows.append([name, shown, f"{difference:.1e}", "yes" if findings.clean else "NO"])
    print_table(
        "Hit rate by epoch and width; loss against the run without a cache (float64)",
        ["cache", "hits by epoch", "largest difference", "each sample once"],
        rows,
    )
    return figures, right


def run_smaller_types(folder: Path) -> dict[str, float]:
    """What keeping entries in a smaller type does to the loss of a float32 job."""
    exact = run_job(make_spec({"policy": "Always"}, precision="Float32"), STAY, folder / "float32")
    differences = {}
    for dtype in ("Float16", "BFloat16"):
        print(f"entries in {dtype} ...", flush=True)
        run = run_job(make_spec({"policy": "Always", "dtype": dtype}, precision="Float32"), STAY, folder / dtype)
        differences[dtype] = relative_difference(run.steps[-1]["loss"], exact.steps[-1]["loss"])
    print_table(
        "Entries in a smaller type",
        ["dtype", "last loss, relative difference"],
        [[dtype, f"{difference:.1e}"] for dtype, difference in differences.items()],
    )
    return differences


@dataclass(frozen=True)
class Case:
    """A frozen prefix, and where its entries are."""

    layers: int
    hidden_size: int
    where: str

    @property
    def cache(self) -> dict[str, int]:
        return {"memory_bytes": 1 << 30} if self.where == "memory" else {"memory_bytes": 0, "disk_bytes": 1 << 30}


CASES = [
    *(Case(layers, hidden, where) for hidden in (64, 256) for layers in (3, 6, 9) for where in ("memory", "disk")),
    Case(9, 256, "slow disk"),
    Case(1, 8, "slow disk"),
]


@contextmanager
def slow_disk(bytes_a_second: int) -> Iterator[None]:
    """Reads of this process take as long as they would on such a disk."""
    read = os.preadv

    def slow(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        count = read(descriptor, buffers, offset)
        time.sleep(count / bytes_a_second)
        return count

    os.preadv = slow  # type: ignore[assignment]
    try:
        yield
    finally:
        os.preadv = read


@dataclass(frozen=True)
class Samples:
    """A round's source: all of one variant."""

    split: Split
    following: Sequence[int]
    name: str = "train"

    def inputs(self, sample_ids: Sequence[int]) -> Tensor:
        return self.split.batch(sample_ids)[0]

    def context(self, sample_ids: Sequence[int]) -> MicroBatchContext:
        return MicroBatchContext(0, sample_ids)

    def variant(self, sample_id: int) -> int:
        return 0

    def upcoming(self) -> list[tuple[int, int | None]]:
        return [(sample, 0) for sample in self.following]

    def expect(self, sample_ids: Collection[int]) -> None:
        pass


class Epochs:
    """A frozen prefix over shuffled micro-batches of digits, with a cache or without."""

    def __init__(self, case: Case, policy: CachePolicy, scratch: Path) -> None:
        data = load_dataset(Data(name="digits"), dtype=torch.float32)
        spec = Model(
            name="vit", num_layers=case.layers, hidden_size=case.hidden_size, num_heads=4,
            mlp_size=4 * case.hidden_size,
        )  # fmt: skip
        units = build_model(spec, data.info, seed=0, dtype=torch.float32).units[:-1]
        for unit in units:
            unit.eval().requires_grad_(False)
        self.split = data.train
        self.cache: ActivationCache | None = None
        if policy is not CachePolicy.NEVER:
            settings = Cache.model_validate({"policy": policy, **case.cache})
            self.cache = ActivationCache(settings, job="bench", scratch=scratch)
            self.cache.use(units)
        self.prefix = FrozenPrefix(units, device=torch.device("cpu"), dtype=torch.float32, cache=self.cache)

    def run(self, epoch: int, samples: int, *, keep: bool = False) -> tuple[float, dict[int, Tensor]]:
        """Seconds a sample, and the activations by sample if they are to be kept."""
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).tolist()
        rows: dict[int, Tensor] = {}
        seconds = 0.0
        rounds = [order[start : start + 4 * MICRO_BATCH] for start in range(0, samples, 4 * MICRO_BATCH)]
        for number, ids in enumerate(rounds):
            following = rounds[number + 1] if number + 1 < len(rounds) else []
            parts = (tuple(ids[start : start + MICRO_BATCH]) for start in range(0, len(ids), MICRO_BATCH))
            micro_batches = [MicroBatch(part, len(part)) for part in parts]
            begun = time.perf_counter()
            outputs = self.prefix.begin(Samples(self.split, following), micro_batches)
            for place, micro_batch in enumerate(micro_batches):
                output = outputs.take(place, MicroBatchContext(0, micro_batch.sample_ids))
                if keep:
                    rows.update(zip(micro_batch.sample_ids, output.clone(), strict=True))
            seconds += time.perf_counter() - begun
        return seconds / samples, rows

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()


def equal(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(row, other[sample]) for sample, row in one.items())


def corrupt(folder: Path) -> None:
    """Turn every byte of a tenth of each of the cache's files."""
    for file in folder.glob("*/activations-*"):
        content = bytearray(file.read_bytes())
        content[: len(content) // 10] = bytes(byte ^ 0xFF for byte in content[: len(content) // 10])
        file.write_bytes(content)


def measure(case: Case, samples: int, rounds: int, scratch: Path) -> dict[str, Any]:
    """One case, both ways in turns, then by Auto alone."""
    plain, always = Epochs(case, CachePolicy.NEVER, scratch), Epochs(case, CachePolicy.ALWAYS, scratch / "always")
    auto = Epochs(case, CachePolicy.AUTO, scratch / "auto")
    for folder in ("always", "auto"):
        (scratch / folder).mkdir()
    plain.run(0, samples)
    always.run(0, samples)
    computing, reading = [], []
    bit_equal = True
    for epoch in range(1, rounds + 1):
        # Another order each, so that a row is compared with what it is in another micro-batch.
        seconds, computed = plain.run(epoch, samples, keep=True)
        computing.append(seconds)
        seconds, read = always.run(1000 + epoch, samples, keep=True)
        reading.append(seconds)
        bit_equal = bit_equal and equal(computed, read)
    noticed = None  # only entries of a disk are damaged
    if case.where == "disk":
        assert always.cache is not None
        always.cache.take_counts()
        corrupt(scratch / "always")
        _, read = always.run(0, samples, keep=True)
        noticed = always.cache.take_counts()["torn"] > 0
        bit_equal = bit_equal and equal(computed, read)
    assert auto.cache is not None
    while not auto.cache.settle():
        time.sleep(0.01)
    for epoch in range(3):
        auto.run(epoch, samples)
    choice = auto.cache.choice
    chosen = choice.memory_pays if case.where == "memory" else choice.disk_pays
    for epochs in (always, auto):
        epochs.close()
    ratio = statistics.median(computing) / statistics.median(reading)
    return {
        "frozen_layers": case.layers,
        "hidden_size": case.hidden_size,
        "where": case.where,
        "compute_microseconds": 1e6 * statistics.median(computing),
        "read_microseconds": 1e6 * statistics.median(reading),
        "ratio": ratio,
        "auto_reads": chosen,
        "choice_right": 1 / MARGIN < ratio < MARGIN or chosen == (ratio > 1),
        "bit_equal": bit_equal,
        "corruption_noticed": noticed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=3, help="epochs of each way, in turns")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as temporary:
        folder = Path(temporary)
        jobs, jobs_right = run_jobs(folder)
        smaller = run_smaller_types(folder)
        cases = []
        for number, case in enumerate(CASES):
            print(f"{case.layers} layers of {case.hidden_size}, {case.where} ...", flush=True)
            scratch = folder / f"case-{number}"
            scratch.mkdir()
            if case.where == "slow disk":
                with slow_disk(SLOW_DISK):
                    cases.append(measure(case, arguments.samples, arguments.rounds, scratch))
            else:
                cases.append(measure(case, arguments.samples, arguments.rounds, scratch))
    print_table(
        "A frozen prefix (embedding and blocks), microseconds a sample",
        ["layers", "width", "entries in", "computed", "read", "ratio", "Auto reads", "right", "same bits"],
        [
            [
                case["frozen_layers"], case["hidden_size"], case["where"], f"{case['compute_microseconds']:.0f}",
                f"{case['read_microseconds']:.0f}", f"{case['ratio']:.1f}", case["auto_reads"], case["choice_right"],
                case["bit_equal"],
            ]
            for case in cases
        ],
    )  # fmt: skip
    bit_equal = all(case["bit_equal"] for case in cases)
    choice_right = all(case["choice_right"] for case in cases)
    noticed = all(case["corruption_noticed"] for case in cases if case["where"] == "disk")
    print(
        f"same bits: {bit_equal}; Auto right: {choice_right}; corruption noticed: {noticed}; jobs right: {jobs_right}"
    )
    path = write_result(
        "cache",
        {
            "bit_equal": bit_equal,
            "choice_right": choice_right,
            "corruption_noticed": noticed,
            "jobs_right": jobs_right,
            "jobs": jobs,
            "smaller_type_loss_difference": smaller,
            "prefixes": cases,
        },
    )
    print(f"written to {path.relative_to(ROOT)}")
    return 0 if bit_equal and choice_right and noticed and jobs_right else 1


if __name__ == "__main__":
    sys.exit(main())
