"""FSDP2 on links of several rates: how long the job takes, and at which rate it takes as long as ours.

Each rank holds a part of every layer and gathers a layer before it runs. So FSDP has no bubble and fits any memory, but
moves three times the parameters in a step. Frozen layers are gathered once, and those whose outputs are cached not at
all. All steps of a segment are alike, so a few of each are timed.
"""

import itertools
import math
import multiprocessing.connection
import os
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.virtual import profile, units
from pipetransformer.models import MicroBatchContext, set_micro_batch
from pipetransformer.partition.ideal import Segment, segments
from tests.testkit import forked

from . import links
from .case import LAYERS, SAMPLES_PER_GPU, STEPS, STEPS_PER_EPOCH, WIDTH, Case
from .way import Freezing

#: Rates of each GPU's link, in bits a second, for layers of `LAYER_BYTES`.
RATES = (20e6, 40e6, 80e6)
#: Bytes of a layer's parameters here, in float32.
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH + 1)
#: Bytes of a layer of BERT-large in bfloat16. Rates are stated for such layers, because messages here are as many times
#: smaller as the links are slower.
STATED_LAYER_BYTES = 2 * 12_596_224
#: Steps of a segment that are timed, after one that warms up.
_TIMED = 4
_INPUTS, _CLASSES = 16, 4
#: What freezes in each run that is measured.
RUNS = {"unfrozen": Freezing.NOTHING, "frozen_cache": Freezing.BY_THIRDS}
_PORT = 29517
_HUNG_SECONDS = 300


@dataclass(frozen=True)
class Line:
    """A run at one rate.

    Attributes:
        rate: bits a second of each link.
        seconds: of the whole run, measured.
        at_best: of the whole run, if messages were hidden behind work as far as possible.
    """

    rate: float
    seconds: float
    at_best: float


def figures(case: Case, unfrozen_seconds: float, frozen_seconds: float) -> dict[str, Any]:
    """`runs.fsdp`: seconds at each rate, and the rates at which they equal those of our static and our elastic run."""
    found: dict[str, Any] = {"gpus": case.gpus, "layer_bytes": LAYER_BYTES, "stated_layer_bytes": STATED_LAYER_BYTES}
    for (name, freezing), ours in zip(RUNS.items(), (unfrozen_seconds, frozen_seconds), strict=True):
        lines = []
        for rate in RATES:
            lines.append(measure(case, freezing, rate))
            print(f"{name}, {stated_gbps(rate):.2f} Gb/s: {lines[-1].seconds:.1f} s", file=sys.stderr, flush=True)
        found[name] = {
            "our_seconds": ours,
            "seconds_by_gbps": {f"{stated_gbps(line.rate):.2f}": line.seconds for line in lines},
            "seconds_at_best_by_gbps": {f"{stated_gbps(line.rate):.2f}": line.at_best for line in lines},
            "link_gbps_where_equal": _equal([(line.rate, line.seconds) for line in lines], ours),
            "link_gbps_where_equal_at_best": _equal_at_best(case, freezing, ours),
        }
    found["link_gbps_where_equal"] = found["frozen_cache"]["link_gbps_where_equal"]
    return found


def measure(case: Case, freezing: Freezing, rate: float) -> Line:
    """A run on links of this rate."""
    run = _segments(freezing)
    with links.shaped(case.gpus, rate):
        by_rank = _on_ranks(case.gpus, run)
    steps = [max(of_segment) for of_segment in zip(*by_rank, strict=True)]
    return Line(
        rate,
        sum(segment.steps * seconds for segment, seconds in zip(run, steps, strict=True)),
        _run_at_best(case, freezing, rate),
    )


def _segments(freezing: Freezing) -> list[Segment]:
    return segments(freezing.moves(LAYERS, STEPS_PER_EPOCH), STEPS, STEPS_PER_EPOCH)


def _run_at_best(case: Case, freezing: Freezing, rate: float) -> float:
    return sum(segment.steps * step_at_best(segment, case.gpus, rate) for segment in _segments(freezing))


def step_at_best(segment: Segment, gpus: int, rate: float) -> float:
    """The longer of the work of a step and its messages: max(W / N, bytes (N - 1) / N / link)."""
    times = profile().units(LAYERS)
    seconds, moved = 0.0, 0
    for index, unit in enumerate(times):
        if segment.cached and index <= segment.cached:
            continue
        once = unit.forward(SAMPLES_PER_GPU)
        layer = 0 < index <= LAYERS
        if segment.boundary and index <= segment.boundary:
            seconds += once
            moved += layer * LAYER_BYTES
        else:
            inputs = index > (segment.boundary + 1 if segment.boundary else 0)
            seconds += once * (1 + unit.weight_gradient + inputs * unit.input_gradient)
            moved += layer * 3 * LAYER_BYTES
    return max(seconds, 8 * moved * (gpus - 1) / gpus / rate)


def stated_gbps(rate: float) -> float:
    """Gigabits a second of a link that stands in the same ratio to layers of BERT-large."""
    return rate / 1e9 * STATED_LAYER_BYTES / LAYER_BYTES


def _equal(points: Sequence[tuple[float, float]], seconds: float) -> float | None:
    """Stated rate at which a run takes so long, by lines between the points, on logarithmic axes; None outside them."""
    for (slow, longer), (quick, shorter) in itertools.pairwise(points):
        if longer >= seconds >= shorter and longer > shorter:
            share = math.log(longer / seconds) / math.log(longer / shorter)
            return stated_gbps(slow * (quick / slow) ** share)
    return None


def _equal_at_best(case: Case, freezing: Freezing, seconds: float) -> float | None:
    """Stated rate at which a run at best takes so long; None if it takes longer at any rate."""
    slow, quick = 1e3, 1e12
    if _run_at_best(case, freezing, quick) > seconds:
        return None
    while quick / slow > 1 + 1e-6:
        middle = math.sqrt(slow * quick)
        if _run_at_best(case, freezing, middle) > seconds:
            slow = middle
        else:
            quick = middle
    return stated_gbps(quick)


def _on_ranks(size: int, run: Sequence[Segment]) -> list[list[float]]:
    """`_steps` on each rank, behind links of their own.

    Raises:
        RuntimeError: a rank failed.
        TimeoutError: a rank said nothing.
    """
    context = forked.context(__name__)
    pipes, processes = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_rank, args=(theirs, rank, size, run)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        return [_received(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _received(pipe: multiprocessing.connection.Connection) -> list[float]:
    if not pipe.poll(_HUNG_SECONDS):
        raise TimeoutError(f"a rank of FSDP said nothing for {_HUNG_SECONDS} s")
    steps, error = pipe.recv()
    if error:
        raise RuntimeError(error)
    found: list[float] = steps
    return found


def _rank(pipe: multiprocessing.connection.Connection, rank: int, size: int, run: Sequence[Segment]) -> None:
    """One rank, which tells its seconds and waits for its end."""
    forked.begin()
    try:
        links.enter(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = links.INTERFACE
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"tcp://{links.address(0)}:{_PORT}", rank=rank, world_size=size)
        pipe.send(([_step_seconds(segment) for segment in run], ""))
        pipe.recv()
    except BaseException:
        pipe.send(([], traceback.format_exc()))
        raise


def _step_seconds(segment: Segment) -> float:
    """Median seconds of a step in a segment."""
    step = _Sharded(segment)
    seconds = []
    for _ in range(1 + _TIMED):
        dist.barrier()
        begun = time.perf_counter()
        step.run()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


class _Sharded:
    """The layers that run in a segment, each sharded over all ranks. Gathering a layer overlaps with the one before."""

    def __init__(self, segment: Segment) -> None:
        first = segment.cached + 1 if segment.cached else 0
        frozen = segment.boundary + 1 if segment.boundary else 0
        self._inputs = torch.ones(SAMPLES_PER_GPU, WIDTH if first else _INPUTS)
        self._layers = units(profile().units(LAYERS), _INPUTS, WIDTH, _CLASSES)[first:]
        for layer in self._layers[: frozen - first]:
            layer.requires_grad_(False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded: list[Any] = [fully_shard(layer, mesh=mesh) for layer in self._layers]
        model = nn.Sequential(*self._layers)
        fully_shard(model, mesh=mesh)
        self._model = model
        for layer, later in itertools.pairwise(sharded):
            layer.set_modules_to_forward_prefetch([later])
        for layer in self._model.modules():
            if isinstance(layer, FSDPModule):
                layer._set_unshard_async_op(True)
        self._optimizer = torch.optim.AdamW(one for one in self._model.parameters() if one.requires_grad)

    def run(self) -> None:
        """One step."""
        set_micro_batch(MicroBatchContext(0, range(SAMPLES_PER_GPU)))
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
