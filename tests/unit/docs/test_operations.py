"""The documentation, the rules and the dashboards know the metrics that there are, and no others; so with reasons."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry

from pipetransformer.metrics import Meter
from pipetransformer.metrics.collector import PositionCollector
from pipetransformer_contract.api.status import Reason
from pipetransformer_operator.channel.refusal import Refusal
from pipetransformer_operator.metrics import Metrics
from tests.testkit.operator.shown_state import ShownState
from tests.testkit.trainer.position import Standing, position
from tools.dashboards import write
from tools.devcluster.layout import REPOSITORY

OPERATIONS, METRICS = ((REPOSITORY / "docs" / f"{name}.md").read_text() for name in ("operations", "metrics"))
CHART = REPOSITORY / "charts" / "pipetransformer"
#: What the trainer says in its record, or of an end that is no failure.
OF_NO_CONDITION = {"TrainingFinished", "DeviceFailed"}
RULES = [
    rule for group in yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["groups"] for rule in group["rules"]
]


def described(registry: CollectorRegistry) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and labels of our metrics in a registry."""
    for collector in list(registry._collector_to_names):
        for metric in collector.collect():
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            if name.startswith("pipetransformer"):
                labels: Iterable[str] = getattr(metric, "_labelnames", ()) or getattr(collector, "_labelnames", ())
                yield name, tuple(labels)


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> tuple[CollectorRegistry, CollectorRegistry]:
    """All metrics of the operator, and all of a leader with an accelerator."""
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    meter = Meter()
    here = position()
    here.control.last_step["gradient_norm"] = 1.0
    meter.registry.register(PositionCollector(Standing(here), torch.device("cuda")))
    metrics = Metrics()
    metrics.show(ShownState())
    return metrics.registry, meter.registry


@pytest.fixture
def catalogue(registries: tuple[CollectorRegistry, ...]) -> dict[str, tuple[str, ...]]:
    """Labels of all metrics of operator and workers, by name."""
    return dict(one for registry in registries for one in described(registry))


def test_each_metric_has_its_row_with_its_labels(catalogue: dict[str, tuple[str, ...]]) -> None:
    rows = re.findall(r"^\| `(pipetransformer_\w+)` \|([^|]*)\|", METRICS, flags=re.MULTILINE)
    labels_of = {name: tuple(re.findall(r"\w+", labels)) for name, labels in rows}
    assert {name: labels_of.get(name) for name in catalogue} == catalogue


def test_the_page_says_which_metrics_are_histograms(registries: tuple[CollectorRegistry, ...]) -> None:
    shown = [metric for registry in registries for metric in registry.collect() if metric.name.startswith("pipetr")]
    (sentence,) = re.findall(r"These are histograms[^:]*: ([^.]*)\.", METRICS)
    named = {f"pipetransformer_{name}" for name in re.findall(r"`(\w+)`", sentence)}
    assert named == {metric.name for metric in shown if metric.type == "histogram"}
    gauges = [metric for metric in shown if metric.type not in ("histogram", "counter")]
    assert gauges and all(metric.type == "gauge" for metric in gauges)
    assert not [metric.name for metric in gauges if metric.name.endswith("_total")]


def test_each_alert_has_its_paragraph_that_says_what_why_and_what_to_do() -> None:
    alerts = OPERATIONS[OPERATIONS.index("\n## Alerts\n") :]
    paragraphs = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", alerts, flags=re.MULTILINE | re.DOTALL))
    assert sorted(paragraphs) == sorted(rule["alert"] for rule in RULES if "alert" in rule)
    for name, text in paragraphs.items():
        assert [word for word in ("**You see**", "**Why**", "**Do**") if word not in text] == [], name


def test_each_reason_has_a_row_that_says_why_and_there_are_no_others() -> None:
    failures = OPERATIONS[OPERATIONS.index("\n## Failures\n") : OPERATIONS.index("\n## Alerts\n")]
    rows = re.findall(r"^\| (`[^|]*`) \|([^|]*)\|", failures, flags=re.MULTILINE)
    assert all(says.strip() for _, says in rows)
    trainer = REPOSITORY / "trainer_image" / "pipetransformer"
    ends = re.compile(r'(?:trainer\.fail\(|_refuse\(identity, |reason=|reason = |reason: str = )"([A-Z]\w+)"')
    of_trainers = {reason for file in trainer.rglob("*.py") for reason in ends.findall(file.read_text())}
    told = {reason for names, _ in rows for reason in re.findall(r"`(\w+)`", names)}
    assert told == {*map(str, Reason), *of_trainers} - OF_NO_CONDITION


def test_each_reason_for_which_the_channel_refuses_has_its_status_in_its_page() -> None:
    page = (REPOSITORY / "docs" / "channel.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (`[^|]*`) \|", page, flags=re.MULTILINE)
    told = {(reason, int(code)) for code, reasons in rows for reason in re.findall(r"`(\w+)`", reasons)}
    assert told == {(kind.label, kind.code) for kind in Refusal}


def test_rules_and_dashboards_ask_for_metrics_that_there_are(catalogue: dict[str, tuple[str, ...]]) -> None:
    texts = [rule["expr"] for rule in RULES] + list(write.rendered().values())
    asked = {name for text in texts for name in re.findall(r"(?<![:\w])pipetransformer_\w+(?!:)\b", text)}
    parts = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert parts
    assert parts <= catalogue.keys()
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    assert recorded == {name for text in texts for name in re.findall(r"\b\w+:\w+:?\w*", text) if "pipetransf" in name}


def test_the_chart_holds_the_dashboards_as_they_are_written() -> None:
    """`make generate` writes them."""
    kept = {file.name: file.read_text() for file in write.FOLDER.glob("*.json")}
    assert kept == write.rendered()


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(write.rendered()[name])["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("name", write.rendered())
def test_each_panel_has_a_description_a_unit_and_a_name_of_its_own(name: str) -> None:
    found = panels(name)
    assert len({panel["id"] for panel in found}) == len(found)
    for panel in found:
        assert panel["title"]
        assert re.fullmatch(r"[A-Z0-9].{8,}\.", panel["description"]), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["expr"] for target in panel["targets"]), panel["title"]


@pytest.mark.parametrize("name", write.rendered())
def test_a_counter_is_shown_by_what_it_grew(name: str) -> None:
    shown = [(panel["title"], target["expr"]) for panel in panels(name) for target in panel["targets"]]
    counters = [(title, text) for title, text in shown if re.search(r"pipetransformer_\w+_total\b", text)]
    assert counters
    grown = re.compile(r"(increase|rate)\(pipetransformer_\w+_total(\{[^}]*\})?\[")
    bare = re.compile(r"(?<!increase\()(?<!rate\()pipetransformer_\w+_total\b")
    assert not [title for title, text in counters if bare.search(text) or not grown.search(text)]


def test_a_figure_of_a_job_is_one_although_the_operators_pod_was_replaced() -> None:
    shown = [
        (panel["title"], target["expr"])
        for panel in panels("job.json")
        for target in panel["targets"]
        if panel["type"] == "stat"
    ]
    grown = [(title, text) for title, text in shown if "increase(" in text]
    assert grown
    assert [title for title, text in grown if not text.startswith("sum(")] == []


def test_what_is_shown_of_the_leading_operator_is_not_shown_of_one_that_waits() -> None:
    shown = {
        panel["title"]: panel["targets"][0]["expr"]
        for panel in panels("fleet.json")
        if "of the leading operator" in panel["description"]
    }
    assert shown.keys() == {"Processor", "Memory"}
    assert [title for title, text in shown.items() if "pipetransformer_leader == 1" not in text] == []


@pytest.mark.parametrize("name", write.rendered())
def test_the_crosshair_is_shared(name: str) -> None:
    assert json.loads(write.rendered()[name])["graphTooltip"] == 1


def test_freezes_and_regroups_are_marked_on_loss_and_speed() -> None:
    marks = {mark["name"]: mark for mark in json.loads(write.rendered()["job.json"])["annotations"]["list"]}
    titles = {panel["id"]: panel["title"] for panel in panels("job.json")}
    for name, metric in (("Freeze", "frozen_layers"), ("Regroup", "layout_generation")):
        assert metric in marks[name]["expr"]
        on = {titles[number] for number in marks[name]["filter"]["ids"]}
        assert on == {"Loss", "Samples a second", "Seconds of a step"}


def test_the_table_of_jobs_opens_the_dashboard_of_a_job() -> None:
    (table,) = (panel for panel in panels("fleet.json") if panel["type"] == "table")
    (link,) = table["fieldConfig"]["defaults"]["links"]
    uid, variables = link["url"].removeprefix("/d/").split("?")
    board = json.loads(write.rendered()["job.json"])
    assert uid == board["uid"]
    known = {variable["name"] for variable in board["templating"]["list"]}
    assert {part.split("=")[0].removeprefix("var-") for part in variables.split("&") if "=" in part} <= known
