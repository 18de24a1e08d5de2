"""Measures the costs of the units: times and bytes. Each worker measures its own units; an all-reduce gives all workers
all costs.

This happens between rounds, at steps that the control state decides. The costs become part of the control state, so
that all workers cut stages by the same numbers. If several workers hold a unit, the slowest counts, because a step
waits for it.
"""

import math
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipetransformer.data import Split
from pipetransformer.elastic.transport.groups import GenerationGroups
from pipetransformer.models import MicroBatchContext
from pipetransformer.partition import ModelCosts, UnitCost, measured_sizes
from pipetransformer.pipeline import Chunk, Executor, Span, SpanProbes, StageRunner
from pipetransformer.schedules import OneForwardOneBackward, RoundCosts, RoundShape, planned, simulate
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout

#: Number of steps before the first measurement. They warm up allocators and thread pools.
WARM_UP_STEPS = 2
#: The largest share of the training time that measurements may take.
LARGEST_SHARE = 0.01
#: Bytes of an all-reduce that measures a link, and the number of all-reduces. Their median counts.
_LINK_BYTES = 1 << 20
_LINK_REPEATS = 3
#: Chunks for each worker in a round without units (`_seconds_per_action`), and the number of rounds. Their median
#: counts.
_EMPTY_CHUNKS = 4
_EMPTY_REPEATS = 5


def measurement_due(control: Control, total_steps: int) -> bool:
    """Whether to measure now: early in a job, and after a change of the boundary if the last measurement is long enough
    ago. Nothing is measured near the end, because too few steps remain to make up for it. All workers agree, because
    they share the control state.

    Args:
        control: the control state.
        total_steps: steps of the whole job.
    """
    before = control.costs
    if before is None:
        return control.step >= WARM_UP_STEPS
    interval = before["not_before"] - before["step"]
    remain = total_steps - control.step
    return bool(before["boundary"] != control.boundary and control.step >= before["not_before"] and remain >= interval)


def measure_costs(
    runner: StageRunner,
    layout: StageLayout,
    groups: GenerationGroups,
    split: Split,
    control: Control,
    step_seconds: float,
    usable: float = float("inf"),
    *,
    host_apart: bool = False,
) -> ModelCosts:
    """Measure the costs of all units. All members call this between two rounds.

    Work that does not run now, such as the backward of frozen units, keeps its earlier cost.

    Args:
        runner: runs this worker's stage.
        layout: layout of the generation.
        groups: process groups of the generation.
        split: the split that the measured samples are taken from.
        control: the control state.
        step_seconds: how long a step of the last round took.
        usable: memory that the layers of this worker may take, in bytes.
        host_apart: whether host memory does not count as part of `usable`.
    """
    started = time.perf_counter()
    probes = SpanProbes(runner, split)
    sizes = measured_sizes(layout.micro_batch_size)
    num_units = layout.cut.num_units
    seen = torch.zeros(2, num_units, len(UnitCost._fields), dtype=torch.float64)
    for row, size in zip(seen, sizes, strict=True):
        row[layout.units] = torch.tensor(probes.measure(size), dtype=torch.float64)
    steps_taken = (time.perf_counter() - started) / step_seconds
    device = runner.spec.device
    links = [_seconds_per_byte(groups, device), *_seconds_per_action(groups.pipeline, device)]
    workers = torch.tensor([*links, -usable, float(not host_apart), steps_taken, step_seconds], dtype=torch.float64)
    flat = torch.cat([seen.flatten(), workers])
    dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=groups.world)
    numbers, facts = flat.tolist()[: seen.numel()], flat.tolist()[seen.numel() :]
    seconds_per_byte, seconds_per_action, of_processor, negative_usable, together, steps_taken, step_seconds = facts
    rows = torch.tensor(numbers, dtype=torch.float64).view_as(seen).tolist()
    measured = ModelCosts(
        micro_batch_sizes=sizes,
        small=[UnitCost(*unit) for unit in rows[0]],
        large=[UnitCost(*unit) for unit in rows[1]],
        seconds_per_byte=seconds_per_byte,
        seconds_per_action=seconds_per_action,
        processor_per_action=of_processor,
        worker_bytes=round(-negative_usable) if negative_usable > float("-inf") else None,
        host_apart=not together,
        step_seconds=step_seconds,
        step=control.step,
        boundary=control.boundary,
        not_before=control.step + math.ceil(steps_taken / LARGEST_SHARE),
    )
    return measured if control.costs is None else _filled(measured, ModelCosts.model_validate(control.costs))


def _filled(measured: ModelCosts, before: ModelCosts) -> ModelCosts:
    """Replace each cost that is 0 in `measured`, because it was not measured, by the cost in `before`."""

    def fill(new: Sequence[UnitCost], size: int) -> list[UnitCost]:
        old = before.at(size)
        return [UnitCost(*(a or b for a, b in zip(*units, strict=True))) for units in zip(new, old, strict=True)]

    small, large = measured.micro_batch_sizes
    return measured.model_copy(update={"small": fill(measured.small, small), "large": fill(measured.large, large)})


def _seconds_per_byte(groups: GenerationGroups, device: torch.device) -> float:
    """Measure the seconds that one byte takes between two workers. 0 if the worker is alone.

    It times all-reduces, and divides by the bytes that each worker sends in a ring."""
    group = max((groups.data_parallel, groups.pipeline), key=lambda one: one.size() if one else 0)
    if group is None or group.size() == 1:
        return 0.0
    data = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(_LINK_REPEATS + 1):
        started = time.perf_counter()
        dist.all_reduce(data, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    sent = 2 * (group.size() - 1) / group.size() * _LINK_BYTES
    return statistics.median(seconds[1:]) / sent


class _Sum:
    """Uses the sum of an output as its loss. Implements `Target`."""

    def take(self, output: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return output.sum()


class _Constant:
    """Gives each chunk the same input, a zero. Implements `PrefixOutputs`."""

    def __init__(self, device: torch.device) -> None:
        self._value = torch.zeros(1, device=device)

    def take(self, number: int, context: MicroBatchContext) -> torch.Tensor:
        return self._value


def _seconds_per_action(pipeline: dist.ProcessGroup | None, device: torch.device) -> tuple[float, float]:
    """Measure the overhead of one forward or backward in a schedule, in seconds, without the time of its units.

    It runs rounds in which stages have no units, and divides the time of a round by the number of computations on its
    critical path. The second result is the processor time of this thread for each of its own computations. Both are 0
    if the worker has no pipeline group.
    """
    if pipeline is None:
        return 0.0, 0.0
    workers, worker = pipeline.size(), pipeline.rank()
    shape = RoundShape(tuple(range(workers)), _EMPTY_CHUNKS * workers)
    operations = planned(OneForwardOneBackward(), shape)
    on_the_way = simulate(operations, shape, RoundCosts.by_span([0.0] * workers, [0.0] * workers, action_seconds=1.0))
    first, last = worker == 0, worker == workers - 1
    span = Span(range(worker, worker + 1), {}, 0, first=first, last=last, dtype=torch.float32)
    executor = Executor({worker: span}, pipeline, device, torch.float32)
    chunks = [
        Chunk(number, MicroBatchContext(0, (), None), (1,), prefix=_Constant(device)) for number in range(shape.chunks)
    ]
    seconds, of_processor = [], []
    for _ in range(_EMPTY_REPEATS + 1):
        started, processor_before = time.perf_counter(), time.thread_time()
        executor.run(operations[worker], shape, chunks, _Sum())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
        of_processor.append(time.thread_time() - processor_before)
    own = 2 * shape.chunks  # a forward and a backward of each
    return statistics.median(seconds[1:]) / on_the_way.seconds, statistics.median(of_processor[1:]) / own
