"""Worker processes with the environment of a pod, against a channel that chooses layouts from their offers."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from pipetransformer import PipelineModel
from pipetransformer.storage import latest, load_model
from pipetransformer_contract.choose import OnPack, Packing
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Generation, Member, Ready, Report, ResizeReason
from pipetransformer_contract.spec import TrainerSpec
from pipetransformer_contract.wire import Env
from tests.testkit.trainer.harness import Ran, run_job
from tests.testkit.trainer.ledger_checker import check
from tests.testkit.trainer.numerics import STAY_ALONE, TOLERANCE, layouts
from tests.testkit.trainer.storing import until
from tests.testkit.trainer.stub_channel import StubChannel
from tests.testkit.trainer.workers import SPEC, Workers

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def workers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Workers]:
    on_pack, packing, *channel = getattr(request, "param", (OnPack.WIDEN, Packing.PAPER))
    started = Workers(tmp_path, on_pack, packing, *channel or [StubChannel])
    yield started
    started.close()


def test_a_job_packs_widens_and_finishes_while_the_operator_is_away(workers: Workers) -> None:
    workers.start(SPEC)
    channel = workers.channel
    assert channel.wait_for(lambda: any(report.layout_generation == 2 for report in channel.reports), 120)
    channel.down.set()
    run = Ran(workers.folder / "run")
    assert channel.wait_for(lambda: len(run.steps) == 60, 120)
    channel.down.clear()

    assert workers.wait() == [0, 0]
    assert channel.outcome == "Succeeded"
    assert channel.reports[-1].step == 60
    assert workers.termination(0)["outcome"] == "Succeeded"
    assert layouts(run) == [(2, 1), (1, 2)]
    assert check(run.run_dir, 1433, 4).clean
    assert load_model(str(run.run_dir / "model")).num_layers == 4


def test_a_run_that_diverges_fails_and_says_at_which_step(workers: Workers) -> None:
    diverging = {"epochs": 4, "optimizer": {"name": "SGD", "learningRate": 1e30}, "maxSkippedSteps": 3}
    workers.start(SPEC | {"training": diverging})

    assert workers.wait() == [2, 2]
    assert workers.channel.outcome == "Failed"
    assert workers.channel.reports[-1].reason == "NonFinite"
    for number in range(2):
        message = workers.termination(number)["message"]
        assert "4 steps in a row were not finite, 3 may be skipped; at step 4 it was the output of blocks.0" in message


@pytest.mark.timeout(480)
@pytest.mark.parametrize("workers", [(OnPack.WIDEN, Packing.MEASURED)], indirect=True)
def test_a_job_packs_by_what_it_measured_and_learns_the_same(workers: Workers, tmp_path: Path) -> None:
    """Three layers on two stages wait for each other; on one they do not, and each worker has its own pipeline.

    The layers declare their seconds, so the measured costs are the same on a busy machine.
    """
    samples, epochs = 1000, 4

    def spec(**seconds: float) -> dict[str, Any]:
        module = "tests.testkit.user_code.timed_model"
        return SPEC | {
            "model": {"name": f"{module}:model", "numLayers": 3, "options": {"layers": 3} | seconds},
            "data": {"name": f"{module}:data", "options": {"samples": samples}},
            "training": {
                "epochs": epochs,
                "globalBatchSize": 100,
                "precision": "Float64",
                "optimizer": {"name": "SGD"},
            },
            "freeze": {"policy": "Explicit", "boundaries": [{"step": 30, "boundary": 1}]},
        }

    measured = {"stages": 2, "microBatchSize": 25, "packing": "Measured"}
    workers.start(spec(forward=0.0004, backward=0.0008) | {"pipeline": measured})

    assert workers.wait() == [0, 0]
    run = Ran(workers.folder / "run")
    assert layouts(run) == [(2, 1), (1, 2)]
    packed = next(report for report in workers.channel.reports if report.layout_generation == 2)
    assert 5 <= packed.step < 30
    assert check(run.run_dir, samples, epochs).clean
    alone = run_job(TrainerSpec.model_validate(spec(forward=0, backward=0)), STAY_ALONE, tmp_path / "alone")
    assert [step["loss"] for step in run.steps] == pytest.approx([step["loss"] for step in alone.steps], rel=TOLERANCE)


@pytest.mark.parametrize("workers", [(OnPack.RELEASE, Packing.PAPER)], indirect=True)
def test_a_released_worker_waits_and_a_checkpoint_is_reported(
    workers: Workers,
) -> None:
    location = str(workers.folder / "checkpoint")
    workers.start(SPEC | {"checkpoint": {"location": location}})

    assert workers.wait() == [0, 0]
    assert workers.termination(1) == {"outcome": "Left", "reason": "Closed", "message": ""}
    packed = [report for report in workers.channel.reports if report.layout_generation == 2]
    assert packed
    assert any(report.checkpoint is not None and report.checkpoint.boundary == report.boundary > 0 for report in packed)


class Commanded(StubChannel):
    """Publishes what a test says, whatever the leader offers."""

    def report(self, report: Report) -> int:
        with self._condition:
            self.reports.append(report)
            self._condition.notify_all()
            return self.generations[-1].layout_generation


def has_left(channel: StubChannel, generation: int) -> bool:
    return any((beat.layout_generation, beat.waiting_after) == (generation, generation) for beat in channel.beats)


@pytest.mark.parametrize("workers", [(OnPack.RELEASE, Packing.PAPER, Commanded)], indirect=True)
def test_a_leaver_trains_again_when_it_is_named_and_ends_when_told(
    workers: Workers,
) -> None:
    epochs = {"training": {"epochs": 10000, "globalBatchSize": 100}, "freeze": {"policy": "None"}}
    workers.start(SPEC | epochs | {"checkpoint": {"location": str(workers.folder / "checkpoint")}})
    channel = workers.channel
    assert channel.wait_for(lambda: any(report.step > 0 for report in channel.reports), 120)

    channel.publish(Layout(1, 1))
    assert channel.wait_for(lambda: has_left(channel, 2), 60)
    channel.publish(Layout(1, 2), of_all=True)
    assert channel.wait_for(lambda: any(report.layout_generation == 3 for report in channel.reports), 60)
    step = channel.reports[-1].step
    assert channel.wait_for(lambda: channel.reports[-1].step > step, 60)
    channel.publish(Layout(1, 1))
    assert channel.wait_for(lambda: has_left(channel, 4), 60)
    workers.signal(1)

    assert workers.wait_for(1, seconds=3) == 0
    assert workers.termination(1) == {"outcome": "Left", "reason": "Left", "message": ""}
    assert not any(beat.lost_peers for beat in channel.beats)


@pytest.mark.parametrize("workers", [(OnPack.RELEASE, Packing.PAPER, Commanded)], indirect=True)
def test_a_leaver_ends_when_told_in_a_garbage_collection(workers: Workers) -> None:
    epochs = {"training": {"epochs": 10000, "globalBatchSize": 100}, "freeze": {"policy": "None"}}
    workers.start(SPEC | epochs | {"data": {"name": "tests.testkit.user_code.told_in_a_collection:load"}})
    assert workers.channel.wait_for(lambda: any(report.step > 0 for report in workers.channel.reports), 120)

    workers.channel.publish(Layout(1, 1))

    assert workers.wait_for(1, seconds=60) == 0
    assert workers.termination(1)["outcome"] == "Left"
    assert "Exception ignored" in workers.log(1), "the signal came where nothing can be raised"


@pytest.mark.parametrize(
    ("data", "reason", "message"),
    [
        ("no.such.module:data", "InvalidSpec", "spec.data.name: cannot import"),
        ("tests.testkit.user_code.unreadable_data:load", "DataUnreadable", "spec.data: one of the samples 0"),
    ],
)
def test_a_wrong_spec_is_refused_before_the_worker_says_that_it_is_ready(
    workers: Workers, data: str, reason: str, message: str
) -> None:
    workers.start(SPEC | {"data": {"name": data}}, count=1)

    assert workers.wait() == [2]
    assert workers.termination(0)["reason"] == reason
    assert message in workers.termination(0)["message"]
    assert not workers.channel.generations
    assert workers.log(0).count("Traceback (most recent call last)") == 1
    assert ("unreadable_data.py" in workers.log(0)) == data.startswith("tests"), "it shows where"


def test_log_lines_as_json_name_the_job_and_the_worker(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.LOG_FORMAT, "Json")
    workers.start(SPEC | {"data": {"name": "nothing"}}, count=1)

    assert workers.wait() == [2]
    lines = [json.loads(line) for line in workers.log(0).splitlines()]
    assert {(line["job"], line["worker"]) for line in lines} == {("ns/job", "job-w0")}
    (error,) = [line for line in lines if line["level"] == "ERROR"]
    assert "'nothing' is neither a known name" in error["message"]


def test_an_unknown_format_of_log_lines_is_refused(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.LOG_FORMAT, "xml")
    workers.start(SPEC, count=1)

    assert workers.wait() == [2]
    assert f"{Env.LOG_FORMAT}: expected one of Text, Json, found 'xml'" in workers.termination(0)["message"]


class Wide(StubChannel):
    """Begins with two pipelines: neither needs the other to evaluate its part."""

    def __init__(self, num_workers: int, _: Layout, *args: Any) -> None:
        super().__init__(num_workers, Layout(1, 2), *args)


def without_its_data(info: object) -> None:
    sys.exit("DATA_DIR is not set")


class Exits(nn.Module):
    """A layer that has seen enough."""

    def forward(self, x: Tensor) -> Tensor:
        sys.exit(3)


def with_a_layer_that_exits(info: object) -> PipelineModel:
    blocks: list[nn.Module] = [Exits(), nn.Identity(), nn.Identity(), nn.Identity()]
    return PipelineModel(nn.Flatten(), blocks, nn.Linear(64, 10), (64,))


@pytest.mark.parametrize(
    ("function", "code"), [("without_its_data", "'DATA_DIR is not set'"), ("with_a_layer_that_exits", "3")]
)
def test_a_job_whose_own_code_exits_ends_and_is_not_tried_again(workers: Workers, function: str, code: str) -> None:
    model = {"name": f"{__name__}:{function}", "numLayers": 4}
    workers.start(SPEC | {"model": model}, count=1)

    assert workers.wait() == [2]
    assert workers.termination(0) == {
        "outcome": "Failed",
        "reason": "ModelFailed",
        "message": f"spec.podTemplate: the program of the job ended itself, as by sys.exit({code}); the log says where",
    }
    assert "sys.exit(" in workers.log(0).split("Traceback")[1], "it shows where"


@pytest.mark.parametrize("workers", [(OnPack.WIDEN, Packing.PAPER, Wide)], indirect=True)
def test_a_worker_told_to_stop_saves_at_the_end_of_the_round(workers: Workers) -> None:
    long = SPEC | {"training": {"epochs": 10000, "globalBatchSize": 100}, "freeze": {"policy": "None"}}
    workers.start(
        long | {"checkpoint": {"location": str(workers.folder / "checkpoint")}, "evaluation": {"everySteps": 1}}
    )
    channel = workers.channel
    assert channel.wait_for(lambda: any(report.step > 0 for report in channel.reports), 120)

    workers.signal(1)

    assert workers.wait_for(1) == 143
    assert channel.wait_for(lambda: any(report.checkpoint is not None for report in channel.reports), 30)
    left = latest(str(workers.folder / "checkpoint"))
    assert left is not None and left.state["evaluatedStep"] == left.step - 1, "it may be killed before it has evaluated"
    assert channel.wait_for(lambda: channel.beats[-1].waiting_after is not None, 60)
    assert channel.beats[-1].lost_peers == ["job-w1"]
    assert channel.beats[-1].why_broken.startswith(f"generation 1 broke at step {left.step}: ")


@pytest.mark.parametrize("unheard", [["job-w0"], ["job-w1"]])
def test_workers_of_an_ended_job_save_whichever_hears_of_it(workers: Workers, unheard: list[str]) -> None:
    long = SPEC | {"training": {"epochs": 10000, "globalBatchSize": 100}, "freeze": {"policy": "None"}}
    workers.start(long | {"checkpoint": {"location": str(workers.folder / "checkpoint")}})
    channel = workers.channel
    assert channel.wait_for(lambda: any(report.step > 0 for report in channel.reports), 120)

    channel.end(unheard)

    assert [workers.wait_for(number) for number in range(2)] == [0, 0]
    for number in range(2):
        assert workers.termination(number) == {"outcome": "Left", "reason": "Closed", "message": ""}
    last = channel.reports[-1]
    assert last.checkpoint is not None and last.checkpoint.step == last.step > 0


def test_a_generation_is_not_waited_for_whose_member_has_left_with_the_job(workers: Workers) -> None:
    workers.start(SPEC | {"training": {"epochs": 10000, "globalBatchSize": 100}, "freeze": {"policy": "None"}})
    channel = workers.channel
    assert channel.wait_for(lambda: any(report.step > 0 for report in channel.reports), 120)

    workers.signal(0, signal.SIGSTOP)
    channel.publish(Layout(1, 2))
    channel.end(unheard=["job-w0"])
    assert channel.wait_for(lambda: "job-w1" in channel.told, 10)
    workers.signal(0, signal.SIGCONT)
    assert workers.wait_for(1) == 0
    channel.end()

    assert workers.wait_for(0) == 0
    assert workers.termination(0)["reason"] == "Closed"


def test_more_pipelines_than_shards_end_the_job_with_a_clear_message(
    workers: Workers,
) -> None:
    freeze = {"policy": "Explicit", "boundaries": [{"step": 5, "boundary": 3}]}
    workers.start(SPEC | {"training": {"epochs": 9, "globalBatchSize": 1}, "freeze": freeze, "numShards": 1})

    assert workers.wait_for(0, 100) == 2
    report = workers.channel.reports[-1]
    assert (report.reason, report.message) == ("InvalidSpec", workers.termination(0)["message"])
    assert report.message == (
        "spec.elasticPolicy.maxWorkers: the operator asked for 2 pipelines of 1 stage, but the order of the data allows"
        " at most 1: upgrade the operator, or set maxWorkers to at most 1"
    )
    assert workers.wait_for(1) == 0


class Growing(StubChannel):
    """Shows a generation to the worker that is to join, and to its members once `shown` is set."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shown = threading.Event()

    def generation(self, worker: str, after: int, timeout: float) -> Generation | None:
        found = super().generation(worker, after, timeout)
        if found is not None and after > 0:
            self.shown.wait(timeout)
        return found

    def grow(self) -> None:
        with self._condition:
            old = self.generations[-1]
            joiner = Member(name="job-w2", uid="job-w2", address=self._ready["job-w2"])
            wider = {"layout_generation": 2, "stages": 1, "pipelines": 3, "members": [*old.members, joiner]}
            self.generations.append(old.model_copy(update=wider | {"reason": ResizeReason.CLAIM}))
            self._condition.notify_all()


@pytest.mark.parametrize("workers", [(OnPack.RELEASE, Packing.PAPER, Growing)], indirect=True)
def test_members_do_not_wait_for_a_joiner_that_left_with_the_job(workers: Workers) -> None:
    long = SPEC | {"training": {"epochs": 10000, "globalBatchSize": 100}, "freeze": {"policy": "None"}, "numShards": 3}
    workers.start(long)
    channel = workers.channel
    assert isinstance(channel, Growing)
    assert channel.wait_for(lambda: any(report.step > 0 for report in channel.reports), 120)
    workers.start(long, count=1)
    assert channel.wait_for(lambda: "job-w2" in channel.waiting, 60)

    before = len(channel.beats)
    channel.grow()
    assert channel.wait_for(
        lambda: any((beat.layout_generation, beat.waiting_after) == (0, None) for beat in channel.beats[before:]), 20
    )
    channel.end(unheard=["job-w0", "job-w1"])
    assert workers.wait_for(2) == 0
    channel.shown.set()

    assert [workers.wait_for(number) for number in range(2)] == [0, 0], "they hear of the end once that has failed"
    assert workers.termination(0)["reason"] == "Closed"


class Late(StubChannel):
    """Acknowledges the leader's last report only once its heartbeat has heard of the end."""

    def report(self, report: Report) -> int:
        newest = super().report(report)
        assert report.outcome is None or self.wait_for(lambda: "job-w0" in self.told, 20)
        return newest


@pytest.mark.parametrize("workers", [(OnPack.WIDEN, Packing.PAPER, Late)], indirect=True)
def test_a_leader_that_hears_of_the_end_before_its_answer_finishes(workers: Workers) -> None:
    workers.start(SPEC | {"training": {"epochs": 1, "globalBatchSize": 100}})

    assert workers.wait() == [0, 0]
    assert [workers.termination(number)["outcome"] for number in range(2)] == ["Succeeded"] * 2


def test_a_worker_that_waits_for_an_absent_one_leaves_with_the_job(workers: Workers) -> None:
    workers.start(SPEC, count=1)
    channel = workers.channel
    assert channel.wait_for(lambda: bool(channel.waiting), 120)
    before = len(channel.beats)
    channel.ready("job-w1", Ready(address="127.0.0.1:1"))
    assert channel.wait_for(lambda: any(beat.waiting_after is None for beat in channel.beats[before:]), 60)

    channel.end()

    assert workers.wait_for(0) == 0
    assert workers.termination(0)["reason"] == "Closed"


def endless_data(**_: Any) -> None:
    """Forks a process first, and ends it by SIGTERM, as a pool of processes does."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, b"1")  # a signal that comes earlier in a fork is lost
        while True:
            time.sleep(0.01)
    os.read(reading, 1)
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    written = Path(os.environ[Env.TERMINATION_LOG]).exists()
    print(f"read the samples, {written=}", flush=True)
    threading.Event().wait()


def test_a_worker_that_loads_ends_when_told(workers: Workers) -> None:
    """In a container its process has the id 1, for which SIGTERM has no default action."""
    workers.start(SPEC | {"data": {"name": f"{__name__}:endless_data"}}, count=1)
    log = workers.folder / "log-0"
    until(lambda: log.exists() and "read the samples" in log.read_text(), 120)
    assert "written=False" in log.read_text(), "the child is no worker"

    workers.signal(0)

    assert workers.wait_for(0) == 143
    assert workers.termination(0)["reason"] == "Stopped"


def test_a_worker_that_waits_for_its_first_generation_ends_when_told(workers: Workers) -> None:
    workers.start(SPEC, count=1)
    channel = workers.channel
    assert channel.wait_for(lambda: bool(channel.waiting), 120)

    workers.signal(0)

    assert workers.wait_for(0) == 143
    assert workers.termination(0)["reason"] == "Stopped"


def test_a_worker_whose_peer_died_reports_it_and_keeps_its_state(workers: Workers) -> None:
    workers.start(SPEC | {"training": {"epochs": 10000, "globalBatchSize": 100}, "freeze": {"policy": "None"}})
    channel = workers.channel
    assert channel.wait_for(lambda: any(report.step > 0 for report in channel.reports), 120)

    workers.signal(1, signal.SIGKILL)

    assert channel.wait_for(lambda: channel.beats[-1].lost_peers == ["job-w1"], 60)
    assert re.match(r"generation 1 broke at step [1-9]", channel.beats[-1].why_broken)

    assert channel.wait_for(lambda: channel.beats[-1].waiting_after is not None, 60)
    workers.signal(0)
    assert workers.wait_for(0) == 143
    assert workers.termination(0)["reason"] == "Stopped"


@pytest.mark.parametrize(
    ("model", "end"),
    [
        ("breaks", {"reason": "DeviceFailed", "message": "AcceleratorError: CUDA error: uncorrectable ECC"}),
        ("runs_short", {"reason": "OutOfMemory", "message": "OutOfMemoryError: CUDA out of memory", "stages": 2}),
    ],
)
def test_a_worker_whose_accelerator_fails_ends_alone_and_says_how(
    workers: Workers, model: str, end: dict[str, Any]
) -> None:
    model_spec = {"name": f"tests.testkit.user_code.broken_device:{model}", "numLayers": 4}
    workers.start(SPEC | {"model": model_spec, "freeze": {"policy": "None"}})
    channel = workers.channel

    assert workers.wait_for(1) == 1
    said = workers.termination(1)
    message = said.pop("message")
    assert message.startswith(f"forward of head failed: {end.pop('message')}")
    assert said == {"outcome": "Failed"} | end
    assert workers.log(1).count("    raise self.error\n") == 1, "it shows where, once"
    assert channel.wait_for(lambda: channel.beats[-1].waiting_after is not None, 60)
    assert re.match(r"generation 1 broke at step [1-9]", channel.beats[-1].why_broken)
    assert channel.outcome is None, "another may train in its place"
    channel.end()
    assert workers.wait_for(0) == 0


def test_a_worker_told_to_stop_in_a_broken_round_awaits_no_generation(
    workers: Workers,
) -> None:
    workers.start(SPEC | {"training": {"epochs": 10000, "globalBatchSize": 100}, "freeze": {"policy": "None"}})
    channel = workers.channel
    assert channel.wait_for(lambda: any(report.step > 0 for report in channel.reports), 120)

    workers.signal(1, signal.SIGSTOP)
    workers.signal(0)
    workers.signal(1, signal.SIGKILL)

    assert workers.wait_for(0) == 143
    assert workers.termination(0)["reason"] == "Stopped"
