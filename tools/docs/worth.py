"""The table of what one would use instead, and what one GPU costs. Pages have them between two marks.

A row whose benchmark has no result yet is left out.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.devcluster.layout import REPOSITORY
from tools.docs.markdown import table
from tools.docs.results import RESULTS, found_at

PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "worth.md")
_MARKED = re.compile(r"(<!-- (worth|gpu) -->\n).*?(<!-- /\2 -->)", flags=re.DOTALL)
_COLUMNS = ("instead of ours", "time: its → ours", "GPU time: its → ours", "accuracy: ours less its")
_CASE, _GPUS = "runs.n8", "8 GPUs, each with memory to train 3 of the 12 layers"
#: Frozen layers leave the GPU by default, so that run stands for us.
_OURS = "offload"
#: Runs of `_CASE`, and which of ours each is compared with.
_RUNS = {
    "static": (f"the best static 1F1B pipeline ({_GPUS})", _OURS),
    "static_auto": ("the same with `schedule: Auto`, and ours with it, too", "offload_auto"),
    "freeze_recut_cache": ("1F1B with our freezing, cache and stages cut again, but no elasticity", _OURS),
    "torch_ddp": ("DDP, if one GPU held the model", _OURS),
    "torch_ddp_freeze_cache": ("DDP with freezing and a cache written by hand, if one GPU held the model", _OURS),
}
_TASKS = {
    "near": "digits, from MNIST",
    "brown": "genres of texts, from MiniLM",
    "far": "Fashion-MNIST, from MNIST",
    "near_slow": "digits, a tenth of the learning rate",
    "far_slow": "Fashion-MNIST, a tenth of the learning rate",
}
_AT_EQUAL_WORK = {
    "fewer_epochs": "fewer epochs with nothing frozen, at equal work",
    "best_top_n": "only the top layers from the start, at equal work",
}
#: Policies of the simulated cluster, where jobs wait and a quarter of the large ones freeze.
_CLUSTER = "cluster.share25.load15"
_CLUSTERS = {
    "static": ("a cluster of 1,000 GPUs, simulated, with jobs of a fixed size", False),
    "freeze": ("the same, and jobs freeze with a cache", True),
    "pollux": ("the same cluster with elastic jobs as Pollux has them", False),
    "pollux_freeze": ("the same, and jobs freeze with a cache", True),
}


def rendered(text: str) -> str:
    """The text with the newest table between each pair of marks."""
    tables = {"worth": _table, "gpu": _one_gpu}
    return _MARKED.sub(lambda marks: f"{marks[1]}\n{tables[marks[2]]()}\n{marks[3]}", text)


def pages() -> dict[Path, str]:
    """The text of each page that has the table."""
    return {path: rendered(path.read_text()) for path in PAGES}


def _table() -> str:
    runs, fsdp, accuracy, cluster = (_result(f"worth-{name}") for name in ("runs", "fsdp", "accuracy", "cluster"))
    rows = [*_runs(runs), *_fsdp(fsdp), *_accuracy(accuracy), *_clusters(cluster, accuracy)]
    return table(_COLUMNS, rows) if rows else "Not measured yet.\n"


def _one_gpu() -> str:
    """Milliseconds of one layer on one GPU, and of reading its outputs."""
    found = _result("gpu/calibration")
    if not found:
        return "Not measured yet.\n"
    blocks = {
        (row["model"], row["precision"], row["samples"]): row for row in found["blocks"] if row["unit"] == "layer"
    }
    rows = []
    for read in found["cache"]:
        block = blocks[read["model"], read["precision"], read["samples"]]
        trained = block["forward"] + block["weight_gradient"] + block["input_gradient"]
        seconds = (read["forward"], trained, read["pinned"], read["file"])
        rows.append([f"{read['model']}, {read['precision']}", *(f"{1000 * each:.2f} ms" for each in seconds)])
    columns = (
        f"{found['cache'][0]['samples']} samples",
        "frozen layer",
        "trained layer",
        "from host memory",
        "from a file",
    )
    return f"{found['machine']['device']}, torch {found['machine']['torch']}:\n\n" + table(columns, rows)


def _result(name: str) -> dict[str, Any]:
    file = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _value(path: str, result: Mapping[str, Any]) -> Any:
    """What a path leads to; None if the result has it not."""
    return next((value for _, value, _ in found_at(path.split("."), result)), None)


def _runs(result: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, (words, our_run) in _RUNS.items():
        run, ours = (_value(f"{_CASE}.{one}", result) for one in (name, our_run))
        if run is not None and ours is not None:
            compared = (f"{run[key]:.0f} → {ours[key]:.0f} {unit}" for key, unit in _UNITS)
            yield [words, *compared, "the same" if name == "freeze_recut_cache" else ""]


def _fsdp(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """The strongest FSDP2: its messages hide behind its work as far as they can."""
    gigabits = _value("runs.fsdp.frozen_cache.link_gbps_where_equal_at_best", result)
    if gigabits is not None:
        condition = f"each GPU has a link of more than {gigabits:.2g} Gb/s and messages hide behind work"
        yield [f"FSDP2 with freezing and a cache written by hand: quicker than ours if {condition}", "", "", ""]


_UNITS = (("seconds", "s"), ("gpu_seconds", "GPU-s"))


def _accuracy(result: Mapping[str, Any]) -> Iterator[list[str]]:
    tasks = {task: name for task, name in _TASKS.items() if _value(f"accuracy.{task}", result) is not None}
    for rival, words in _AT_EQUAL_WORK.items():
        found, missing = [], []
        for task, name in tasks.items():
            paired = _value(f"accuracy.{task}.recommended_minus_{rival}_at_equal_work", result)
            if paired is None or paired["low95"] is None:
                missing.append(name)
            else:
                computed = _value(f"accuracy.{task}.recommended_minus_{rival}_at_equal_work_without_cache", result)
                found.append(f"{name}: {_points(paired['mean'])} ({_bound(paired, computed)})")
        if missing:
            found.append(f"too few runs to compare: {', '.join(missing)}")
        if tasks:
            yield [words, "", "", "; ".join(found)]


def _points(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f} points"  # the sum makes no -0.0


def _bound(paired: Mapping[str, Any], computed: Mapping[str, Any] | None) -> str:
    """The seeds and their bound, and the mean if no cache saved work."""
    without = "" if computed is None else f"; without a cache {computed['mean']:+.1f}"
    return f"{len(paired['seeds'])} seeds, 95 %: at least {paired['low95']:+.1f}{without}"


def _clusters(result: Mapping[str, Any], accuracy: Mapping[str, Any]) -> Iterator[list[str]]:
    ours = _value(f"{_CLUSTER}.auto", result)
    for name, (words, freezes) in _CLUSTERS.items():
        rival = _value(f"{_CLUSTER}.{name}", result)
        if ours is None or rival is None:
            continue
        keys = ("jct_hours_all", "jct_hours_elastic", "gpu_hours")
        hours, elastic, held = ([one[key]["mean"] for one in (rival, ours)] for key in keys)
        time = f"{hours[0]:.2f} → {hours[1]:.2f} h a job; {elastic[0]:.1f} → {elastic[1]:.1f} h a job of 4 or more GPUs"
        costs = "the same" if freezes else _assumed(accuracy)
        yield [words, time, f"{held[0]:,.0f} → {held[1]:,.0f} GPU-h", costs]


def _assumed(accuracy: Mapping[str, Any]) -> str:
    """What the simulation takes freezing to cost, and what it costs on the tasks that were measured."""
    path = ["accuracy", "*", "recommended", "difference"]
    found = sorted(round(value, 1) for _, value, _ in found_at(path, accuracy))
    return "assumed the same" + (f"; on our tasks {found[0]:+.1f} to {found[-1]:+.1f} points" if found else "")
