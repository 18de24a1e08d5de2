"""docs/benchmarks.md: each result beside its aim, with its picture; a missed aim is called lost."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.devcluster.layout import REPOSITORY
from tools.docs import charts
from tools.docs.markdown import GENERATED, table
from tools.docs.results import RESULTS, found_at

_INTRODUCTION = """# Benchmarks

Each figure is in `benchmarks/results/`, with the machine and the commit that it was measured on. Each heading stands
above what its benchmark does, and the command that wrote the result. `make bench-HEADING` (or `make soak`) measures it
again. All workers are processes or pods on one machine's processors, so these are figures of the software, not of
GPUs. A figure that misses its aim is called **lost**.
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: its path in a result (`*` stands for every key), its meaning and its aim.

    `path` leads to a number, a boolean, or a list, whose length counts. `at_most` is a number, or the name of one in
    an enclosing object.
    """

    path: str
    meaning: str
    at_most: float | str | None = None
    at_least: float | None = None


FIGURES = {
    "async": (
        Figure(
            "throughput_over_flushed", "PipeOptim over 1F1B, K=4, M=8, 16 steps a round, lower 95 % bound", at_least=1.2
        ),
        Figure("over_best_synchronous", "the same over the best synchronous schedule", at_least=1.0),
        Figure("prediction_over_newest", "the same over asynchronous 1F1B without prediction", at_least=0.97),
        Figure(
            "distance_adamw_1",
            "digits, AdamW, one micro-batch a step: distance of PipeOptim's loss to the synchronous one, over that of"
            " the newest weights",
            at_most=0.65,
        ),
        Figure("distance_adamw_k", "AdamW, K micro-batches a step: the same", at_most=0.5),
        Figure("distance_sgd_k", "SGD, K micro-batches a step: the same", at_most=0.7),
        Figure("upper_bounds.*", "upper 95 % bounds of these distances", at_most=1.0),
        Figure("accuracy_loss_k", "accuracy that PipeOptim loses with K micro-batches a step, the most", at_most=0.02),
        Figure("distance_sgd_1", "SGD, one micro-batch a step: distance as above"),
        Figure("distances_further.*", "distances with predictions one step further, as the released code has it"),
        Figure("distances_stashed.*", "distances with stashed weights (PipeDream)"),
        Figure("distances_after_epochs.*.*", "distances after another number of epochs than 16"),
        Figure("accuracy_losses_after_epochs.*.*", "accuracy that PipeOptim loses after another number of epochs"),
    ),
    "cache": (
        Figure("bit_equal", "reading and computing give the same bits"),
        Figure("corruption_noticed", "a damaged file is computed again"),
        Figure("choice_right", "`Auto` reads where that is quicker"),
        Figure("jobs_right", "whole jobs: losses, samples and hits as expected"),
    ),
    "channel": (
        Figure("seconds_all_told_1500", "1,500 workers: seconds until all know of a generation"),
        Figure("loop_lag_seconds_1500", "1,500 workers: longest time that the operator's loop was busy with it"),
        Figure("rss_growth_mb_1500", "1,500 workers: growth of the operator in MB"),
        Figure("seconds_all_told_4096", "4,096 workers: seconds until all know of a generation", at_most=30),
        Figure(
            "loop_lag_seconds_4096", "4,096 workers: longest time that the operator's loop was busy with it", at_most=1
        ),
        Figure("rss_growth_mb_4096", "4,096 workers: growth of the operator in MB", at_most=200),
        Figure("seconds_all_told_4096_silent_leader", "the same, if all workers ask for all members: seconds"),
        Figure("loop_lag_seconds_4096_silent_leader", "the same: longest time", at_most=1),
        Figure("rss_growth_mb_4096_silent_leader", "the same: growth in MB", at_most=200),
    ),
    "digits": (
        Figure("accuracy_difference", "accuracy with freezing, less that without", at_least=-0.01),
        Figure("speedup", "time without freezing, over that with it"),
    ),
    "equality": (
        Figure("worst_relative_difference", "float64: losses and gradient norms of all steps", at_most=1e-9),
        Figure("worst_relative_difference_by_schedule.*", "the same, by schedule", at_most=1e-9),
        Figure("worst_float32_gradient_difference", "float32: each layer's gradient from one state", at_most=1e-5),
        Figure("deaths", "workers killed during the runs"),
    ),
    "kills": (
        Figure("all_struck", "all workers that should die did"),
        Figure("count", "deaths before the last step"),
        Figure("median_seconds", "seconds from a death to the end of the next new step without an operator, median"),
        Figure("p90_seconds", "the same, 9 of 10"),
        Figure("max_seconds", "the same, the longest", at_most="bar_seconds"),
    ),
    "multilevel": (
        Figure(
            "loss_difference_mean",
            "V-cycle with 75 % of the operations: final loss less the large model's, mean",
            at_most=0,
        ),
        Figure("flops_saving_median", "operations saved until the large model's final loss, median", at_least=0.25),
        Figure("beats_small_alone", "the V-cycle's loss is below that of the small model alone, in every seed"),
        Figure("level_change_seconds", "100 MB, two workers: seconds of a level change"),
        Figure("level_change_over_regroup", "the same over a regroup that replaces a worker", at_most=1.5),
    ),
    "overhead": (
        Figure("cases.*.*.lower_bound", "our throughput over the baseline's, lower 95 % bound", at_least=0.97),
        Figure("cases.*.*.ratio", "the same, median"),
    ),
    "partition": (
        Figure("seconds_1000x64", "seconds to cut 1,000 layers into 64 stages", at_most=0.05),
        Figure("measuring.share", "share of the time that measuring takes", at_most=0.011),
    ),
    "regroup": (
        Figure(
            "cases.*.*.pause_seconds.median",
            "pause in seconds, median; at most 1.5 x bare P2P + 0.15 s",
            at_most="allowed_seconds",
        ),
        Figure("cases.*.*.pause_seconds.max", "the longest of these pauses"),
        Figure("cases.*.*.torchrun_seconds.median", "torchrun's pause in seconds, where it was measured"),
        Figure("ratio_10mb", "10 MB: torchrun's pause over ours", at_least=15.0),
        Figure("ratio_100mb", "100 MB: the same", at_least=15.0),
        Figure("ratio_1gb", "1 GB: the same", at_least=40.0),
        Figure("ratio", "100 MB, four workers: the same", at_least=10.0),
        Figure(
            "pause_over_step_100mb", "100 MB: the pause over a step of 0.25 s, the worst median of a case", at_most=1.0
        ),
        Figure("pause_over_step_1gb", "1 GB: the same over a step of 2 s", at_most=1.0),
        Figure("pause_over_bare_p2p_1gb", "1 GB: the pause of growing over bare P2P, the worst median", at_most=0.5),
        Figure("shrink_seconds_2", "two workers: seconds of a pause of shrinking, the worst median", at_most=0.05),
        Figure("shrink_seconds_8", "eight workers: the same", at_most=0.08),
    ),
    "release": (
        Figure("p50_seconds", "seconds from a freeze to a GPU that another pod can use, median"),
        Figure("p95_seconds", "the same, 19 of 20", at_most=5.0),
        Figure("phases.*.p50", "phase in seconds, median"),
        Figure("phases.*.p95", "phase in seconds, 19 of 20"),
    ),
    "scale": (
        Figure("seconds_all_running_100", "100 jobs: seconds until all run"),
        Figure("seconds_all_running_1000", "1,000 jobs: seconds until all run", at_most=120),
        Figure("seconds_all_running_1000_plain_jobs", "1,000 plain Jobs of Kubernetes, without an operator: the same"),
        Figure(
            "start_over_plain_jobs_1000_core_seconds",
            "1,000 jobs: core-seconds until all jobs run, over those of plain Jobs",
            at_most=1.5,
        ),
        Figure("start_over_plain_jobs_1000_seconds", "1,000 jobs: seconds, the same", at_most=1.6),
        Figure("plan_p99_seconds_100", "100 jobs: seconds from a freeze report to its plan, 99 in 100", at_most=1.0),
        Figure("plan_p99_seconds_1000", "1,000 jobs: the same", at_most=1.0),
        Figure("rss_mb_100", "100 jobs: operator's largest resident size in MB", at_most=400),
        Figure("rss_mb_1000", "1,000 jobs: the same", at_most=400),
    ),
    "schedules": (
        Figure(
            "executor_over_stock_k2",
            "2 stages: our executor over torch's runtime, real compute, lower 95 % bound",
            at_least=1.0,
        ),
        Figure("executor_over_stock_k4", "4 stages: the same", at_least=1.0),
        Figure(
            "zero_bubble_over_1f1b", "the better zero-bubble schedule over 1F1B, K=4, M=8, lower bound", at_least=1.12
        ),
        Figure(
            "ahead_over_today_m4",
            "12 of 24 layers frozen, K=4, M=4: frozen forwards ahead over re-balanced 1F1B, lower bound",
            at_least=1.25,
        ),
        Figure("ahead_over_today_m8", "M=8: the same", at_least=1.25),
        Figure("ahead_over_best", "M=8: the same over the best of five schedules in place", at_least=1.2),
        Figure("ahead_over_bound", "M=8: the step over its bound", at_most=1.06),
        Figure(
            "terapipe_over_uniform_k4",
            "planned slices over the best uniform count, K=4, batch 2, lower bound",
            at_least=1.03,
        ),
        Figure("terapipe_over_uniform_k8", "K=8: the same", at_least=1.03),
        Figure("terapipe_over_gpipe_batch2", "planned slices over GPipe, K=8, batch 2, lower bound", at_least=2.0),
        Figure("terapipe_over_gpipe_batch1", "batch 1: the same", at_least=3.0),
        Figure("terapipe_over_gpipe_k16", "K=16, batch 1: the same", at_least=5.0),
        Figure("auto_worst_loss", "the chosen schedule's step over the best measured one's, less 1", at_most=0.05),
        Figure("auto_indistinguishable", "each choice is the best measured one, or cannot be told from it"),
        Figure("prediction_error", "predicted against measured step, worst of all lists", at_most=0.05),
        Figure("lists_checked", "lists that the judge of the tests has checked"),
        Figure("mutants_rejected", "wrong lists that it has rejected", at_least=50),
        Figure(
            "planner_worst", "planned slices against all slicings, by the paper's objective, relative", at_most=1e-9
        ),
        Figure("planner_worst_exact", "the same by the seconds of the lists", at_most=0.01),
        Figure("seconds_per_action", "seconds of an action without those of its units"),
    ),
    "sharing": (
        Figure("clusters", "random clusters"),
        Figure("jobs", "jobs on them"),
        Figure("generations_per_job_at_rest", "generations of a job in the quiet hour, the most of any job", at_most=2),
        Figure("mean_generations_per_job_at_rest", "the same, mean"),
        Figure(
            "idle_gpu_share_while_a_job_fits",
            "share of GPU time that no job holds although one could use it, mean of the clusters",
            at_most=0.02,
        ),
        Figure("largest_idle_gpu_share", "the same, the largest"),
        Figure("inversions", "grants that only jobs of higher priority could serve", at_most=0),
        Figure("preemptions", "workers that the scheduler preempted"),
    ),
    "soak": (
        Figure("faults", "faults that struck running jobs"),
        Figure("kinds.*.struck", "of each kind", at_least=15),
        Figure("kinds.*.median_seconds", "seconds until the job trains again, median"),
        Figure("kinds.*.longest_seconds", "the same, the longest"),
        Figure("problems", "problems that a checker found at the end", at_most=0),
    ),
    "tuning": (
        Figure("cases.*.mean_accuracy", "accuracy, mean of the seeds"),
        Figure("cases.*.gpu_time", "GPU time held, nothing frozen = 1"),
    ),
    "worth-accuracy": (
        Figure("accuracy.*.none.mean", "accuracy in % with nothing frozen, mean of the seeds"),
        Figure("accuracy.*.recommended.difference", "the recommended setting less that, in points"),
        Figure(
            "accuracy.near.recommended.difference_low95",
            "the same for digits from MNIST: one-sided 95 % bound",
            at_least=-0.5,
        ),
        Figure(
            "accuracy.brown.recommended.difference_low95",
            "the same for a real BERT: one-sided 95 % bound",
            at_least=-1.0,
        ),
        Figure(
            "accuracy.*.recommended.work_cached", "work of the recommended setting with the cache, nothing frozen = 1"
        ),
        Figure("accuracy.*.recommended.confirmed", "measured on seeds that it was not chosen on"),
        Figure(
            "accuracy.*.recommended_minus_fewer_epochs_at_equal_work.mean",
            "the recommended setting less fewer epochs at equal work, in points",
            at_least=-0.5,
        ),
        Figure(
            "accuracy.*.recommended_minus_fewer_epochs_at_equal_work.low95",
            "the same: one-sided 95 % bound of the task",
        ),
        Figure(
            "over_tasks.recommended_minus_fewer_epochs_at_equal_work.best_low95",
            "the same: the best bound of a task (of several, so no 95 % bound), above 0 if freezing beats it anywhere",
            at_least=0.0,
        ),
        Figure(
            "accuracy.*.recommended_minus_best_top_n_at_equal_work.mean",
            "the recommended setting less the best top-n at equal work, in points",
            at_least=-0.5,
        ),
        Figure(
            "over_tasks.recommended_minus_best_top_n_at_equal_work.best_low95",
            "the same: the best bound of a task (of several), above 0 if freezing beats top-n anywhere",
            at_least=0.0,
        ),
        Figure("accuracy.*.trial_minus_no_trial.mean", "all policies on trial less the same without, in points"),
        Figure("accuracy.*.trial_minus_no_trial.thaws", "the same: trials that failed"),
        Figure("accuracy.*.paper_alpha_third.difference", "the paper's schedule from the first eighth on, in points"),
    ),
    "worth-cluster": (
        Figure("cluster.fast_equals_plan", "`plan()` gives the layouts of its parts, 200 jobs"),
        Figure("cluster.seconds_fast", "processor seconds of the longest simulation by parts", at_most=60),
        Figure("cluster.seconds_plan", "processor seconds of a simulation by `plan()`", at_most=600),
        Figure("cluster.share25.load09.auto.gpu_hours_ratio", "GPU-hours over those of static, Auto", at_most=0.90),
        Figure("cluster.share100.load09.auto.gpu_hours_ratio", "the same, all elastic jobs freeze", at_most=0.60),
        Figure(
            "cluster.share25.load15.release_starting.queue_ratio",
            "mean time in the queue over that of static, at a load of 1.5, Release down to the start's step",
            at_most=0.25,
        ),
        Figure(
            "cluster.share25.load09.auto.jct_ratio_to_pollux",
            "mean time to the end over that of Pollux, where nothing freezes",
            at_most=1,
        ),
        Figure(
            "cluster.share25.load15.auto.jct_elastic_ratio_to_pollux",
            "load of 1.5: hours to the end of an elastic job over those of Pollux, where nothing freezes",
            at_most=1,
        ),
        Figure(
            "cluster.share25.load15.pollux_freeze.jct_elastic_ratio_to_pollux",
            "the same of Pollux with our freezing and cache",
        ),
        Figure("cluster.share25.load09.*.gpu_hours_ratio", "GPU-hours over those of static"),
        Figure("cluster.share25.load09.*.jct_hours_elastic.mean", "hours to the end of an elastic job, mean"),
        Figure("cluster.share25.load15.*.queue_hours_all.mean", "hours in the queue at a load of 1.5, mean"),
        Figure("cluster.share100.load09.*.gpu_hours_ratio", "all elastic jobs freeze: GPU-hours over those of static"),
        Figure("cluster.slow.*.jct_hours_elastic.mean", "starts of 2 minutes and pauses of 30 s: hours to the end"),
    ),
    "worth-cluster-real": (
        Figure("cluster_real.job_error_p95", "error of a job's time to its end, 19 of 20", at_most=0.10),
        Figure("cluster_real.gpu_seconds_error", "error of all GPU-seconds, worst policy", at_most=0.05),
        Figure("cluster_real.slowness", "step over its declared time, on other jobs"),
        Figure("cluster_real.start_seconds", "seconds until admitted jobs train, on other jobs"),
    ),
    "worth-fsdp": (
        Figure("runs.fsdp.link_gbps_where_equal", "Gb/s of each link at which FSDP2 takes our elastic run's time"),
        Figure("runs.fsdp.*.link_gbps_where_equal", "the same; unfrozen, that of the best static pipeline"),
        Figure(
            "runs.fsdp.*.link_gbps_where_equal_at_best",
            "Gb/s at which FSDP2 would take our time if its messages hid behind work; computed",
        ),
        Figure("runs.fsdp.*.our_seconds", "seconds of our run: elastic, or the best static pipeline"),
        Figure("runs.fsdp.*.seconds_by_gbps.*", "seconds of FSDP2, by Gb/s of each GPU's link"),
        Figure("runs.fsdp.*.seconds_at_best_by_gbps.*", "seconds of FSDP2 if its messages hid behind work; computed"),
    ),
    "worth-ideal": (
        Figure(
            "ideal.brute_force_worst_ratio",
            "step of the ideal against that of all layouts and cuts of random jobs, worst ratio",
            at_most=1 + 1e-9,
        ),
        Figure("ideal.brute_force_layouts", "layouts that were compared"),
        Figure("cases.*.*.speedup", "time of the best static layout, over that of this run; computed"),
        Figure("cases.*.*.gpu_time", "GPU time of this run, the best static layout = 1; computed"),
    ),
    "worth-runs": (
        Figure("runs.n8.static.efficiency", "best static layout, 8 GPUs: ideal seconds over measured", at_least=0.9),
        Figure("runs.n4.elastic.efficiency", "elastic run, 4 GPUs: the same", at_least=0.9),
        Figure("runs.n8.elastic.efficiency", "8 GPUs: the same", at_least=0.9),
        Figure("runs.n16.elastic.efficiency", "16 GPUs: the same", at_least=0.85),
        Figure(
            "runs.n8.speedup_over_best_static", "8 GPUs: time of the best static layout over the elastic", at_least=2.2
        ),
        Figure("runs.n8.offload.speedup_over_best_static", "the same, frozen layers leave the device", at_least=2.4),
        Figure(
            "runs.n8.offload_auto.speedup_over_static_auto",
            "the same, both with `schedule: Auto`",
            at_least=2.4,
        ),
        Figure("runs.n8.offload.losses_equal", "their losses are those of the elastic run, to 1e-9"),
        Figure(
            "runs.n8.speedup_over_freeze_only_recut",
            "time of the static layout with freezing, re-cut stages and cache, over the best elastic",
            at_least=1.35,
        ),
        Figure("runs.n8.ddp_freeze_cache.seconds", "`stages: 1` with freezing and cache, if a GPU held the model"),
        Figure("runs.n8.torch_ddp_freeze_cache.seconds", "plain torch, written by hand: the same"),
        Figure("runs.*.samples_lost", "samples lost in all runs", at_most=0),
        Figure("runs.*.samples_repeated", "samples repeated", at_most=0),
        Figure("runs.*.loss_difference_worst", "float64 losses in all layouts of a schedule, relative", at_most=1e-9),
        Figure("runs.*.*.seconds", "seconds, median"),
        Figure("runs.*.*.gpu_seconds", "GPU-seconds, median"),
    ),
}


def rendered() -> str:
    """The page."""
    parts = [GENERATED + _INTRODUCTION]
    for name, about in _targets().items():
        stem = next((one for one in (name, f"worth-{name}") if (RESULTS / f"{one}.json").exists()), None)
        parts.append(f"## {name}\n\n{about}\n")
        if stem is not None:
            parts += _result(stem, json.loads((RESULTS / f"{stem}.json").read_text()))
        else:
            parts.append("It has written no result yet.\n")
    return "\n".join(parts)


def _targets() -> dict[str, str]:
    """The Makefile's description of each benchmark and of the soak, without targets that only call others."""
    text = (REPOSITORY / "Makefile").read_text()
    target = r"^(?:bench-|(?=soak:))([\w-]+): (?:\$\(STAMP\)|programs).*?## (.*)$"
    return dict(sorted(re.findall(target, text, flags=re.MULTILINE)))


def _result(name: str, result: dict[str, Any]) -> Iterator[str]:
    machine, day = result["machine"], str(result["time"])[:10]
    where = f"{machine['cores']} cores ({machine['processor']}), torch {machine['torch']}"
    changed = ", with uncommitted changes" if result["uncommitted_changes"] else ""
    if name in charts.CHARTS:
        yield f"![{charts.CHARTS[name].title}](images/{charts.file_name(name)})\n"
    yield f"`{result['command']}`, {day}, commit `{result['commit'][:10]}`{changed}, {where}.\n"
    if of_others := sorted(_commits(result) - {result["commit"][:10]}):
        yield f"Some of these runs are of other commits: {', '.join(of_others)}.\n"
    found = [row for figure in FIGURES.get(name, ()) for row in rows(figure, result)]
    if found:
        yield table(("", "figure", "measured", "aim", ""), found)
    for size, why in result.get("failed", {}).items():
        yield f"**Lost**: {size} jobs did not get through: {why}\n"
    picture = RESULTS / f"{name}.png"
    if picture.exists():
        yield f"![{name}](../benchmarks/results/{name}.png)\n"


def _commits(result: Mapping[str, Any]) -> set[str]:
    """The commits of the runs that a result was made of, where it names them."""
    return {commit for _, commits, _ in found_at(["runs", "*", "*", "commits"], result) for commit in commits}


def rows(figure: Figure, result: Mapping[str, Any]) -> Iterator[list[str]]:
    """What a figure stands for in a result: its place, meaning, value, aim, and whether that is met.

    A figure with an aim has a row even if the result does not have it: an aim that nobody has tried is not met.
    """
    there = [one for one in found_at(figure.path.split("."), result) if one[1] is not None]  # None: too few seeds
    if not there and (aim := _aim(figure.at_most, figure.at_least)):
        yield ["", figure.meaning, "", aim, "**not measured**"]
    for place, found, around in there:
        value = len(found) if isinstance(found, list) else found
        limit = around[figure.at_most] if isinstance(figure.at_most, str) else figure.at_most
        aim, met = _aim(limit, figure.at_least), True
        if isinstance(value, bool):
            aim, met = "yes", value
        elif limit is not None:
            met = value <= limit
        elif figure.at_least is not None:
            met = value >= figure.at_least
        shown = ("yes" if value else "no") if isinstance(value, bool) else f"{value:.4g}"
        yield [", ".join(place), figure.meaning, shown, aim, "" if not aim else "met" if met else "**lost**"]


def _aim(at_most: float | str | None, at_least: float | None) -> str:
    """The words of an aim; empty without one. A limit that only the result knows has its name."""
    if at_most is not None:
        return f"at most {at_most}" if isinstance(at_most, str) else f"at most {at_most:.4g}"
    return "" if at_least is None else f"at least {at_least:.4g}"
