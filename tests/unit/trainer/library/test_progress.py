"""What a script shows of its training."""

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from pipetransformer import Training
from pipetransformer.errors import SpecError
from pipetransformer.library.progress import ProgressLine
from pipetransformer_contract.progress import Progress, duration
from tests.testkit.trainer.script import run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        """What a user sees at last: each redrawn line once."""
        lines = self.getvalue().split("\n")
        return "\n".join(line.rpartition("\r")[2].replace("\x1b[K", "") for line in lines)


class Closed(io.StringIO):
    """Standard error whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def line(step: int, **changed: Any) -> dict[str, Any]:
    return {
        "step": step - 1, "total_steps": 400, "seconds_left": 200.0, "loss": 0.5, "held_out": ("accuracy", 0.75),
        "frozen_layers": 2, "num_layers": 12, "samples_per_second": 100.0,
    } | changed  # fmt: skip


def test_a_terminal_has_one_line_that_is_redrawn() -> None:
    terminal, now = Terminal(), [0.0]
    shown = ProgressLine(terminal, lambda: now[0])
    shown.on_generation(0, 1, 4, 2)
    for step in (1, 2, 3):
        shown.on_step(line(step))
        now[0] += 0.06
    assert terminal.getvalue().count("\r") == 2, "it is redrawn more often than anybody reads"
    shown.on_end({})
    assert terminal.shown() == (
        "step 3/400 (0%)  ETA 3m20s  loss 0.5000  held-out accuracy 0.7500  layout 4 x 2"[:79] + "\n"
    )


def test_elsewhere_there_is_a_line_a_minute_and_the_last() -> None:
    pipe, now = io.StringIO(), [0.0]
    shown = ProgressLine(pipe, lambda: now[0])
    for step in range(1, 200):
        shown.on_step(line(step))
        now[0] += 1
    shown.on_end({})
    steps = [text.split()[1] for text in pipe.getvalue().splitlines()]
    assert steps == ["1/400", "61/400", "121/400", "181/400", "199/400"]
    assert "\r" not in pipe.getvalue()


def test_a_run_that_ends_early_leaves_the_terminal_at_a_new_line() -> None:
    terminal = Terminal()
    shown = ProgressLine(terminal)
    shown.on_step(line(1))
    shown.close()
    shown.on_step(line(2))  # told late
    assert terminal.getvalue().endswith("\n") and terminal.getvalue().count("\r") == 1


@pytest.mark.parametrize("stream", [Closed, lambda: closed_file()], ids=["broken-pipe", "closed"])
def test_what_fails_in_it_is_told_once_and_stops_nothing(stream: Any, caplog: pytest.LogCaptureFixture) -> None:
    shown = ProgressLine(stream())
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            shown.on_step(line(step))
        shown.on_end({})
    (record,) = caplog.records
    assert record.getMessage().startswith("progress is no longer shown: ")


def closed_file() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def test_a_script_shows_its_progress_unless_it_says_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "shown", training=Training(steps=6, global_batch_size=16))
    out, told = capsys.readouterr()
    assert out == ""
    assert told.splitlines()[0].startswith("step 1/6 (16%)  loss ") and "frozen 0/" in told
    last = told.splitlines()[-1]
    assert last.startswith("step 6/6 (100%)  loss ") and "layout 1 x 1" in last
    run(tmp_path / "hidden", training=Training(steps=6, global_batch_size=16), progress=False)
    assert "step" not in capsys.readouterr().err
    with pytest.raises(SpecError, match="must be True or False"):
        run(tmp_path / "wrong", progress="yes")


def test_a_run_outlives_its_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", Closed())
    assert run(tmp_path, training=Training(steps=6, global_batch_size=16)).steps == 6
    told = [record.getMessage() for record in caplog.records if "progress is no longer shown" in record.getMessage()]
    assert len(told) == 1


def test_a_line_without_a_total_or_metrics_is_short() -> None:
    assert Progress(step=3).line() == "step 3"
    assert Progress(step=4, total_steps=4, seconds_left=0.0).line() == "step 4/4 (100%)"
    assert Progress(step=6, total_steps=4).line() == "step 6/4 (100%)"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.9, "59s"), (200, "3m20s"), (3600, "1h"), (90061, "1d1h"), (-3, "0s")]
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_last_line_shows_the_last_evaluation() -> None:
    pipe = io.StringIO()
    shown = ProgressLine(pipe, lambda: 0.0)
    shown.on_step(line(399))
    shown.on_step(line(400))
    shown.on_evaluate(400, {"loss": 0.25, "accuracy": 0.875})
    shown.on_end({})
    assert "held-out accuracy 0.8750" in pipe.getvalue().splitlines()[-1]


def test_an_evaluation_before_any_step_shows_nothing() -> None:
    pipe = io.StringIO()
    ProgressLine(pipe).on_evaluate(0, {"loss": 0.25})
    assert pipe.getvalue() == ""
