"""Pages that show results: what is met, lost or not measured, and what a row compares."""

from typing import Any

from tools.docs import benchmarks, worth
from tools.docs.benchmarks import Figure, rows


def test_an_aim_that_the_result_lacks_is_shown_as_not_measured() -> None:
    assert list(rows(Figure("speed", "speed", at_least=2.0), {})) == [
        ["", "speed", "", "at least 2", "**not measured**"]
    ]
    assert list(rows(Figure("cases.*.low95", "bound", at_most=1.0), {"cases": {"a": {"low95": None}}})) == [
        ["", "bound", "", "at most 1", "**not measured**"]
    ]
    assert list(rows(Figure("seconds", "seconds", at_most="bar_seconds"), {})) == [
        ["", "seconds", "", "at most bar_seconds", "**not measured**"]
    ]
    assert list(rows(Figure("speed", "speed"), {})) == [], "a figure without an aim is left out"


def test_a_figure_beside_its_aim_is_met_or_lost() -> None:
    result = {"speed": 1.5, "right": True, "bar": 2, "cases": {"a": {"seconds": 1.0}, "b": {"seconds": 3.0}}}
    assert list(rows(Figure("speed", "speed", at_least=1.5), result)) == [["", "speed", "1.5", "at least 1.5", "met"]]
    assert [row[-1] for row in rows(Figure("speed", "speed", at_least=1.6), result)] == ["**lost**"]
    assert list(rows(Figure("right", "right"), result)) == [["", "right", "yes", "yes", "met"]]
    assert list(rows(Figure("cases.*.seconds", "seconds", at_most="bar"), result)) == [
        ["a", "seconds", "1", "at most 2", "met"],
        ["b", "seconds", "3", "at most 2", "**lost**"],
    ]


def test_a_page_names_runs_of_other_commits() -> None:
    head = {"machine": {"cores": 2, "processor": "P", "torch": "2"}, "time": "2026-01-01", "command": "make it"}
    runs = {"n8": {"gpus": 8, "static": {"commits": ["a" * 10]}, "elastic": {"commits": ["a" * 10, "b" * 10]}}}
    of_both = "\n".join(
        benchmarks._result("none", head | {"commit": "b" * 40, "uncommitted_changes": False, "runs": runs})
    )
    assert f"Some of these runs are of other commits: {'a' * 10}." in of_both
    del runs["n8"]["static"]
    runs["n8"]["elastic"] = {"commits": ["b" * 10]}
    of_one = "\n".join(
        benchmarks._result("none", head | {"commit": "b" * 40, "uncommitted_changes": False, "runs": runs})
    )
    assert "other commits" not in of_one


def test_each_rival_is_compared_with_our_run_of_its_schedule() -> None:
    def run(seconds: float) -> dict[str, float]:
        return {"seconds": seconds, "gpu_seconds": 8 * seconds}

    ways = {"static": 60, "static_auto": 50, "offload": 30, "offload_auto": 20}
    found = {row[0]: row[1] for row in worth._runs({"runs": {"n8": {name: run(at) for name, at in ways.items()}}})}
    assert list(found.values()) == ["60 → 30 s", "50 → 20 s"]
    assert list(worth._runs({"runs": {"n8": {"static": run(60)}}})) == [], "ours was not measured"


def test_a_figure_of_one_seed_is_no_comparison_and_the_cache_is_told() -> None:
    key = "recommended_minus_fewer_epochs_at_equal_work"

    def paired(mean: float, low95: float | None, seeds: int) -> dict[str, Any]:
        return {"mean": mean, "low95": low95, "seeds": list(range(seeds))}

    near = {key: paired(0.66, 0.1, 5), f"{key}_without_cache": paired(0.2, -0.4, 5)}
    first, *_ = worth._accuracy({"accuracy": {"near": near, "far_slow": {key: paired(7.6, None, 1)}}})
    assert first[-1] == (
        "digits, from MNIST: +0.7 points (5 seeds, 95 %: at least +0.1; without a cache +0.2);"
        " too few runs to compare: Fashion-MNIST, a tenth of the learning rate"
    )


def test_a_cluster_shows_the_jobs_that_can_change_their_size_by_themselves() -> None:
    def policy(hours: float, elastic: float) -> dict[str, Any]:
        means = {"jct_hours_all": hours, "jct_hours_elastic": elastic, "gpu_hours": 1000}
        return {name: {"mean": mean} for name, mean in means.items()}

    load15 = {"auto": policy(2.41, 9.78), "pollux_freeze": policy(2.39, 9.31)}
    (row,) = worth._clusters({"cluster": {"share25": {"load15": load15}}}, {})
    assert row[1] == "2.39 → 2.41 h a job; 9.3 → 9.8 h a job of 4 or more GPUs"
