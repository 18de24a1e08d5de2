"""Makes offers: the memory and step time of the job at each number of stages. The operator chooses a layout by them."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from pipetransformer_contract.messages import MAX_OFFERS, Offer, StepTime

from .contiguous import MemoryBoundError

#: Expected pause of a regroup before one was measured.
ASSUMED_PAUSE_SECONDS = 1.0
_MAX_WIDTHS = 64


@dataclass(frozen=True)
class PredictedLayout:
    """The prediction of one layout: the bytes of its largest stage, and the seconds of a step (None before costs are
    measured)."""

    bytes_per_worker: int
    step_seconds: float | None


def offered_stages(initial: int) -> list[int]:
    """The numbers of stages that offers are made for: at most 16, descending.

    They are, in order of priority:
    1. the initial number, and its halves as long as they are whole, as in the paper;
    2. the initial number less 1, 2, 4 and so on;
    3. a single stage;
    4. numbers between the two neighbours in this list with the largest ratio.
    """
    wanted = [initial]
    while wanted[-1] % 2 == 0:
        wanted.append(wanted[-1] // 2)
    wanted += [initial - 2**power for power in range(initial.bit_length()) if 2**power < initial]
    offered = sorted(list(dict.fromkeys([*wanted, 1]))[:MAX_OFFERS], reverse=True)
    while len(offered) < min(initial, MAX_OFFERS):
        longer, shorter = max(
            (pair for pair in pairwise(offered) if pair[0] - pair[1] > 1), key=lambda pair: pair[0] / pair[1]
        )
        offered = sorted([*offered, round(math.sqrt(longer * shorter))], reverse=True)
    return offered


def make_offers(
    predict: Callable[[int, int], PredictedLayout],
    *,
    initial_stages: int,
    max_workers: int,
    max_pipelines: int,
    pause_seconds: float,
) -> list[Offer]:
    """Make one offer for each number of stages that fits the memory with some number of pipelines.

    Args:
        predict: predicts the layout (stages, pipelines); raises `MemoryBoundError` if it does not fit the memory.
        initial_stages: number of stages at the job's start; no offer has more.
        max_workers: maximum number of workers in a layout.
        max_pipelines: maximum number of pipelines: the number of shards of the data.
        pause_seconds: expected seconds of one regroup.
    """
    offers = []
    for stages in offered_stages(initial_stages):
        fitting: dict[int, PredictedLayout] = {}
        for pipelines in range(1, min(max_workers // stages, max_pipelines, _MAX_WIDTHS) + 1):
            with contextlib.suppress(MemoryBoundError):
                fitting[pipelines] = predict(stages, pipelines)
                if fitting[pipelines].step_seconds is None:
                    break  # times are not known yet, and other numbers of pipelines would add nothing else
        if fitting:
            offers.append(
                Offer(
                    stages=stages,
                    step_seconds=[
                        StepTime(pipelines=pipelines, seconds=prediction.step_seconds)
                        for pipelines, prediction in fitting.items()
                        if prediction.step_seconds is not None
                    ],
                    bytes_per_worker=max(prediction.bytes_per_worker for prediction in fitting.values()),
                    pause_seconds=pause_seconds,
                )
            )
    return offers
