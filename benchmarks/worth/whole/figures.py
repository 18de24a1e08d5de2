"""Figures of whole runs: by case and way, medians over the runs; and what fell against an earlier result."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tools.docs.results import found_at

from .case import Case
from .rivals import RIVALS, Rival
from .took import Took, worst_difference
from .way import ELASTIC, OFFLOAD, OFFLOAD_AUTO, RECUT_CACHE, STATIC, STATIC_AUTO, WAYS, Way

#: Runs of each way, one a round.
Measured = Mapping[str, Sequence[Took]]

#: How far a loss may be from that of another layout, relative.
SAME_LOSS = 1e-9
#: How far an efficiency may fall against the committed result on as many cores.
MOST_FALLEN = 0.05

BY_NAME: dict[str, Way | Rival] = {one.name: one for one in chain[Way | Rival](WAYS, RIVALS)}


def figures(case: Case, measured: Measured) -> dict[str, Any]:
    """All figures of a case. Ratios are medians over the rounds."""
    found: dict[str, Any] = {
        "gpus": case.gpus,
        "trained_layers_that_fit": case.layers,
        "dilate": case.dilate,
        "rounds": max(len(runs) for runs in measured.values()),
    }
    for name, runs in measured.items():
        found[name] = _of_way(case, BY_NAME[name], runs)
        if STATIC.name in measured and name != STATIC.name:
            found[name]["speedup_over_best_static"] = ratio(measured[STATIC.name], runs)
    if {STATIC.name, ELASTIC.name} <= measured.keys():
        found["speedup_over_best_static"] = ratio(measured[STATIC.name], measured[ELASTIC.name])
        found["ideal_speedup_over_best_static"] = found[STATIC.name]["ideal_seconds"] / found[ELASTIC.name][
            "ideal_seconds"
        ]  # fmt: skip
    best = OFFLOAD if OFFLOAD.name in measured else ELASTIC
    if {RECUT_CACHE.name, best.name} <= measured.keys():
        found["speedup_over_freeze_only_recut"] = ratio(measured[RECUT_CACHE.name], measured[best.name])
    if {STATIC_AUTO.name, OFFLOAD_AUTO.name} <= measured.keys():
        found[OFFLOAD_AUTO.name]["speedup_over_static_auto"] = ratio(
            measured[STATIC_AUTO.name], measured[OFFLOAD_AUTO.name]
        )
    if {ELASTIC.name, OFFLOAD.name} <= measured.keys():
        both = [measured[way.name][0].losses for way in (ELASTIC, OFFLOAD)]
        found[OFFLOAD.name]["losses_equal"] = worst_difference(both) <= SAME_LOSS
    runs = [run for of_way in measured.values() for run in of_way]
    found["samples_lost"] = sum(run.samples_lost for run in runs)
    found["samples_repeated"] = sum(run.samples_repeated for run in runs)
    found["loss_difference_worst"] = max(worst_difference(losses) for losses in _by_freezing(measured))
    return found


def ratio(slow: Sequence[Took], quick: Sequence[Took]) -> float:
    """Median over the rounds that both have."""
    return statistics.median(a.seconds / b.seconds for a, b in zip(slow, quick, strict=False))


def is_comparable(now: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """Whether the earlier result, which may be empty, was measured on as many cores."""
    return bool(now["machine"]["cores"] == earlier.get("machine", {}).get("cores"))


def fallen(now: Mapping[str, Any], earlier: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about efficiencies that fell too far against an earlier result; none if `is_comparable` is false."""
    if not is_comparable(now, earlier):
        return
    for place, before, _ in found_at(["runs", "*", "*", "efficiency"], earlier):
        case, way = place
        efficiency = now["runs"].get(case, {}).get(way, {}).get("efficiency")
        if efficiency is not None and efficiency < before - MOST_FALLEN:
            yield f"{case}.{way}: efficiency {efficiency:.3f}, and {before:.3f} in the committed result"


def _of_way(case: Case, way: Way | Rival, runs: Sequence[Took]) -> dict[str, Any]:
    seconds = [run.seconds for run in runs]
    typical = runs[seconds.index(statistics.median_low(seconds))]
    found: dict[str, Any] = {
        "about": way.about,
        "commits": sorted({run.commit[:10] for run in runs}),
        "seconds": statistics.median(seconds),
        "seconds_of_runs": [round(one, 2) for one in seconds],
        "gpu_seconds": statistics.median(run.gpu_seconds for run in runs),
        "layouts": typical.layout_names,
        "pauses": [round(pause, 3) for pause in typical.pauses],
        "step_seconds": {boundary: round(each, 4) for boundary, each in typical.step_seconds.items()},
    }
    others = [run.other_cores for run in runs if run.other_cores is not None]
    if others:
        found["other_cores"] = round(max(others), 2)
    ideal = case.ideal(way) if isinstance(way, Way) else None
    if ideal is not None:
        found["ideal_seconds"] = ideal.seconds
        found["ideal_layouts"] = ", ".join(f"{one.stages}x{one.pipelines}" for one in ideal.layouts)
        found["efficiency"] = ideal.seconds / found["seconds"]
    return found


def _by_freezing(measured: Measured) -> Iterator[list[list[float]]]:
    """The losses of all runs that freeze alike."""
    by_freezing: dict[object, list[list[float]]] = {}
    for name, runs in measured.items():
        by_freezing.setdefault(BY_NAME[name].freezing, []).extend(run.losses for run in runs)
    yield from by_freezing.values()
