"""The simulated cluster: its jobs, its time, and that the operator's own plan decides alike."""

import itertools
import math
from collections.abc import Sequence

import pytest

from benchmarks.cluster.delays import Delays
from benchmarks.cluster.engine import Run
from benchmarks.cluster.metrics import figures, quantile
from benchmarks.cluster.policies import (
    AUTO,
    FREEZE,
    POLICIES,
    POLLUX,
    RELEASE,
    RELEASE_STARTING,
    SHORTEST,
    STATIC,
    WIDEN,
    Policy,
)
from benchmarks.cluster.rivals import Goodput, Malleable
from benchmarks.cluster.scaling import Frozen, scaling
from benchmarks.cluster.simulation import simulate
from benchmarks.cluster.trace import LONGEST_SECONDS, Job, draw
from pipetransformer_contract.layout import Layout

DELAYS = Delays(start=10.0, pause=1.0, checkpoint=0.5, delete=1.0)


def drawn(count: int, *, elastic: float, seed: int = 0, load: float = 1.2, gpus: int = 64) -> Sequence[Job]:
    return draw(count, gpus, load=load, share_freezing=0.5, seed=seed, share_elastic=elastic)


@pytest.mark.parametrize("policy", [FREEZE, WIDEN, RELEASE, RELEASE_STARTING, AUTO], ids=lambda policy: policy.name)
def test_the_operators_plan_and_its_parts_give_the_same_layouts_at_the_same_times(policy: Policy) -> None:
    jobs = drawn(200, elastic=0.1 if policy.grows else 0.3)
    parts, planned = (simulate(policy, jobs, 64, DELAYS, by_plan=by_plan) for by_plan in (False, True))
    assert [run.layouts for run in parts] == [run.layouts for run in planned]
    assert [run.ended for run in parts] == [run.ended for run in planned]
    changes = sum(max(0, len(run.layouts) - 1) for run in parts)
    assert changes > (60 if policy.grows else 20)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_jobs_hold_no_more_gpus_than_there_are_and_train_all_their_steps(policy: Policy) -> None:
    runs = simulate(policy, drawn(100, elastic=0.4), 64, DELAYS)
    changes = sorted(change for run in runs for change in run.changes)
    held = list(itertools.accumulate(workers for _, workers in changes))
    assert 0 < max(held) <= 64 and held[-1] == 0
    for run in runs:
        assert run.ended is not None and run.held == 0
        assert run.steps == (run.total if run.parts else 0)


def test_a_job_alone_takes_what_its_trace_says_and_the_delays() -> None:
    for gpus in (1, 8):
        (run,) = simulate(STATIC, [Job(0, 5.0, gpus, 1000.0, freezes=True)], 8, DELAYS)
        assert run.ended is not None
        assert run.ended == pytest.approx(5.0 + DELAYS.start + DELAYS.pause + 1000.0, abs=1.0)
        assert run.gpu_seconds() == pytest.approx(gpus * (run.ended - 5.0 + DELAYS.delete))
        assert run.gpu_seconds(until=5.0 + DELAYS.start) == gpus * DELAYS.start


def test_freezing_saves_time_and_shorter_pipelines_save_more() -> None:
    job = Job(0, 0.0, 8, 10_000.0, freezes=True)
    hours = {
        one.name: simulate(one, [job], 8, DELAYS)[0].gpu_seconds() for one in (STATIC, FREEZE, WIDEN, RELEASE_STARTING)
    }
    assert hours["static"] > 1.5 * hours["freeze"] and hours["freeze"] > 1.2 * hours["widen"]
    slow = simulate(RELEASE_STARTING, [job], 8, DELAYS)[0]
    assert slow.layouts[-1][1].workers < 8 and (slow.ended or 0) < 1.05 * 10_000


def test_a_smaller_job_goes_ahead_only_of_one_that_does_not_fit() -> None:
    jobs = [
        Job(0, 0.0, 4, 100.0, False),
        Job(1, 1.0, 8, 100.0, False),
        Job(2, 2.0, 2, 50.0, False),
        Job(3, 3.0, 4, 9.0, False),
    ]
    runs = simulate(STATIC, jobs, 8, DELAYS)
    assert (runs[0].admitted, runs[2].admitted) == (0.0, 2.0)
    assert runs[1].admitted is not None and runs[3].admitted is not None
    assert runs[3].admitted < runs[1].admitted, "it fits beside the first job once the third has ended"


def test_the_shortest_remaining_job_takes_the_place_of_a_longer_one() -> None:
    jobs = [Job(0, 0.0, 4, 100.0, False), Job(1, 10.0, 4, 20.0, False)]
    long, short = simulate(SHORTEST, jobs, 4, DELAYS)
    assert (short.admitted, short.ended, long.ended) == (10.0, 30.0, 120.0)
    assert long.gpu_seconds() == pytest.approx(400.0) and long.changes == [(0.0, 4), (10.0, -4), (30.0, 4), (120.0, -4)]


def test_pollux_like_jobs_start_small_give_way_to_each_other_and_grow_when_alone() -> None:
    jobs = [Job(0, 0.0, 8, 1000.0, False), Job(1, 100.0, 8, 5000.0, False)]
    first, second = simulate(POLLUX, jobs, 16, DELAYS)
    of_first, of_second = ([layout.workers for _, layout, _ in run.layouts] for run in (first, second))
    assert of_first[:2] == [4, 16] and of_first[-1] < 16, "it gives way to the second job"
    assert of_second[0] == 4 and of_second[-1] == 16
    assert second.admitted is not None and second.admitted < 100.0 + 30.0


@pytest.mark.parametrize("power", [-1.0, 0.0, 1.0])
def test_goodput_spreads_gpus_as_the_best_of_all_spreads(power: float) -> None:
    """Up to the last step of a job, which may not fit."""
    policy = POLLUX
    runs = [policy.run_of(Job(number, 0.0, gpus, 1000.0, False), DELAYS) for number, gpus in enumerate((4, 8, 8))]
    jobs = [Malleable(None, run, policy) for run in runs]  # type: ignore[arg-type]

    def worth(sizes: Sequence[int]) -> float:
        speeds = [job.speeds()[size] for job, size in zip(jobs, sizes, strict=True)]
        return sum(math.log(speed) if power == 0 else speed**power / power for speed in speeds)

    for gpus in range(12, 44, 4):
        sizes = Goodput(power)._spread(dict.fromkeys(jobs, 4), gpus - 12)
        all_sizes = itertools.product(*(job.speeds() for job in jobs))
        best = max(worth(one) for one in all_sizes if sum(one) <= gpus)
        assert sum(sizes.values()) <= gpus
        assert worth([sizes[job] for job in jobs]) == pytest.approx(best)


def test_stages_that_are_cut_anew_are_no_slower_and_a_cache_helps_from_the_next_epoch() -> None:
    times, layout = scaling(8, 1.0), Layout(4, 2)
    frozen, cached = Frozen(7, 0), Frozen(7, 7)
    assert times.seconds(frozen, layout) < times.seconds(frozen, layout, cut_when=Frozen(0, 0))
    assert times.seconds(cached, layout) < times.seconds(frozen, layout)
    assert {offer.stages for offer in scaling(8, 1.0, offload=True).offers(Frozen(11, 11))} > {
        offer.stages for offer in times.offers(Frozen(11, 11))
    }


def test_jobs_are_as_many_and_as_large_as_phillys() -> None:
    jobs = draw(10_000, 1_000, load=0.9, share_freezing=0.25, seed=1)
    assert sum(job.gpus == 1 for job in jobs) / len(jobs) == pytest.approx(0.932, abs=0.01)
    assert all(60 <= job.seconds <= LONGEST_SECONDS for job in jobs)
    gpu_seconds = sum(job.gpus * job.seconds for job in jobs)
    assert gpu_seconds / (1_000 * jobs[-1].arrival) == pytest.approx(0.9)
    of_elastic = sum(job.gpus * job.seconds for job in jobs if job.elastic) / gpu_seconds
    assert 0.6 < of_elastic < 0.8, "77 % in the trace, whose longest jobs are longer"
    assert sum(job.freezes for job in jobs) / sum(job.elastic for job in jobs) == pytest.approx(0.25, abs=0.06)


def test_loads_and_shares_differ_only_in_arrivals_and_fates() -> None:
    few, many, late = (
        draw(500, 100, load=load, share_freezing=share, seed=3)
        for load, share in ((0.9, 0.25), (0.9, 0.5), (0.45, 0.25))
    )
    assert {job.number for job in few if job.freezes} < {job.number for job in many if job.freezes}
    assert [(job.gpus, job.seconds) for job in few] == [(job.gpus, job.seconds) for job in late]
    assert [job.arrival * 2 for job in few] == pytest.approx([job.arrival for job in late])


def test_arrivals_of_a_day_are_as_many_as_even_ones_and_follow_its_hours() -> None:
    even, daily = (draw(4000, 10, load=0.9, share_freezing=0.0, seed=2, daily=daily) for daily in (False, True))
    days = math.floor(even[-1].arrival / 86_400)
    times = [job.arrival for job in daily]
    assert times == sorted(times)
    before = [sum(job.arrival < days * 86_400 for job in jobs) for jobs in (even, daily)]
    assert before[0] == pytest.approx(before[1], rel=0.01)
    halves = [sum(time % 86_400 < 43_200 for time in times), sum(time % 86_400 >= 43_200 for time in times)]
    assert max(halves) > 1.5 * min(halves)


def test_figures_count_waits_slowdowns_and_fairness() -> None:
    jobs = [Job(0, 0.0, 4, 1000.0, False), Job(1, 0.0, 4, 1000.0, False)]
    nothing = Delays(0.0, 0.0, 0.0, 0.0)
    found = figures(simulate(STATIC, jobs, 4, nothing), 4)
    assert found["queue_hours_all"] == pytest.approx(500 / 3600, rel=1e-3)
    assert found["slowdown_max"] == pytest.approx(2.0, rel=1e-3)
    assert found["jain"] == pytest.approx(9 / 10, rel=1e-3)
    assert found["gpu_hours"] == pytest.approx(8000 / 3600, rel=1e-3)
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 1.0)] == [1.0, 2.0, 3.0]


def test_a_run_remembers_what_it_held() -> None:
    run = Run(Job(0, 0.0, 1, 10.0, False), 1, None, [])
    for time, workers in ((2.0, 3), (4.0, -1), (9.0, -2)):
        run.hold(time, workers)
    assert run.gpu_seconds() == 3 * 2 + 2 * 5
    assert run.gpu_seconds(until=5.0) == 3 * 2 + 2 * 1
