"""Copies to the host are of the moment at which they began, and read once they are whole."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.device_copies import HostCopies, to_device
from pipetransformer.elastic.regroup.mirrors import Mirrors
from pipetransformer.elastic.regroup.transfer import Cargo
from pipetransformer.state.worker_state import WorkerState
from tests.testkit.trainer.late_copies import Late

pytestmark = pytest.mark.timeout(60)

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=NO_GPU)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_of_the_moment_at_which_it_began(device: torch.device) -> None:
    tensor = torch.arange(1 << 20, device=device, dtype=torch.float32)
    host = HostCopies()
    copy, number = host.copy(tensor), host.copy(torch.tensor(7))
    tensor.add_(1)
    host.wait()
    assert (copy.device.type, copy.is_pinned()) == ("cpu", device.type == "cuda")
    assert torch.equal(copy, torch.arange(1 << 20, dtype=torch.float32)) and number == 7


@NO_GPU
def test_what_is_sent_to_a_device_may_be_changed_at_once() -> None:
    tensor = torch.arange(1 << 20)
    sent = to_device(tensor, torch.device("cuda"))
    tensor.zero_()
    assert int(sent[-1]) == (1 << 20) - 1


def test_where_there_is_no_device_nothing_is_copied() -> None:
    tensor = torch.arange(3)
    assert to_device(tensor, torch.device("cpu")) is tensor


def test_a_mirror_is_sent_once_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []

    def send(moves: object, rank: int, world: object, cargo: Cargo) -> Any:
        sent.extend(part.clone() for part in cargo.give(0))
        return {}

    monkeypatch.setattr("pipetransformer.elastic.regroup.mirrors.HostCopies", Late)
    monkeypatch.setattr("pipetransformer.elastic.regroup.mirrors.move_units", send)
    mirrors = Mirrors(1, mock.Mock(give=lambda *_: [torch.full((3,), 7.0)]), [mock.Mock()], torch.device("cpu"))
    cut = mock.Mock(units_of=lambda stage: [0])
    layout = mock.Mock(units=[0], cut=cut, roles=[(0, 0)], stages=1, rank=0)
    mirrors.take(WorkerState(1, units={0: nn.Linear(1, 1)}), layout, mock.Mock())
    assert [part.tolist() for part in sent] == [[7.0] * 3]
