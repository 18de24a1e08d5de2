"""Where the leader puts the whole model at the end of a job."""

from typing import Any
from unittest import mock

import pytest

from pipetransformer.elastic.regroup.transfer import Cargo, Parts
from pipetransformer.elastic.regroup.transfer_plan import Move
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer.job.load import load_job
from pipetransformer.partition import Cut
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage.store import from_bytes, to_bytes
from pipetransformer.training import final_model
from pipetransformer.training.final_model import gather_model
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from tests.testkit.trainer.numerics import ADAMW, make_spec


def test_the_leader_receives_the_units_of_all_others_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own units are on the device, here `meta`, which stands for one that does not hold the whole model."""

    def arrive(moves: list[Move], rank: int, group: object, cargo: Cargo) -> dict[int, Parts]:
        return {move.unit: cargo.blank(move.unit) for move in moves if move.target == rank}

    monkeypatch.setattr(final_model, "move_units", arrive)
    job = load_job(make_spec(ADAMW))
    members = [Member(name=f"w{rank}", uid="u", address="127.0.0.1:1") for rank in range(2)]
    generation = Generation(
        job_uid="job", layout_generation=1, stages=2, pipelines=1, members=members, leader="w0", nonce="n",
        reason=ResizeReason.START,
    )  # fmt: skip
    layout = StageLayout(generation, 0, [(0, 0), (0, 1)], Cut([range(3), range(3, 8)], 1))
    state = WorkerState(job.num_layers, job.model.ties)
    state.units = {index: job.blank_unit(index) for index in layout.units}
    member: Any = mock.Mock(layout=layout)

    gathered = gather_model(job, state, member, Watchdog())

    devices = {tensor.device.type for name, tensor in gathered.items() if name.startswith(("blocks.2.", "head."))}
    own = {tensor.device.type for name, tensor in gathered.items() if name.startswith("blocks.1.")}
    assert (devices, own) == ({"cpu"}, {"meta"})
    received = {name: tensor for name, tensor in gathered.items() if tensor.device.type == "cpu"}
    assert from_bytes(to_bytes(received)).keys() == received.keys()
