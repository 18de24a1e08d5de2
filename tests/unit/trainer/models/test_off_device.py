"""Frozen units in host memory: they compute the same, one at a time, and stay the same objects."""

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.cache import run_frozen
from pipetransformer.models import MicroBatchContext
from pipetransformer.models.off_device import bring_back, bytes_off, is_off, move_off, on_device

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Has parameters, a buffer that is part of the state, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(self.norm(x)) + self.table
        return output


def frozen_layer() -> Layer:
    layer = Layer().eval()
    layer.requires_grad_(requires_grad=False)
    return layer


def storages(unit: nn.Module) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in [*unit.parameters(), *unit.buffers()]]


def test_a_unit_in_host_memory_has_other_storage_and_the_same_parameters() -> None:
    layer = frozen_layer()
    parameters, values = list(layer.parameters()), {k: v.clone() for k, v in layer.state_dict().items()}
    before, versions = storages(layer), [parameter._version for parameter in parameters]

    move_off(layer, CPU)

    assert is_off(layer)
    assert not set(storages(layer)) & set(before)
    assert [id(parameter) for parameter in layer.parameters()] == [id(parameter) for parameter in parameters]
    assert [parameter._version for parameter in parameters] == versions, "forwards are watched by these"
    assert all(torch.equal(value, values[name]) for name, value in layer.state_dict().items())
    assert bytes_off([layer, frozen_layer()]) == sum(t.nbytes for t in [*layer.parameters(), *layer.buffers()])


def test_units_come_to_the_device_one_at_a_time() -> None:
    layers = [frozen_layer() for _ in range(3)]
    x = torch.randn(5, 4)
    expected = run_frozen(layers, x, MicroBatchContext(0, (0,)))
    for layer in layers:
        move_off(layer, CPU)
    at_home = list(map(storages, layers))
    on: list[list[int]] = []

    def note(*_: object) -> None:
        on.append([number for number, layer in enumerate(layers) if storages(layer) != at_home[number]])

    for layer in layers:
        layer.register_forward_pre_hook(note)
    found = run_frozen(layers, x, MicroBatchContext(0, (0,)))

    assert on == [[0], [1], [2]]
    assert torch.equal(found, expected)
    assert list(map(storages, layers)) == at_home
    assert all(map(is_off, layers))


def test_a_forward_that_fails_leaves_its_unit_in_host_memory() -> None:
    layer = frozen_layer()
    move_off(layer, CPU)
    at_home = storages(layer)

    with pytest.raises(RuntimeError), on_device(layer, CPU):
        layer(torch.ones(5, 3))

    assert is_off(layer)
    assert storages(layer) == at_home


def test_a_unit_that_came_back_trains_on() -> None:
    layer = frozen_layer()
    move_off(layer, CPU)
    at_home = storages(layer)

    bring_back(layer, CPU)
    layer.requires_grad_()
    layer(torch.ones(5, 4)).sum().backward()

    assert not is_off(layer)
    assert not bytes_off([layer])
    assert not set(storages(layer)) & set(at_home)
    assert layer.linear.weight.grad is not None


def test_parameters_that_were_packed_for_the_optimizer_leave_their_pack() -> None:
    """Otherwise the pack would keep its memory on the device."""
    layer = frozen_layer()
    pack = torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])
    parts = torch.split(pack, [parameter.numel() for parameter in layer.parameters()])
    for parameter, part in zip(layer.parameters(), parts, strict=True):
        parameter.data = part.view_as(parameter)

    move_off(layer, CPU)

    assert pack.untyped_storage().data_ptr() not in storages(layer)
    assert [p.untyped_storage().nbytes() for p in layer.parameters()] == [p.nbytes for p in layer.parameters()]
