"""Virtual devices take their declared times, forward and back, and compute for real."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from benchmarks.virtual import Timed, UnitTimes, data, model, profile, units
from benchmarks.virtual.__main__ import manifest
from pipetransformer.data import DataInfo
from pipetransformer.models import MicroBatchContext, set_micro_batch
from pipetransformer_contract.api.validate import validate_manifest

#: Seconds that one look at the clock takes.
_LOOK = 1e-6
UNIT = UnitTimes(fixed=1.0, per_sample=0.5, input_gradient=1.0, weight_gradient=2.0)
SAMPLES = 4
FORWARD = 3.0


class Clock:
    """Time that only waits and looks at it spend. A sleep may end late."""

    def __init__(self) -> None:
        self.now = 100.0
        self.late = 0.0

    def perf_counter(self) -> float:
        self.now += _LOOK
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr("benchmarks.virtual.device.time", clock)
    set_micro_batch(MicroBatchContext(0, range(SAMPLES)))
    yield clock


class Watch:
    """Seconds of the block under `with`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds = 0.0

    def __enter__(self) -> "Watch":
        self._since = self._clock.now
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = self._clock.now - self._since


def about(seconds: float) -> object:
    return pytest.approx(seconds, abs=0.01)


def span(times: UnitTimes = UNIT, length: int = 2) -> nn.Sequential:
    return nn.Sequential(*units([times] * (length + 2), 8, 8, 3)[1:-1])


def run(module: nn.Module, clock: Clock, *, input_gradient: bool) -> tuple[float, float]:
    """Seconds of a forward and of a whole backward."""
    x = torch.ones(SAMPLES, 8, requires_grad=input_gradient)
    with Watch(clock) as forward:
        output = module(x)
    with Watch(clock) as backward:
        output.sum().backward()
    return forward.seconds, backward.seconds


def test_a_backward_takes_both_halves_where_the_input_wants_a_gradient(clock: Clock) -> None:
    assert run(span(), clock, input_gradient=True) == (about(2 * FORWARD), about(2 * 3 * FORWARD))


def test_the_first_unit_that_trains_takes_the_weights_half_alone(clock: Clock) -> None:
    assert run(span(), clock, input_gradient=False) == (about(2 * FORWARD), about((3 + 2) * FORWARD))


def test_each_half_of_a_backward_takes_its_own_time(clock: Clock) -> None:
    module = span()
    x = torch.ones(SAMPLES, 8, requires_grad=True)
    output = module(x)

    with Watch(clock) as first:
        (gradient,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    with Watch(clock) as second:
        weights = torch.autograd.grad(output.sum(), list(module[1].parameters()))

    assert first.seconds == about(2 * FORWARD)
    assert second.seconds == about(2 * FORWARD), "of the last unit's weights"
    assert gradient.shape == x.shape
    assert len(weights) == 3


def test_a_frozen_unit_takes_its_forward_alone(clock: Clock) -> None:
    with torch.no_grad(), Watch(clock) as watch:
        output = span(length=1)(torch.ones(SAMPLES, 8))

    assert watch.seconds == about(FORWARD)
    assert not output.requires_grad


def test_the_time_of_the_real_layer_is_part_of_the_declared_one(clock: Clock) -> None:
    class Busy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            clock.now += 2.0
            return super().forward(x)

    with torch.no_grad(), Watch(clock) as watch:
        Timed(Busy(8, 8), UNIT)(torch.ones(SAMPLES, 8))

    assert watch.seconds == about(FORWARD)


def test_units_run_back_to_back_though_the_host_wakes_late(clock: Clock) -> None:
    """Three units: six waits of a backward, and three of a forward. The last one of each ends late."""
    clock.late = 0.002
    forward, backward = run(span(length=3), clock, input_gradient=True)

    assert forward == pytest.approx(3 * FORWARD + 0.002, abs=1e-4)
    assert backward == pytest.approx(3 * 3 * FORWARD + 0.002, abs=1e-4)


def test_a_unit_whose_input_waited_begins_when_it_is_called(clock: Clock) -> None:
    first, second = span(length=2)
    with torch.no_grad():
        waiting = first(torch.ones(SAMPLES, 8))
        clock.now += 10.0
        with Watch(clock) as watch:
            second(waiting)

    assert watch.seconds == about(FORWARD)


def test_a_delay_of_the_host_beyond_the_queue_counts(clock: Clock) -> None:
    clock.late = 0.5
    forward, _ = run(span(length=3), clock, input_gradient=False)

    assert forward == pytest.approx(3 * (FORWARD + 0.5), abs=1e-4)


def test_a_slice_of_tokens_pays_for_the_tokens_before_it() -> None:
    times = UnitTimes(fixed=1.0, per_token=1.0, per_pair=0.5)
    first, second = times.forward(2, tokens=4), times.forward(2, tokens=4, context=4)
    whole = times.forward(2, tokens=8)

    assert second > first
    assert first + second - whole == pytest.approx(times.fixed), "attention is divided, the fixed cost is paid twice"


def test_a_units_module_takes_no_time_on_the_meta_device(clock: Clock) -> None:
    with Watch(clock) as watch:
        copy.deepcopy(span()).to("meta")(torch.ones(SAMPLES, 8, device="meta"))

    assert watch.seconds < 0.01


def test_times_come_from_a_file_and_grow_by_the_factor(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text('{"units": {"net": {"layer": {"fixed": 1, "per_sample": 2}, "growth": 0.5}}}')

    embedding, first, second, head = profile("net", file).units(2, dilate=3)

    assert (first.forward(1), second.forward(1)) == (9, 4.5)
    assert embedding.forward(1) == head.forward(1) == 0


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"has no profile 'odd'\. It has even, heavy head"):
        profile("odd")


def test_the_model_learns_its_data(clock: Clock) -> None:
    dataset = data(path="", dtype=torch.float32, samples=256)
    built = model(dataset.info, layers=2)
    module = nn.Sequential(*built.units)
    inputs, targets = dataset.train.batch(range(256))
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())

    assert dataset.info == DataInfo((16,), 4)
    assert losses[-1] < 0.7 * losses[0]


def test_the_printed_job_is_a_valid_one() -> None:
    job = yaml.safe_load(yaml.safe_dump(manifest(12, 4, 4, 2.0, "calibration.json", "even", 120)))

    assert not validate_manifest(job)
    assert job["spec"]["model"]["options"]["dilate"] == 2.0
