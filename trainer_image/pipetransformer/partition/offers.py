"""What the model can do now at each number of stages: the trainer's half of a choice of layout."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipetransformer_contract.messages import MAX_OFFERS, Offer, StepTime

from .costs import UnitTimes, layer_costs
from .memory import paper_bytes
from .spans import spans

_MAX_WIDTHS = 64


@dataclass(frozen=True)
class StepModel:
    """What predicts a step: measured seconds of each unit (L + 2) for one micro-batch, and how a batch is dealt."""

    unit_times: Sequence[UnitTimes]
    global_batch: int
    micro_batch_size: int
    seconds_outside_pipeline: float = 0.0

    def step_seconds(self, boundary: int, stages: int, pipelines: int) -> float:
        """Seconds of a step: M + K - 1 turns of the slowest stage, plus reduction, vote and optimizer."""
        num_layers = len(self.unit_times) - 2
        costs = layer_costs(num_layers, boundary, self.unit_times)
        slowest = max(
            sum(costs[unit] for unit in span) for span in spans(num_layers, boundary, stages, self.unit_times)
        )
        samples = -(-self.global_batch // pipelines)
        micro_batches = -(-samples // self.micro_batch_size)
        return slowest * (micro_batches + stages - 1) + self.seconds_outside_pipeline


def offered_stages(initial: int) -> list[int]:
    """At most 16 numbers of stages, descending: the halvings of the initial one first, then the shortest pipelines."""
    halvings = [initial]
    while halvings[-1] % 2 == 0:
        halvings.append(halvings[-1] // 2)
    others = [stages for stages in range(1, initial + 1) if stages not in halvings]
    return sorted([*halvings, *others][:MAX_OFFERS], reverse=True)


def make_offers(
    unit_param_bytes: Sequence[int],
    boundary: int,
    *,
    initial_stages: int,
    max_workers: int,
    max_pipelines: int,
    step_model: StepModel | None,
    pause_seconds: float,
) -> list[Offer]:
    """One offer for each number of stages that the model could have now.

    Args:
        unit_param_bytes: parameter bytes of embedding, blocks and head.
        boundary: frozen blocks.
        initial_stages: pipeline length at the job's start; no offer is longer.
        max_workers: no wider layout is predicted.
        max_pipelines: widest layout that the data's shards allow.
        step_model: measurements, or None while there are none: the offers then carry bytes only.
        pause_seconds: expected cost of one regroup.
    """
    offers = []
    for stages in offered_stages(initial_stages):
        widths = range(1, min(max_workers // stages, max_pipelines, _MAX_WIDTHS) + 1)
        times = (
            [StepTime(pipelines=r, seconds=step_model.step_seconds(boundary, stages, r)) for r in widths]
            if step_model is not None
            else []
        )
        offers.append(
            Offer(
                stages=stages,
                step_seconds=times,
                bytes_per_worker=paper_bytes(unit_param_bytes, boundary, stages),
                pause_seconds=pause_seconds,
            )
        )
    return offers
