"""The picture of a run: what is read from its record, and what a real browser makes of the page."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from pipetransformer_client.timeline import read, write
from tests.testkit.client.command_line import command
from tools import pictures
from tools.devcluster import debian

ROLES = {
    4: [(stage, 3 * stage, 3 * stage + 2) for stage in range(4)],
    2: [(0, 0, 8), (1, 9, 11)],
}


def generation(time: float, number: int, stages: int, pipelines: int, frozen: int, step: int) -> dict[str, Any]:
    """A committed layout of 12 blocks."""
    roles = [
        {"worker": f"w{pipeline}{stage}", "pipeline": pipeline, "stage": stage, "firstLayer": a, "lastLayer": b}
        for pipeline in range(pipelines)
        for stage, a, b in ROLES[stages]
    ]
    return {
        "time": time, "kind": "GenerationCommitted", "generation": number, "stages": stages, "pipelines": pipelines,
        "frozenLayers": frozen, "firstStep": step, "pauseSeconds": 0.5, "bytesMoved": 1234567, "roles": roles,
        "reason": "Start" if number == 1 else "Release",
    }  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """100 s: one pipeline of four stages, from second 40 on nine frozen blocks, from 50 on two stages."""
    events = [
        {"time": 1000.0, "kind": "Started", "numLayers": 12, "steps": 100},
        generation(1000.0, 1, 4, 1, 0, 0),
        {"time": 1040.0, "kind": "Frozen", "step": 40, "frozenLayers": 9, "generation": 1},
        generation(1050.0, 2, 2, 1, 9, 50),
        {"time": 1100.0, "kind": "Finished", "step": 100, "modelStep": 100, "metrics": {"accuracy": 0.9}},
    ]
    steps = [{"time": 1000.5 + n, "loss": 1 / (n + 1), "samplesPerSecond": 100.0 + n} for n in range(100)]
    folder = tmp_path / "digits"
    folder.mkdir()
    for name, lines in (("events", events), ("steps", steps)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_record_tells_who_held_what_when(run_dir: Path) -> None:
    record = read(run_dir)
    assert [(span.start, span.end, span.stages, span.frozen, len(span.cuts)) for span in record.spans] == [
        (0, 40, 4, 0, 4),
        (40, 50, 4, 9, 4),
        (50, 100, 2, 9, 2),
    ]
    assert record.gpu_seconds == 50 * 4 + 50 * 2
    assert record.outcome == "complete: accuracy 0.9"


def test_a_run_that_still_trains_is_drawn_up_to_its_last_step(run_dir: Path) -> None:
    events = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "events.jsonl").write_text("".join(events[:-1]) + events[-1][:20])
    record = read(run_dir)
    assert (record.seconds, record.outcome) == (99.5, "not ended yet")


def test_the_page_needs_nothing_besides_itself(run_dir: Path, tmp_path: Path) -> None:
    page, png = write(read(run_dir), "<digits>", tmp_path)
    text = page.read_text()
    assert "&lt;digits&gt;" in text and "1,234,567" in text and "25% fewer" in text
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|url\((?!#)|@import""", text), "it loads something"
    assert imread(png).shape[:2] > (500, 1000)


def test_a_folder_without_a_record_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "timeline", str(tmp_path)) == 2
    assert "holds no record of a run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_browser_without_a_network_shows_the_page(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(monkeypatch, "timeline", str(run_dir), str(tmp_path / "page")) == 0
    page = tmp_path / "page" / "timeline.html"
    browser = [*pictures.browser(tmp_path / "data"), "--window-size=1200,1400"]
    ran = subprocess.run(
        [*browser, "--dump-dom", page.as_uri()], env=debian.environment(), capture_output=True, text=True, check=True
    )
    dom = ran.stdout
    assert dom.count("<tr>", dom.index('id="regroups"'), dom.index('id="freezes"')) == 1 + 2
    assert dom.count("<tr>", dom.index('id="freezes"')) == 1 + 1
    assert "<svg" in dom and "samples/s" in dom
    assert "CONSOLE" not in ran.stderr, ran.stderr
    picture = tmp_path / "page.png"
    subprocess.run([*browser, f"--screenshot={picture}", page.as_uri()], env=debian.environment(), check=True)
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (1400, 1200)
    colours = {tuple(round(float(value), 1) for value in pixel) for pixel in pixels[::7, ::7].reshape(-1, 3)}
    assert len(colours) > 10, "the page is blank"
