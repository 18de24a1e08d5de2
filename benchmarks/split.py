"""Measures what a backward in halves costs: `python -m benchmarks.split` (one minute).

Each round runs the same blocks forward, and then backward in three ways by turns: whole, in halves
(`pipeline/backward_halves`), and in halves of which the second passes through the whole graph again. It prints medians
of CPU time on one thread, and writes nothing.

Two halves keep more memory than a whole backward. Where the C library gets it anew from the system, page faults cost
more than the halves do; `MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296` leaves them out.
"""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipetransformer.pipeline import backward_halves
from tests.testkit.results import print_table

WIDTHS = (64, 128, 256)
BLOCKS, SAMPLES, TOKENS, ROUNDS = 4, 8, 128, 20

#: Takes output, input, output gradient and weights; returns when the gradient of the input was there.
_Backward = Callable[[Tensor, Tensor, Tensor, list[nn.Parameter]], float]


def main() -> None:
    """Print the table."""
    rows = []
    for width in WIDTHS:
        medians = measure(width)
        whole = medians["whole"][1]
        rows += [[width, name, first * 1e3, total * 1e3, total / whole] for name, (first, total) in medians.items()]
    columns = ["width", "backward", "CPU ms to the gradient of the input", "CPU ms", "of a whole one"]
    print_table(f"{BLOCKS} blocks, {SAMPLES} samples of {TOKENS} tokens", columns, rows)


def measure(width: int, rounds: int = ROUNDS) -> dict[str, tuple[float, float]]:
    """Median CPU seconds of each way, to the gradient of the input and to the end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(BLOCKS)]
    weights = [parameter for block in blocks for parameter in block.parameters()]
    start, gradient = torch.randn(2, SAMPLES, TOKENS, width)
    ways: dict[str, _Backward] = {"whole": _whole, "halves": _halves, "a second pass": _second_pass}
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            x = span_input = start.clone().requires_grad_()
            for block in blocks:
                x = block(x)
            began = time.process_time()
            first = ways[name](x, span_input, gradient, weights)
            times[name].append((first - began, time.process_time() - began))
    return {name: (_median(times[name], 0), _median(times[name], 1)) for name in ways}


def _median(times: list[tuple[float, float]], which: int) -> float:
    return statistics.median(pair[which] for pair in times)


def _whole(output: Tensor, _: Tensor, gradient: Tensor, __: list[nn.Parameter]) -> float:
    torch.autograd.backward([output], [gradient])
    return time.process_time()


def _halves(output: Tensor, span_input: Tensor, gradient: Tensor, _: list[nn.Parameter]) -> float:
    rest = backward_halves.begin(output, span_input, gradient)[1]
    first = time.process_time()
    backward_halves.finish(rest)
    return first


def _second_pass(output: Tensor, span_input: Tensor, gradient: Tensor, weights: list[nn.Parameter]) -> float:
    torch.autograd.grad(output, span_input, gradient, retain_graph=True)
    first = time.process_time()
    torch.autograd.backward([output], [gradient], inputs=weights)
    return first


if __name__ == "__main__":
    main()
