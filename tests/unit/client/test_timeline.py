"""The timeline of a run: its record, its drawing, and its page in a real browser."""

import json
import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import typer
from PIL import ImageFont
from rich.console import Console

from pipetransformer_client.cli.run import _print_end
from pipetransformer_client.run_folder import RunFolder
from pipetransformer_client.timeline import WIDTHS, draw, read_record, write_timeline
from pipetransformer_client.timeline.record import Held
from pipetransformer_client.timeline.scale import short, time_ticks
from pipetransformer_contract.api.status import Condition, ConditionStatus, ConditionType, JobStatus
from tests.testkit.client.command_line import command
from tests.testkit.client.records import crowded, generation, started, step, write_record
from tests.testkit.phone import WIDTH, look
from tools.browser import Browser

#: The widest common font.
FONT = ImageFont.truetype(matplotlib.get_data_path() + "/fonts/ttf/DejaVuSans.ttf", 13)
BOLD = ImageFont.truetype(matplotlib.get_data_path() + "/fonts/ttf/DejaVuSans-Bold.ttf", 13)
TEXT = "{http://www.w3.org/2000/svg}text"
LOST = "#c2452d"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 100 s: four stages, nine frozen layers at second 40, two stages at 50, and a failure at 80."""
    metrics = {"loss": 0.25, "accuracy": 0.875}
    events = [
        started(1000.0),
        generation(1000.0, 1, 4, 1),
        {"time": 1020.0, "kind": "Evaluated", "step": 20, "metrics": {"loss": None, "accuracy": 0.5}, "best": True},
        {"time": 1040.0, "kind": "Frozen", "step": 40, "frozenLayers": 9, "generation": 1},
        generation(1050.0, 2, 2, 1, frozen=9, step=50),
        generation(1080.0, 3, 1, 1, frozen=9, step=80, reason="Failure", why="Auto measures first"),
        {"time": 1090.0, "kind": "Evaluated", "step": 90, "metrics": metrics, "best": True},
        {"time": 1100.0, "kind": "Finished", "step": 100, "modelStep": 100, "metrics": metrics},
    ]
    steps = [
        step(1000.5 + n, 1 / (n + 1), 100.0 + n, number=1 + (n >= 50) + (n >= 80), idle=n / 100) for n in range(100)
    ]
    return write_record(tmp_path / "digits", events, steps)


def texts(svg: str) -> dict[str, ET.Element]:
    return {element.text or "": element for element in ET.fromstring(svg).iter(TEXT)}


def boxes(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Each label with its left, upper, right and lower edge, measured with a real font."""
    found = []
    for element in ET.fromstring(svg).iter(TEXT):
        text = element.text or ""
        font = BOLD if "font-weight" in element.attrib else FONT
        width, place = font.getlength(text), element.get("text-anchor", "start")
        left = float(element.attrib["x"]) - {"start": 0.0, "middle": width / 2, "end": width}[place]
        ascent, descent = 10.0, 3.0  # of the glyphs, not of the line
        base = float(element.attrib["y"])
        found.append((text, left, base - ascent, left + width, base + descent))
    return found


def test_a_record_tells_who_held_what_when(run_dir: Path) -> None:
    record = read_record(run_dir)
    assert [(span.start, span.end, span.frozen, len(span.cuts)) for span in record.spans] == [
        (0, 40, 0, 4),
        (40, 50, 9, 4),
        (50, 80, 9, 2),
        (80, 100, 9, 1),
    ]
    assert [(one.time, one.end, one.stages, one.pipelines, one.after_failure) for one in record.regroups] == [
        (0, 50, 4, 1, False),
        (50, 80, 2, 1, False),
        (80, 100, 1, 1, True),
    ]
    assert record.gpu_seconds == 50 * 4 + 30 * 2 + 20
    assert [(one.time, one.metrics) for one in record.evaluations] == [
        (20, {"accuracy": 0.5}),
        (90, {"loss": 0.25, "accuracy": 0.875}),
    ]
    assert record.outcome == "complete: loss 0.25, accuracy 0.875"


def test_a_record_tells_the_schedule_of_each_layout_why_and_how_idle_its_workers_were(run_dir: Path) -> None:
    record = read_record(run_dir)
    assert [(one.schedule, one.why_schedule) for one in record.regroups] == [
        ("OneForwardOneBackward", ""),
        ("OneForwardOneBackward", ""),
        ("OneForwardOneBackward", "Auto measures first"),
    ]
    assert [one.idle_share for one in record.regroups] == pytest.approx([0.245, 0.645, 0.895])
    assert [one.ahead_share for one in record.regroups] == pytest.approx([0.1225, 0.3225, 0.4475])
    page, _ = write_timeline(record, "digits", run_dir)
    assert "<td>64%</td>" in page.read_text() and "<td>Auto measures first</td>" in page.read_text()
    assert "<dt>regroups</dt><dd>2</dd>" in page.read_text(), "the start is none"
    assert "<dt>paused for</dt><dd>1.00 s</dd>" in page.read_text()


def test_each_span_of_a_stage_is_drawn_where_its_layers_are(tmp_path: Path) -> None:
    events = [started(0.0), generation(0.0, 1, 2, 2, spans=2)]
    record = read_record(write_record(tmp_path, events, [step(100.0, 1.0, 1.0)]))

    assert record.spans[0].cuts == (Held(0, 2, 0), Held(3, 5, 1), Held(6, 8, 0), Held(9, 11, 1))
    labels = [text for text, *_ in boxes(draw(record, "", 1100)) if text.startswith("stage")]
    assert sorted(labels) == ["stage 0", "stage 0", "stage 1", "stage 1"]


def test_a_level_is_drawn_with_its_own_layers(tmp_path: Path) -> None:
    roles = [{"worker": "w00", "pipeline": 0, "stage": 0, "layers": [[0, 2]]},
             {"worker": "w01", "pipeline": 0, "stage": 1, "layers": [[3, 5]]}]  # fmt: skip
    change = {"time": 50.0, "kind": "LevelChanged", "level": 1, "layers": 6, "firstStep": 1, "roles": roles}
    events = [started(0.0), generation(0.0, 1, 2, 1, frozen=0), change]

    record = read_record(write_record(tmp_path, events, [step(100.0, 1.0, 1.0)]))

    assert [(span.start, span.cuts[-1].last) for span in record.spans] == [(0.0, 11), (50.0, 5)]


def test_the_page_lists_levels_and_counts_their_pauses(tmp_path: Path) -> None:
    change = {"kind": "LevelChanged", "level": 1, "layers": 6, "firstStep": 2, "pauseSeconds": 0.25, "bytesMoved": 4321}
    events = [started(0.0), generation(0.0, 1, 2, 1), change | {"time": 3.0}, generation(5.0, 2, 2, 1, step=4)]
    levels = [0, 0, 1, 1, 0, 0]  # the last one begins with a generation
    steps = [step(n + 1.0, 1.0, 1.0, index=n, level=level) for n, level in enumerate(levels)]

    record = read_record(write_record(tmp_path / "run", events, steps))

    page = write_timeline(record, "levels", tmp_path)[0].read_text()
    rows = re.findall("<tr>(.*?)</tr>", page.partition('<table id="levels">')[2])[1:]
    assert [re.findall("<td>(.*?)</td>", row) for row in rows] == [
        ["0", "1.0", "0", "", ""],
        ["1", "3.0", "2", "0.250", "4,321"],
        ["0", "5.0", "4", "", ""],
    ]
    assert "<dt>paused for</dt><dd>0.75 s</dd>" in page


def test_a_page_without_levels_does_not_name_them(run_dir: Path, tmp_path: Path) -> None:
    assert "Levels" not in write_timeline(read_record(run_dir), "digits", tmp_path)[0].read_text()


def test_a_run_that_still_trains_is_drawn_up_to_its_last_step(run_dir: Path) -> None:
    events = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "events.jsonl").write_text("".join(events[:-1]) + events[-1][:20])
    record = read_record(run_dir)
    assert (record.seconds, record.outcome) == (99.5, "not ended yet")


@pytest.mark.parametrize("started_again", [[], [{"time": 990.0, "kind": "Started", "numLayers": 12}]])
def test_while_a_job_is_suspended_it_holds_nothing(started_again: list[dict[str, Any]], tmp_path: Path) -> None:
    """A new job that resumes the checkpoint adds to the record, too."""
    saved = {"time": 45.0, "kind": "CheckpointDurable", "step": 40, "frozenLayers": 0}
    resumed = generation(1000.0, 2, 2, 1, reason="Start")
    events = [started(0.0), generation(0.0, 1, 4, 1), saved, *started_again, resumed]
    steps = [step(float(n), 1.0, 1.0) for n in range(40)]
    steps += [step(998.0 + n, 1.0, 1.0, number=2) for n in range(43)]
    record = read_record(write_record(tmp_path, events, steps))

    assert [(one.time, one.end) for one in record.regroups] == [(0, 45), (1000, 1040)]
    assert [(span.start, span.end) for span in record.spans] == [(0, 45), (1000, 1040)]
    assert record.gpu_seconds == 4 * 45 + 2 * 40
    page, _ = write_timeline(record, "digits", tmp_path)
    assert "<dt>GPU time saved</dt><dd>24%</dd>" in page.read_text(), "80 of 340 GPU-seconds"


def test_a_damaged_line_is_left_out(run_dir: Path) -> None:
    """A machine that loses its power may leave zeros in a file."""
    whole = read_record(run_dir)
    for name in ("events.jsonl", "steps.jsonl"):
        (run_dir / name).write_bytes((run_dir / name).read_bytes().replace(b"\n", b"\n\0\0\n7\n{}\n\xff\n", 1))
    assert read_record(run_dir) == whole


def test_a_drawing_shows_layouts_gpus_speed_loss_and_metrics_over_one_time(run_dir: Path) -> None:
    found = texts(draw(read_record(run_dir), "digits", 1100))
    assert {"4 × 1", "2 × 1", "1 × 1", "stage 3", "4 GPUs", "2 released", "samples/s"} <= set(found)  # noqa: RUF001
    assert {"loss (dots: held-out)", "last 0.25", "held-out accuracy", "last 0.875", "100 s"} <= set(found)


def test_layers_that_a_trial_thawed_are_marked_and_the_page_says_why(run_dir: Path, tmp_path: Path) -> None:
    why = "layers 0-8 thawed: training loss 2.1 % above its trend"
    thaw = {"time": 1045.0, "kind": "Frozen", "step": 45, "frozenLayers": 0, "generation": 1, "whyThawed": why}
    with (run_dir / "events.jsonl").open() as file:
        events = file.read().splitlines()
    events.insert(4, json.dumps(thaw))
    (run_dir / "events.jsonl").write_text("\n".join(events) + "\n")

    record = read_record(run_dir)

    assert [(one.time, one.why_thawed) for one in record.freezes] == [(40, ""), (45, why)]
    svg = draw(record, "", 1100)
    assert svg.count('stroke-dasharray="1 3"') == svg.count('stroke-dasharray="3 3"') > 0, "both are in every part"
    page, _ = write_timeline(record, "digits", tmp_path)
    assert why in page.read_text()


def test_a_layout_after_a_failure_is_told_apart(run_dir: Path) -> None:
    svg = draw(read_record(run_dir), "digits", 1100)
    assert [text for text, element in texts(svg).items() if element.get("fill") == LOST] == ["1 × 1", "failure"]  # noqa: RUF001
    lines = [element for element in ET.fromstring(svg).iter() if element.get("stroke") == LOST]
    assert len({element.attrib["points"].split(",")[0] for element in lines}) == 1
    assert len(lines) == 5, "one in each chart"


@pytest.mark.parametrize("reason", ["Failure", "Drain", "Undo"])
def test_a_failure_that_left_the_layout_as_it_was_is_told_apart_too(reason: str, tmp_path: Path) -> None:
    events = [started(0.0), generation(0.0, 1, 4, 1), generation(50.0, 2, 4, 1, reason=reason)]
    svg = draw(read_record(write_record(tmp_path, events, [step(100.0, 1.0, 1.0)])), "", 1100)
    layouts = [element for element in ET.fromstring(svg).iter(TEXT) if element.text == "4 × 1"]  # noqa: RUF001
    assert [element.get("fill") == LOST for element in layouts] == [True, False]


def test_losses_that_are_negative_or_not_finite_are_drawn(tmp_path: Path) -> None:
    losses = [-1.5, float("nan"), float("inf"), None, -2.0]
    steps = [step(float(n), loss, None) for n, loss in enumerate(losses)]
    svg = draw(read_record(write_record(tmp_path, [started(0.0), generation(0.0, 1, 4, 1)], steps)), "", 1100)
    assert {"-2", "last -2"} <= set(texts(svg))
    assert "nan" not in svg and "inf" not in svg


def test_one_slow_step_does_not_hide_the_speed_of_others(tmp_path: Path) -> None:
    steps = [step(float(n), 1.0, 1.0 if n == 49 else 100.0) for n in range(50)]
    svg = draw(read_record(write_record(tmp_path, [started(0.0), generation(0.0, 1, 4, 1)], steps)), "", 1100)
    assert "last 100" in texts(svg)


def test_a_record_of_a_run_that_failed_says_why(tmp_path: Path) -> None:
    events = [started(0.0), generation(0.0, 1, 4, 1), {"time": 9.0, "kind": "Failed", "message": "no space"}]
    assert read_record(write_record(tmp_path, events, [])).outcome == "failed: no space"


@pytest.mark.parametrize(
    ("seconds", "last"), [(100, "100 s"), (299, "250 s"), (300, "5 min"), (17_999, "250 min"), (18_000, "5 h")]
)
def test_long_runs_have_ticks_in_minutes_or_hours(seconds: float, last: str) -> None:
    assert [words for _, words in time_ticks(seconds, 6)][-1] == last


@pytest.mark.parametrize(
    ("value", "words"), [(0.12345, "0.123"), (999.4, "999"), (1500, "1.5k"), (999_600, "1M"), (-2.5e6, "-2.5M")]
)
def test_numbers_are_short(value: float, words: str) -> None:
    assert short(value) == words


def test_a_record_without_steps_or_evaluations_is_drawn(tmp_path: Path) -> None:
    folder = write_record(tmp_path, [started(0.0), generation(0.0, 1, 2, 1)], [])
    for width in WIDTHS:
        assert set(texts(draw(read_record(folder), "new", width))) >= {"layers by stage", "GPUs held, one a worker"}


@pytest.mark.parametrize("seed", range(25))
def test_labels_of_a_crowded_record_neither_overlap_nor_leave_the_picture(seed: int, tmp_path: Path) -> None:
    record = read_record(crowded(tmp_path, seed))
    for width in WIDTHS:
        svg = draw(record, "crowded", width)
        found = boxes(svg)
        assert {"layers by stage", "GPUs held, one a worker", "samples/s", "regroup"} <= {text for text, *_ in found}
        for place, (text, left, top, right, bottom) in enumerate(found):
            assert left >= 0 and right <= width, text
            for other, left_2, top_2, right_2, bottom_2 in found[place + 1 :]:
                beside = right <= left_2 or right_2 <= left
                assert beside or bottom <= top_2 or bottom_2 <= top, f"{text} / {other} at {width}"


def test_a_long_run_is_drawn_in_as_few_points_as_it_has_pixels(tmp_path: Path) -> None:
    steps = [step(n / 10, 1 / (n + 1), 100.0 + n % 7) for n in range(20_000)]
    record = read_record(write_record(tmp_path, [started(0.0), generation(0.0, 1, 4, 1)], steps))
    assert len(draw(record, "long", WIDTHS[0])) < 60_000


def test_the_page_loads_nothing(run_dir: Path, tmp_path: Path) -> None:
    page, picture = write_timeline(read_record(run_dir), "<digits>", tmp_path)
    text = page.read_text()
    assert "&lt;digits&gt;" in text and "1,234,567" in text and "<dd>30%</dd>" in text
    for drawn in (text, picture.read_text()):
        assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|url\((?!#)|@import""", drawn), "it loads something"
    ET.parse(picture)


def test_a_folder_without_a_record_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "timeline", str(tmp_path)) == 2
    assert "holds no record of a run" in capsys.readouterr().err


def test_a_local_run_that_failed_is_drawn_too(run_dir: Path) -> None:
    failed = Condition(
        type=ConditionType.FAILED, status=ConditionStatus.TRUE, reason="Refused", last_transition_time=datetime.now(UTC)
    )
    with RunFolder.open(run_dir) as folder, pytest.raises(typer.Exit):
        _print_end(Console(), JobStatus(conditions=[failed]), folder)
    assert (run_dir / "timeline.html").exists()


def test_a_browser_without_a_network_shows_the_page(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Browser
) -> None:
    assert command(monkeypatch, "timeline", str(run_dir), str(tmp_path)) == 0
    browser.open(tmp_path / "timeline.html", width=1200, height=1400)
    rows = "['#regroups', '#freezes'].map(table => document.querySelectorAll(table + ' tbody tr').length)"
    assert browser.evaluate(rows) == [3, 1]
    assert browser.complaints == []


@pytest.mark.parametrize("width", [320, WIDTH, *(width + 31 for width in WIDTHS[1:]), 1280])
def test_the_page_is_legible_at_each_width_of_a_screen(width: int, browser: Browser, tmp_path: Path) -> None:
    page, _ = write_timeline(read_record(crowded(tmp_path, seed=3)), "crowded", tmp_path)
    seen = look(browser, page, width=width)
    assert seen.width <= width
    assert seen.overlaps == []
    assert "samples/s" in seen.labels and seen.labels.count("samples/s") == 1, "one drawing is shown"
    assert seen.small == []
