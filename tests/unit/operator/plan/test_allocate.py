"""`allocate`: nobody waits for nothing, nobody starves, and who gains most by a worker gets it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer_operator.plan.sharing.allocate import HYSTERESIS, Demand, allocate

pytestmark = pytest.mark.timeout(180)
POOL = ("nvidia.com/gpu", "")


def auto(
    key: str,
    sizes: Iterable[int],
    held: int,
    *,
    speed: Callable[[int], float] = float,
    share: int | None = None,
    waiting: bool = False,
    asleep: bool = False,
    weight: float = 1.0,
) -> Demand:
    """A job that trains, with `onPack: Auto`."""
    speeds = {size: speed(size) for size in sizes}
    return Demand(key, POOL, speeds, held, share, min(speeds), False, waiting or asleep, asleep, 0, weight)


def starting(key: str, needs: int, held: int = 0, *, priority: int = 0, share: int | None = None) -> Demand:
    """A job that waits for the workers of its first layout."""
    return Demand(key, POOL, {}, held, share, needs, True, True, False, priority, 1.0)


def test_without_anyone_waiting_each_takes_what_it_gets() -> None:
    assert allocate([auto("a", (2, 4, 8), 8), auto("b", (2, 4), 2)]) == {"a": None, "b": None}


def test_a_job_makes_room_for_one_that_waits_to_start() -> None:
    assert allocate([auto("a", (2, 4, 8), 8), starting("b", 4)]) == {"a": 4, "b": 4}


def test_a_job_keeps_its_smallest_layout_and_makes_no_room_in_vain() -> None:
    assert allocate([auto("a", (2, 4, 8), 8), starting("b", 7)]) == {"a": None, "b": None}
    demands = [auto("a", (2, 4, 8), 8), starting("b", 7), starting("c", 2)]
    assert allocate(demands) == {"a": 4, "b": 0, "c": 2}


def test_a_job_is_held_to_its_share_until_every_job_has_its_own() -> None:
    demands = [auto("a", range(1, 7), 3), auto("b", range(1, 7), 2, waiting=True), auto("c", range(1, 7), 1)]
    assert allocate(demands) == {"a": 2, "b": 2, "c": 2}
    demands = [replace(demand, share=2) for demand in demands]
    demands[0] = replace(demands[0], held=2)
    assert allocate(demands) == {"a": 2, "b": 2, "c": 2}, "what is on its way is nobody else's"
    demands[2] = replace(demands[2], held=2)
    assert allocate(demands) == {"a": None, "b": None, "c": None}


def test_of_those_that_wait_the_higher_priority_starts_first() -> None:
    demands = [auto("a", (2, 4, 8), 8), starting("b", 4), starting("c", 4, priority=5)]
    assert allocate(demands) == {"a": 4, "b": 0, "c": 4}


def test_equal_jobs_get_equal_shares() -> None:
    demands = [auto("a", (2, 4, 6, 8, 10), 8), auto("b", (2, 4, 6, 8, 10), 2, waiting=True)]
    assert allocate(demands) == {"a": 6, "b": 4}
    demands = [auto("a", (1, 2, 3, 4, 5, 6), 5), auto("b", (1, 2, 3, 4, 5, 6), 1, waiting=True)]
    assert allocate(demands) == {"a": 3, "b": 3}


def test_weight_counts() -> None:
    sizes = range(1, 10)
    demands = [auto("a", sizes, 8, weight=3.0), auto("b", sizes, 1, waiting=True)]
    shares = allocate(demands)
    assert shares == {"a": 7, "b": 2}


def test_a_job_that_gains_nothing_by_more_pipelines_gives_them_up() -> None:
    demands = [auto("a", (2, 4, 8), 8, speed=lambda workers: 1.0), auto("b", (2, 4, 6, 8), 2, waiting=True)]
    assert allocate(demands) == {"a": 2, "b": 8}


def test_a_size_that_pays_only_together_with_the_next_is_stepped_over() -> None:
    speeds = {1: 1.0, 2: 1.0, 4: 16.0}
    demands = [auto("a", (1, 2, 4), 1, speed=lambda w: speeds[w]), auto("b", (1, 2, 3, 4), 4, waiting=True)]
    assert allocate(demands) == {"a": 4, "b": 1}


def test_shares_stay_while_workers_change_hands() -> None:
    """One gives up four workers, the other claims them pipeline by pipeline: nobody is asked for more meanwhile."""
    sizes = range(2, 13, 2)
    giver, taker = auto("a", sizes, 8), auto("b", sizes, 2, waiting=True)
    first = allocate([giver, taker])
    assert first == {"a": 6, "b": 4}
    for held, got in ((8, 2), (6, 2), (6, 4)):
        giver = replace(giver, held=held, share=6, waiting=held == 6)
        taker = replace(taker, held=got, share=4, waiting=got < 4 and held == 8)
        assert allocate([giver, taker]) == (first if got < 4 else {"a": None, "b": None})


def test_nobody_makes_room_for_a_job_whose_workers_run_on_something_else() -> None:
    other = replace(starting("b", 4), pool=("amd.com/gpu", ""))
    assert allocate([auto("a", (2, 4, 8), 8), other, starting("c", 2)]) == {"a": 4, "b": None, "c": 2}


def test_a_grant_that_somebody_else_took_is_forgotten() -> None:
    giver = auto("a", range(2, 13, 2), 4, share=4, asleep=True)
    taker = auto("b", range(2, 13, 2), 2, share=6, asleep=True)
    assert allocate([giver, taker]) == {"a": None, "b": None}, "six are all there are, and shared fairly"


def test_a_sleeper_above_its_share_does_not_count_anothers_grant_twice() -> None:
    asleep = [auto("a", range(1, 7), 1, share=1, asleep=True), auto("b", range(1, 7), 3, share=2, asleep=True)]
    assert allocate([*asleep, auto("c", range(1, 7), 1, share=3, waiting=True)]) == {"a": 2, "b": 2, "c": 2}


def test_no_job_gives_workers_to_one_of_lower_priority() -> None:
    high = replace(auto("a", range(1, 9), 8), priority=1000)
    assert allocate([high, starting("b", 7, priority=-1000)]) == {"a": None, "b": None}
    low = replace(auto("b", range(1, 9), 1, waiting=True), priority=-1000)
    assert allocate([high, low]) == {"a": None, "b": None}
    assert allocate([replace(high, priority=-1000), starting("b", 7, priority=1000)]) == {"a": 1, "b": 7}


def test_a_training_job_of_higher_priority_claims_first() -> None:
    high = replace(auto("high", range(1, 5), 1, waiting=True), priority=5)
    low = auto("low", range(1, 9), 7)
    assert allocate([high, low]) == {"high": 4, "low": 4}


def test_jobs_make_room_for_equals_that_no_higher_job_makes_room_for() -> None:
    """The first has all that it gains by, and keeps it; the second shares with the third, its equal."""
    demands = [
        replace(auto("high", range(1, 5), 4), priority=9),
        auto("equal", range(1, 9), 7),
        auto("new", range(1, 9), 1, waiting=True),
    ]
    assert allocate(demands) == {"high": 4, "equal": 4, "new": 4}


def test_no_starting_size_makes_room_for_a_claim() -> None:
    giver, taker = replace(auto("a", range(1, 9), 8), base=8), auto("b", range(1, 9), 1, waiting=True)
    assert allocate([giver, taker]) == {"a": None, "b": None}
    assert allocate([replace(giver, base=6), taker]) == {"a": 6, "b": 3}
    assert allocate([giver, starting("b", 4)]) == {"a": 4, "b": 4}, "among equals nobody preempts"


def test_who_has_less_than_its_starting_size_gets_it_from_claims_of_equals() -> None:
    shrunk, claims = replace(auto("a", range(1, 9), 2, waiting=True), base=6), auto("b", range(1, 9), 8)
    assert allocate([shrunk, claims]) == {"a": 6, "b": 4}


def test_no_starting_size_makes_room_for_that_of_an_equal() -> None:
    whole, lacks = replace(auto("a", (4, 8, 12), 12), base=12), replace(auto("b", (2, 4, 6), 4, waiting=True), base=6)
    claims = replace(auto("c", range(1, 9), 2, waiting=True), base=2)
    assert allocate([whole, lacks, claims]) == {"a": None, "b": None, "c": None}
    assert allocate([whole, claims, starting("d", 2)]) == {"a": 8, "c": 2, "d": 2}


def test_no_claims_are_granted_that_a_start_which_is_turned_away_would_preempt() -> None:
    jobs = [replace(auto("a", range(1, 9), 6), base=6), auto("b", range(1, 9), 1, waiting=True)]
    jobs = [replace(job, free=2, priority=7) for job in jobs]
    late = replace(starting("c", 4), free=2)
    assert allocate([*jobs, late]) == {"a": None, "b": None, "c": None}
    assert allocate([*jobs, replace(late, priority=-1000)]) == {"a": 6, "b": 3, "c": 0}, "its pods preempt none"


def test_figures_that_differ_by_little_pass_no_worker_to_and_fro() -> None:
    for noise in (0.97, 1.03):
        first = auto("a", range(1, 9), 4, speed=lambda workers: workers**0.8)
        second = auto("b", range(1, 9), 4, speed=lambda workers, noise=noise: workers ** (0.8 * noise), waiting=True)  # type: ignore[misc]
        assert allocate([first, second]) == {"a": None, "b": None}
        contested = [replace(first, held=3), replace(second, held=2)]
        assert allocate(contested) == {"a": None, "b": None}, "each could use the fifth worker"


def test_leaving_workers_and_free_nodes_are_shared_where_nodes_are_watched() -> None:
    sizes = range(1, 9)
    giver, taker = auto("a", sizes, 2), auto("b", sizes, 1, waiting=True)
    seen = [replace(giver, free=1, leaving=2), replace(taker, free=1)]
    assert allocate(seen) == {"a": 3, "b": 3}
    assert allocate([replace(giver, free=14), replace(taker, free=14)]) == {"a": None, "b": None}, (
        "each has all it wants"
    )


def test_a_weight_counts_within_its_namespace_unless_the_chart_differs() -> None:
    sizes = range(1, 10)
    loud, quiet = auto("loud/a", sizes, 4, weight=1000.0), auto("quiet/b", sizes, 4, waiting=True)
    assert allocate([loud, quiet]) == {"loud/a": None, "quiet/b": None}
    assert allocate([replace(loud, waiting=True), quiet], weigh_namespaces=True) == {"loud/a": 7, "quiet/b": 1}
    inside = [replace(quiet, key="loud/b", weight=500.0), replace(quiet, key="quiet/c", held=1)]
    shares = allocate([replace(loud, held=4), *inside])
    assert shares == {"loud/a": 4, "loud/b": 2, "quiet/c": 3}


def granted(demand: Demand) -> int:
    """What an earlier share is known to be worth."""
    if demand.share is None:
        return 0
    return min(demand.held, demand.share) if demand.asleep else demand.share


def held_by(made: list[Demand]) -> int:
    """Workers that all of them hold."""
    return sum(demand.held for demand in made)


def unused(demand: Demand) -> int:
    """Workers that the job holds, and that no layout of its own can use. It may give them to any job."""
    if not demand.trains:
        return demand.held
    return demand.held - max(size for size in demand.speeds if size <= demand.held)


def own(demand: Demand) -> int:
    """What a job that trains holds in the largest layout within its starting size."""
    return max((size for size in demand.speeds if size <= min(demand.held, demand.base)), default=demand.needs)


def demands() -> st.SearchStrategy[list[Demand]]:
    priority = st.sampled_from([-1000, 0, 0, 1000])

    def training(
        sizes: set[int],
        held: int,
        asleep: bool,
        weight: float,
        exponent: float,
        share: int | None,
        priority: int,
        base: int,
    ) -> Demand:
        speeds = {size: size**exponent for size in sizes}
        held = max(held, min(sizes))
        return Demand("", POOL, speeds, held, share, min(sizes), False, asleep, asleep, priority, weight, base)

    def new(needs: int, held: int, priority: int) -> Demand:
        return Demand("", POOL, {}, min(held, needs - 1), None, needs, True, True, False, priority, 1.0)

    sizes = st.sets(st.integers(1, 16), min_size=1, max_size=6)
    share = st.none() | st.integers(1, 16)
    workers, weights, exponents = st.integers(0, 16), st.floats(0.1, 10), st.floats(0, 1.2)
    trains = st.builds(training, sizes, workers, st.booleans(), weights, exponents, share, priority, workers)
    waits = st.builds(new, st.integers(1, 16), workers, priority)
    return st.lists(trains | waits, max_size=6).map(
        lambda made: [replace(demand, key=f"job-{number}") for number, demand in enumerate(made)]
    )


def taken_back(demand: Demand) -> int:
    """Workers that the job keeps, or takes back by pods that preempt claims."""
    return own(demand) if demand.priority > demand.claimed_priority else min(demand.needs, demand.held)


@settings(max_examples=300, deadline=None)
@given(demands())
def test_workers_go_to_equals_and_up_and_preemption_takes_none_back(made: list[Demand]) -> None:
    shares = allocate(made)
    gives = [
        demand
        for demand in made
        if not demand.starting
        and (share := shares[demand.key]) is not None
        and share < max((size for size in demand.speeds if size <= demand.held), default=0)
    ]
    gets = [demand for demand in made if (share := shares[demand.key]) is not None and share > demand.held]
    for taker in gets:
        share = shares[taker.key]
        assert share is not None
        claims = not taker.starting and share > taker.base
        if gives and all(giver.priority > taker.priority for giver in gives):
            below = [one for one in gets if one.priority <= taker.priority]
            idle = sum(map(unused, made)) + max(0, sum(map(granted, made)) - held_by(made))
            assert sum((shares[one.key] or 0) - one.held for one in below) <= idle
        if claims:
            spare = sum(giver.held - taken_back(giver) for giver in made if not giver.starting)
            taken = sum(max(0, (shares[one.key] or 0) - max(one.held, one.base)) for one in gets if not one.starting)
            unheld = max(0, sum(map(granted, made)) - sum(one.held for one in made))
            partial = sum(one.held for one in made if one.starting and not shares[one.key])
            assert taken <= spare + unheld + partial


@settings(max_examples=300, deadline=None)
@given(demands())
def test_shares_are_legal_sizes_and_never_more_than_there_is(made: list[Demand]) -> None:
    shares = allocate(made)
    assert shares.keys() == {demand.key for demand in made}
    if not any(demand.waiting for demand in made) or all(demand.starting for demand in made):
        assert set(shares.values()) <= {None}
    if set(shares.values()) <= {None}:
        return
    assert any((shares[demand.key] or 0) > demand.held for demand in made), "somebody gets more, or none is asked"
    for demand in made:
        share = shares[demand.key]
        assert share in ({0, demand.needs} if demand.starting else demand.speeds)
    total = sum(share or 0 for share in shares.values())
    held = sum(demand.held for demand in made)
    floors = sum(demand.needs for demand in made if not demand.starting)
    assert total <= max(held, sum(map(granted, made)), floors)


@settings(max_examples=200, deadline=None)
@given(demands())
def test_shares_that_everybody_has_are_not_changed(made: list[Demand]) -> None:
    """Whether what was granted is still remembered or not."""
    shares = allocate(made)
    obeyed = [
        replace(demand, held=share, share=share) if (share := shares[demand.key]) is not None else demand
        for demand in made
    ]
    assert set(allocate(obeyed).values()) <= {None}
    assert set(allocate([replace(demand, share=None) for demand in obeyed]).values()) <= {None}


@settings(max_examples=200, deadline=None)
@given(demands(), st.randoms())
def test_the_order_of_jobs_changes_nothing(made: list[Demand], random: "st.DrawFn") -> None:
    shuffled = list(made)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert allocate(shuffled) == allocate(made)


@settings(max_examples=200, deadline=None)
@given(demands())
def test_no_worker_would_do_more_elsewhere(made: list[Demand]) -> None:
    """On concave curves with every size legal, moving one worker from any job to any other gains next to nothing."""
    made = [
        replace(demand, speeds={size: float(size) for size in range(1, 33)}, needs=1, base=0, priority=0)
        for demand in made
        if not demand.starting
    ]
    shares = allocate(made)
    if any(share is None for share in shares.values()):
        return
    by_key = {demand.key: demand for demand in made}
    for giver, share in shares.items():
        for taker, other in shares.items():
            if giver == taker or share == by_key[giver].needs or other == 32:
                continue
            assert share is not None and other is not None
            lost = by_key[giver].weight * math.log(share / (share - 1))
            gained = by_key[taker].weight * math.log((other + 1) / other)
            assert gained <= lost * HYSTERESIS * (1 + 1e-9)
