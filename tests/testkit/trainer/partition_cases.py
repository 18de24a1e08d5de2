"""Networks whose units are partitioned, and the greedy partition beside ours."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Shape:
    """A transformer as the paper cuts it; sizes in millions of parameters."""

    name: str
    num_layers: int
    embedding: float
    attention: float
    perceptron: float
    head: float

    def sizes(self, frozen: int) -> list[float]:
        """Of what still trains; the embedding freezes with the first block."""
        blocks = [self.attention, self.perceptron] * (self.num_layers - frozen)
        return [*([] if frozen else [self.embedding]), *blocks, self.head]

    def times(self, frozen: int) -> list[float]:
        """A block's matrices take time by their size; an embedding's look-up takes none to speak of."""
        return [*([] if frozen else [0.0]), *self.sizes(frozen)[0 if frozen else 1 :]]


VIT_B16 = Shape("ViT-B/16", 12, embedding=0.742656, attention=2.363904, perceptron=4.723968, head=0.770536)


BERT_LARGE = Shape("BERT-large", 24, embedding=31.782912, attention=4.200448, perceptron=8.395776, head=0.00205)


CASES = [(VIT_B16, 0, 8), (VIT_B16, 7, 4), (BERT_LARGE, 0, 8)]


def greedy(sizes: Sequence[float], stages: int) -> list[range]:
    """`load_balance` of PipeTransformer's Algorithm 1; what it leaves over goes to the last stage."""
    starts, start, left = [], 0, sum(sizes)
    for stage in range(stages):
        starts.append(start)
        rest = sizes[start:]
        bar = (left + (statistics.pvariance(rest) if rest else 0.0)) / (stages - stage)
        load = 0.0
        while start < len(sizes) and load + sizes[start] < bar:
            load += sizes[start]
            left -= sizes[start]
            start += 1
    return [range(first, last) for first, last in pairwise([*starts, len(sizes)])]


def largest(sizes: Sequence[float], runs: Sequence[range]) -> float:
    return max(sum(sizes[item] for item in run) for run in runs)
