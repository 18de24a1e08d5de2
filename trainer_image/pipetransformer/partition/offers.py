"""What the model can do now at each number of stages: the trainer's half of a choice of layout."""

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
class Prediction:
    """One layout: bytes of its largest stage, and seconds of a step, None while nothing is measured."""

    bytes_per_worker: int
    step_seconds: float | None


def offered_stages(initial: int) -> list[int]:
    """At most 16 numbers of stages, descending.

    First the halvings of the initial one, which the paper packs to; then what is left of it without 1, 2, 4, ...
    workers, and a single stage; then lengths between those that differ most, by their ratio.
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
    predict: Callable[[int, int], Prediction],
    *,
    initial_stages: int,
    max_workers: int,
    max_pipelines: int,
    pause_seconds: float,
) -> list[Offer]:
    """One offer for each number of stages that the model could have now.

    Args:
        predict: what a layout of so many stages and pipelines would be like; raises `MemoryBoundError` where it does
            not fit. What fits at no width is not offered.
        initial_stages: pipeline length at the job's start; no offer is longer.
        max_workers: no wider layout is predicted.
        max_pipelines: widest layout that the data's shards allow.
        pause_seconds: expected cost of one regroup.
    """
    offers = []
    for stages in offered_stages(initial_stages):
        fitting: dict[int, Prediction] = {}
        for pipelines in range(1, min(max_workers // stages, max_pipelines, _MAX_WIDTHS) + 1):
            with contextlib.suppress(MemoryBoundError):
                fitting[pipelines] = predict(stages, pipelines)
                if fitting[pipelines].step_seconds is None:
                    break  # wider ones would add times only, and there are none yet
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
