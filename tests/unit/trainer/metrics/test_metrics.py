"""A worker's metrics: what it counts, what it is, and how that is read while it trains."""

import socket
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
import torch
from prometheus_client import start_http_server

from pipetransformer.metrics import Meter, Position, serve
from pipetransformer.metrics.collector import PositionCollector
from pipetransformer.state.control import Control
from pipetransformer_contract.messages import ResizeReason
from tests.testkit.trainer.position import Standing, position

CPU = torch.device("cpu")
PREFIX = "pipetransformer_trainer"


def samples(meter: Meter, where: Position) -> dict[str, float]:
    """Values by name, labels as Prometheus writes them."""
    meter.registry.register(PositionCollector(Standing(where), CPU))
    return {
        sample.name.removeprefix(f"{PREFIX}_") + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for metric in meter.registry.collect()
        for sample in metric.samples
    }


def test_the_leader_tells_of_the_job_and_every_worker_of_itself() -> None:
    leader, other = samples(Meter(), position(0)), samples(Meter(), position(3, idle_share=None))
    assert (leader["step"], leader["frozen_layers"], leader["layers"], leader["loss"]) == (7, 5, 12, 1.5)
    assert (leader["stages"], leader["pipelines"], leader["bubble_ratio"]) == (2, 2, 0.25)
    assert leader["schedule_info/OneForwardOneBackward"] == 1
    assert "gradient_norm" not in leader  # the step was not finite
    assert "step" not in other
    assert (other["stage"], other["pipeline"], other["held_layers"]) == (1, 1, 5)
    assert (leader["stage"], leader["held_layers"]) == (0, 7)
    assert (leader["layout_generation"], leader["learning_rate"], leader["level"]) == (3, 0.1, 0)
    assert samples(Meter(), replace(position(0), level=2))["level"] == 2
    second = samples(Meter(), position(1, idle_share=None))
    assert (second["stage"], second["pipeline"]) == (1, 0)


def test_a_worker_between_two_generations_has_no_role() -> None:
    where = Position(Control(), None, 12, None)
    assert not {"stage", "step"} & samples(Meter(), where).keys()


def test_what_a_worker_did_is_counted() -> None:
    meter = Meter()
    meter.on_steps(3, 0.02, 0.75)
    meter.on_staleness([1, 0, 2])
    meter.on_round(0.015, 0.02)
    meter.on_round(0.005, 0.02)
    meter.on_round(0.01, 0.009)  # the accelerator has a clock of its own
    meter.on_step_committed(64, skipped=True)
    meter.on_step_committed(64, skipped=False)
    meter.on_regrouped(ResizeReason.PACK, 0.3, {"move": 0.1, "vote": 0.05}, [(0, 1, 100), (2, 1, 10), (1, 0, 5)], 1)
    meter.on_trial(kept=True)
    meter.on_trial(kept=False)
    meter.on_trial(kept=False)
    meter.on_broken()
    counts = {"hits": 3, "advanced": 1, "computed": 4, "outOfRange": 5, "torn": 2, "failedWrites": 0}
    meter.on_cached({**counts, "memoryBytes": 1000, "diskBytes": 10})
    meter.on_cached({**counts, "memoryBytes": 1500, "diskBytes": 20})
    meter.on_placed(300)
    meter.on_placed(200)
    found = samples(meter, position())
    assert (found["step_seconds_count"], found["samples_total"], found["skipped_steps_total"]) == (3, 128, 1)
    assert found["round_seconds_total/Computing"] == pytest.approx(0.03)
    assert found["round_seconds_total/Idle"] == pytest.approx(0.02)
    assert found["regroup_seconds_sum/Pack"] == pytest.approx(0.3)
    assert found["regroup_phase_seconds_total/move"] == pytest.approx(0.1)
    assert (found["moved_bytes_total/Sent"], found["moved_bytes_total/Received"]) == (5, 110)
    assert (found["freeze_trials_total/Kept"], found["freeze_trials_total/Thawed"]) == (1, 2)
    assert found["broken_generations_total"] == 1
    assert [found[f"cache_samples_total/{outcome}"] for outcome in ("Hit", "Advanced", "Computed")] == [6, 2, 8]
    assert [found[f"cache_faults_total/{fault}"] for fault in ("OutOfRange", "Torn", "FailedWrite")] == [10, 4, 0]
    assert (found["cache_bytes/Memory"], found["cache_bytes/Disk"], found["off_device_bytes"]) == (1500, 20, 200)
    assert found["frozen_ahead_share"] == 0.75
    assert found["weight_staleness_steps"] == 1


def test_the_page_is_served_beside_the_training_and_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []

    def start(*arguments: Any) -> Any:
        server, thread = start_http_server(*arguments)
        ports.append(server.server_port)
        return server, thread

    monkeypatch.setattr("pipetransformer.metrics.server.start_http_server", start)
    with serve(Meter(), Standing(position()), CPU, "127.0.0.1", 0):
        url = f"http://127.0.0.1:{ports[0]}/metrics"
        with urllib.request.urlopen(url, timeout=30) as response:
            page = response.read().decode()
        assert f"{PREFIX}_step 7.0" in page and "process_resident_memory_bytes" in page
        assert "_created" not in page, "each counter would have a second one, that nobody reads"
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=30)


def test_training_goes_on_where_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        reached = False
        with serve(Meter(), Standing(position()), CPU, "127.0.0.1", taken.getsockname()[1]):
            reached = True
    assert reached
