"""The table of what one would use instead: README.md and docs/worth.md have it between two marks.

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

_MARKED = re.compile(r"(<!-- worth -->\n).*?(<!-- /worth -->)", flags=re.DOTALL)
_COLUMNS = ("instead of ours", "its time", "ours", "its GPU time", "ours", "accuracy: ours less its")
_CASE, _GPUS = "runs.n8", "8 GPUs, of which each has memory to train 3 of the 12 layers"
#: The quicker of our two ways stands for us.
_OURS = ("offload", "elastic")
#: Runs of `_CASE`.
_RUNS = {
    "static": f"the best static pipeline ({_GPUS})",
    "freeze_recut_cache": "the same with our freezing, cache and stages cut again, but no elasticity",
    "torch_ddp": "DDP, if one GPU held the model",
    "torch_ddp_freeze_cache": "DDP with freezing and a cache written by hand, if one GPU held the model",
}
_TASKS = {
    "near": "digits, from MNIST",
    "brown": "genres of texts, from MiniLM",
    "far": "Fashion-MNIST, from MNIST",
    "near_slow": "digits, a tenth of the learning rate",
    "far_slow": "Fashion-MNIST, a tenth of the learning rate",
}
_AT_EQUAL_WORK = {
    "fewer_epochs": "fewer epochs with nothing frozen",
    "best_top_n": "only the top layers from the start",
}
#: Policies of the simulated cluster, at this load and share of large jobs that freeze.
_CLUSTER = "cluster.share25.load09"
_CLUSTERS = {
    "static": "1,000 GPUs, simulated: jobs of a fixed size",
    "pollux": "1,000 GPUs, simulated: elastic jobs as Pollux has them",
}


def rendered(text: str) -> str:
    """The text with the newest table between its marks."""
    return _MARKED.sub(lambda marks: f"{marks[1]}\n{_table()}\n{marks[2]}", text)


def _table() -> str:
    results = {name: _result(f"worth-{name}") for name in ("runs", "accuracy", "cluster")}
    rows = [*_runs(results["runs"]), *_accuracy(results["accuracy"]), *_clusters(results["cluster"])]
    return table(_COLUMNS, rows) if rows else "Not measured yet.\n"


def _result(name: str) -> dict[str, Any]:
    file = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _value(path: str, result: Mapping[str, Any]) -> Any:
    """What a path leads to; None if the result has it not."""
    return next((value for _, value, _ in found_at(path.split("."), result)), None)


def _runs(result: Mapping[str, Any]) -> Iterator[list[str]]:
    ours = next((run for name in _OURS if (run := _value(f"{_CASE}.{name}", result))), None)
    if ours is None:
        return
    for name, words in _RUNS.items():
        if (run := _value(f"{_CASE}.{name}", result)) is not None:
            compared = [f"{one[key]:.0f}{unit}" for key, unit in _UNITS for one in (run, ours)]
            yield [words, *compared, "the same" if name == "freeze_recut_cache" else ""]
    gigabits = _value("runs.fsdp.link_gbps_where_equal", result)
    if gigabits is not None:
        words = f"FSDP2: quicker than ours if each GPU has a link of more than {gigabits:.3g} Gb/s"
        yield [words, "", "", "", "", ""]


_UNITS = (("seconds", " s"), ("gpu_seconds", " GPU-s"))


def _accuracy(result: Mapping[str, Any]) -> Iterator[list[str]]:
    for rival, words in _AT_EQUAL_WORK.items():
        found = []
        for task, name in _TASKS.items():
            paired = _value(f"accuracy.{task}.recommended_minus_{rival}_at_equal_work", result)
            if paired is not None:
                low = "one seed" if paired["low95"] is None else f"at least {paired['low95']:+.1f}"
                found.append(f"{paired['mean']:+.1f} points ({low}; {name})")
        if found:
            yield [f"{words}, at equal work", "", "", "the same", "", ", ".join(found)]


def _clusters(result: Mapping[str, Any]) -> Iterator[list[str]]:
    ours = _value(f"{_CLUSTER}.auto", result)
    for name, words in _CLUSTERS.items():
        rival = _value(f"{_CLUSTER}.{name}", result)
        if ours is not None and rival is not None:
            hours = [one["jct_hours_all"]["mean"] for one in (rival, ours)]
            held = [one["gpu_hours"]["mean"] for one in (rival, ours)]
            time = [f"{each:.2f} h a job" for each in hours]
            yield [words, *time, *(f"{each:,.0f} GPU-h" for each in held), "taken as the same"]


def pages() -> dict[Path, str]:
    """The text of each page that has the table."""
    return {path: rendered(path.read_text()) for path in (REPOSITORY / "README.md", REPOSITORY / "docs" / "worth.md")}
