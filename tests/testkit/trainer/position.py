"""A worker's position in a run."""

from dataclasses import dataclass

from pipetransformer.metrics import Position
from pipetransformer.partition import Cut
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer_contract.messages import Generation, Member, ResizeReason

LAST_STEP = {"loss": 1.5, "gradient_norm": None, "learning_rate": 0.1}


@dataclass(frozen=True)
class Standing:
    """A worker that stands somewhere in the run."""

    position: Position


def position(rank: int = 0, *, idle_share: float | None = 0.25) -> Position:
    members = [Member(name=f"digits-w{i}", uid=f"u{i}", address="127.0.0.1:1") for i in range(4)]
    generation = Generation(
        job_uid="u",
        layout_generation=3,
        stages=2,
        pipelines=2,
        members=members,
        leader="digits-w0",
        nonce="n",
        reason=ResizeReason.PACK,
    )
    layout = StageLayout(generation, rank, [(0, 0), (0, 1), (1, 0), (1, 1)], Cut([range(8), range(8, 14)], 4))
    return Position(Control(step=7, boundary=5, last_step=dict(LAST_STEP)), layout, 12, idle_share)
