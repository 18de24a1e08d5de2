"""What elasticity costs while nothing changes: our step against what one would write without us.

One worker against a plain PyTorch loop, two pipelines of one stage against DistributedDataParallel, one pipeline of two
stages against a plain script on torch.distributed.pipelining. Same model, weights, data, cut, micro-batches, optimizer
and threads, nothing frozen, at steps of about 20 and 200 ms. Both sides run in the same processes, in blocks that
alternate, so that whatever else the machine does meets both alike; a pair is one block of each.
"""

import argparse
import datetime
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from benchmarks.overhead_baselines import Baseline, make_baseline
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, host_store
from pipetransformer.elastic.generations.standalone_world import Chooser, Follower, World, worker_name
from pipetransformer.elastic.generations.watcher import GenerationWatcher
from pipetransformer.elastic.transport.groups import PrefixStore, TCPStore, Transport, make_group
from pipetransformer.hooks import HookPoint, Hooks
from pipetransformer.job.load import load_job
from pipetransformer.job.script_parts import Parts
from pipetransformer.worker.trainer import Trainer
from pipetransformer_contract.choose import Bounds, Packing
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.results import print_table, write_result

BAR = 0.97
STEP_MILLISECONDS = (20, 200)
LAYOUTS = {"plain": Layout(1, 1), "ddp": Layout(1, 2), "pipelining": Layout(2, 1)}
BLOCK_SECONDS = 0.4
WARMUP_PAIRS = 2
BATCHES = 8
_TIMEOUT = datetime.timedelta(seconds=120)
_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class Case:
    """One comparison at one length of step."""

    baseline: str
    global_batch: int
    steps_a_block: int
    pairs: int

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.baseline]

    def spec(self) -> TrainerSpec:
        """A ViT of 4 blocks. Two micro-batches a stage where there are stages, else the whole share at once."""
        layout = self.layout
        micro_batches = 1 if layout.stages == 1 else 2 * layout.stages
        return TrainerSpec.model_validate(
            {
                "model": {"name": "vit", "numLayers": 4, "hiddenSize": 64, "numHeads": 4, "mlpSize": 256},
                "data": {"name": "script"},
                "training": {
                    "steps": self.steps_a_block * (self.pairs + WARMUP_PAIRS),
                    "globalBatchSize": self.global_batch,
                },
                "freeze": {"policy": "None"},
                "pipeline": {
                    "stages": layout.stages,
                    "microBatchSize": self.global_batch // layout.pipelines // micro_batches,
                },
                "numShards": layout.pipelines,
                "workers": layout.workers,
            }
        )


@dataclass(frozen=True)
class Seconds:
    """What a block took: on the clock, and of processor time of this process, which others' load hardly touches."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> "Seconds":
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall - other.wall, self.processor - other.processor)


#: Our block and the baseline's.
Pair = tuple[Seconds, Seconds]


class Alternating(Hooks):
    """Runs a block of the baseline after each block of ours, and times both at the end of a round."""

    def __init__(self, baseline: Baseline, steps_a_block: int) -> None:
        self.pairs: list[Pair] = []
        self._baseline = baseline
        self._steps = steps_a_block
        self._since = Seconds.now()

    def on_point(self, point: HookPoint, number: int) -> None:
        if point is not HookPoint.ENDED or (number + 1) % self._steps:
            return
        ended = Seconds.now()
        for _ in range(self._steps):
            self._baseline.step()
        now = Seconds.now()
        self.pairs.append((ended - self._since, now - ended))
        self._since = now


def _rank(rank: int, port: int, case: Case, run_dir: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    spec, layout = case.spec(), case.layout
    store = TCPStore(_ADDRESS, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    job = load_job(spec, Parts(data=make_data(case.global_batch)))
    own_store, listens_at = host_store(_ADDRESS, _TIMEOUT)
    transport = Transport(_ADDRESS, _TIMEOUT)
    world = World.meet(store, rank, layout.workers, listens_at)
    group = make_group(PrefixStore("baseline", store), "baseline", rank, layout.workers, transport)
    alternating = Alternating(make_baseline(case.baseline, job, rank, group), case.steps_a_block)
    source: Chooser | Follower
    if rank == 0:
        bounds = Bounds(layout, layout.workers, layout.workers, 1, layout.pipelines, job.layouts.bytes_budget)
        source = Chooser(world, bounds, Packing.PAPER, first=1, run_uid="fixed-1")
        watcher = GenerationWatcher(source.watch)
    else:
        source = Follower(world)
        watcher = GenerationWatcher(source.next_generation)
    handler = GenerationRendezvousHandler(worker_name(rank), own_store, source, timeout=_TIMEOUT)
    Trainer(job, worker_name(rank), handler, watcher, transport, source, Path(run_dir), alternating).run()
    pipe.send(alternating.pairs[WARMUP_PAIRS:])
    pipe.recv()  # the store of this process serves the others until all have ended


def make_data(global_batch: int) -> TensorDataset:
    """Random images of whole batches."""
    count = BATCHES * global_batch
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 10)


def run(case: Case) -> list[Pair]:
    """The pairs of blocks, as rank 0 sees them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipetransformer.worker.trainer", "benchmarks.overhead_baselines"])
    server, _ = host_store(_ADDRESS, _TIMEOUT)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(case.layout.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, server.port, case, folder, theirs))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            pairs: list[list[Pair]] = [pipe.recv() for _, pipe in ranks]
            for _, pipe in ranks:
                pipe.send("end")
        finally:
            for process, _ in ranks:
                process.join(10)
                process.kill()
    return pairs[0]


def calibrate() -> float:
    """Seconds that the plain loop takes for one sample."""
    pairs = run(Case("plain", 32, 5, 5))
    return min(theirs.processor for _, theirs in pairs) / (5 * 32)


def lower_bound(values: Sequence[float], confidence: float = 0.95) -> float:
    """One-sided lower bound of the median by order statistics, which asks nothing of the distribution.

    Raises:
        ValueError: there are too few values for that confidence.
    """
    ordered, below = sorted(values), 0.0
    rank = -1
    while True:
        below += math.comb(len(ordered), rank + 1) / 2 ** len(ordered)
        if below > 1 - confidence:
            break
        rank += 1
    if rank < 0:
        raise ValueError(f"{len(ordered)} values are too few")
    return ordered[rank]


def measure(baseline: str, milliseconds: int, second_per_sample: float, pairs: int) -> dict[str, float]:
    """Throughput of ours over the baseline's: median of the pairs, its lower bound, and the steps' lengths."""
    layout = LAYOUTS[baseline]
    # Two processes of one thread each have a core each; a pipeline's fill is left out of account.
    samples = milliseconds / 1000 / second_per_sample * layout.workers
    batch = max(1, round(samples / 8)) * 8
    steps = max(2, round(BLOCK_SECONDS / (milliseconds / 1000)))
    found = run(Case(baseline, batch, steps, pairs))
    ratios = [theirs.wall / ours.wall for ours, theirs in found]
    return {
        "ratio": statistics.median(ratios),
        "lower_bound": lower_bound(ratios),
        "processor_ratio": statistics.median(theirs.processor / ours.processor for ours, theirs in found),
        "our_step_ms": 1000 * statistics.median(ours.wall for ours, _ in found) / steps,
        "their_step_ms": 1000 * statistics.median(theirs.wall for _, theirs in found) / steps,
        "global_batch": batch,
        "pairs": len(found),
    }


def main() -> None:
    """Measure all cases; the figure of a baseline is the lower bound at its worse length of step."""
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description=__doc__)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks in each case, at least 10")
    parser.add_argument("--only", choices=LAYOUTS, help="one baseline, and nothing is written")
    arguments = parser.parse_args()
    second_per_sample = calibrate()
    cases = {
        baseline: {
            f"{milliseconds}_ms": measure(baseline, milliseconds, second_per_sample, arguments.pairs)
            for milliseconds in STEP_MILLISECONDS
        }
        for baseline in LAYOUTS
        if arguments.only in (None, baseline)
    }
    columns = ("our_step_ms", "their_step_ms", "ratio", "lower_bound", "processor_ratio", "pairs")
    print_table(
        f"Our throughput over the baseline's (at least {BAR} asked of the lower 95 % bound of the median)",
        ["baseline", "step", *columns],
        [[name, size, *(case[key] for key in columns)] for name, of in cases.items() for size, case in of.items()],
    )
    if arguments.only is None:
        worst = {f"ratio_{name}": min(case["lower_bound"] for case in sizes.values()) for name, sizes in cases.items()}
        write_result("overhead", {**worst, "bar": BAR, "cases": cases})


if __name__ == "__main__":
    main()
