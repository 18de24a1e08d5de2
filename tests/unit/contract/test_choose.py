"""The pure choice of a layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer_contract.choose import (
    Bounds,
    OnPack,
    Packing,
    Present,
    choices,
    choose,
    next_layout,
    pays_to_recut,
)
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer, StepTime

PAPER_START = Layout(4, 1)


def offers(
    bytes_by_stages: dict[int, int], seconds: dict[tuple[int, int], float] | None = None, pause: float = 0.0
) -> list[Offer]:
    seconds = seconds or {}
    return [
        Offer(
            stages=stages,
            bytes_per_worker=size,
            pause_seconds=pause,
            step_seconds=[StepTime(pipelines=r, seconds=s) for (k, r), s in seconds.items() if k == stages],
        )
        for stages, size in bytes_by_stages.items()
    ]


def bounds(
    *,
    initial: Layout = PAPER_START,
    workers: tuple[int, int] = (1, 4),
    pipelines: tuple[int, int] = (1, 8),
    budget: int = 30,
    starting_step: float | None = None,
) -> Bounds:
    return Bounds(initial, workers[0], workers[1], pipelines[0], pipelines[1], budget, starting_step)


@pytest.mark.parametrize(
    ("sizes", "on_pack", "expected"),
    [
        ({1: 120, 2: 60, 4: 30}, OnPack.WIDEN, Layout(4, 1)),
        ({1: 60, 2: 30, 4: 20}, OnPack.WIDEN, Layout(2, 2)),
        ({1: 30, 2: 20, 4: 10}, OnPack.WIDEN, Layout(1, 4)),
        ({1: 60, 2: 30, 4: 20}, OnPack.RELEASE, Layout(2, 1)),
        ({1: 30, 2: 20, 4: 10}, OnPack.HOLD, Layout(1, 1)),
    ],
)
def test_paper_packing_halves_the_pipeline_while_the_largest_stage_fits(
    sizes: dict[int, int], on_pack: OnPack, expected: Layout
) -> None:
    assert choose(offers(sizes), 4, bounds(), on_pack=on_pack, packing=Packing.PAPER) == expected


@pytest.mark.parametrize(
    ("sizes", "present", "expected"),
    [
        ({1: 120, 2: 40, 4: 40}, Layout(2, 2), Layout(2, 2)),
        ({1: 40, 2: 40, 4: 40}, Layout(1, 4), Layout(1, 4)),
        ({1: 120, 2: 60, 4: 40}, Layout(2, 2), Layout(4, 1)),
        ({1: 120, 2: 40, 3: 40, 4: 40}, Layout(3, 1), Layout(4, 1)),
        ({1: 120, 2: 40, 4: 40}, None, Layout(4, 1)),
    ],
)
def test_paper_packing_returns_to_a_longer_pipeline_only_if_that_needs_less_memory(
    sizes: dict[int, int], present: Layout | None, expected: Layout
) -> None:
    now = None if present is None else Present(present)
    assert choose(offers(sizes), 4, bounds(), on_pack=OnPack.WIDEN, packing=Packing.PAPER, present=now) == expected


def test_an_odd_pipeline_is_not_halved() -> None:
    b = bounds(initial=Layout(3, 1))
    assert choose(offers({1: 1, 3: 1}), 3, b, on_pack=OnPack.WIDEN, packing=Packing.PAPER) == Layout(3, 1)


def test_fewer_workers_than_stages_carry_the_longest_pipeline_that_they_can() -> None:
    sizes = {1: 120, 2: 60, 3: 40, 4: 30}
    assert choose(offers(sizes), 3, bounds(), on_pack=OnPack.WIDEN, packing=Packing.PAPER) == Layout(3, 1)


def test_fewer_workers_than_the_floor_carry_nothing() -> None:
    assert choose(offers({1: 1}), 1, bounds(workers=(2, 4)), on_pack=OnPack.WIDEN, packing=Packing.PAPER) is None


def test_a_release_keeps_the_floor() -> None:
    assert choose(
        offers({1: 1, 2: 1, 4: 1}), 4, bounds(workers=(2, 4)), on_pack=OnPack.RELEASE, packing=Packing.PAPER
    ) == Layout(1, 2)


def test_measured_packing_takes_the_shortest_step() -> None:
    seconds = {(4, 1): 1.0, (2, 2): 0.7, (1, 4): 0.8}
    assert choose(
        offers({1: 1, 2: 1, 4: 1}, seconds), 4, bounds(), on_pack=OnPack.WIDEN, packing=Packing.MEASURED
    ) == Layout(2, 2)


def test_measured_release_gives_back_what_hardly_costs_time() -> None:
    seconds = {(4, 1): 1.0, (2, 1): 1.04, (1, 1): 1.6}
    assert choose(
        offers({1: 1, 2: 1, 4: 1}, seconds),
        4,
        bounds(),
        on_pack=OnPack.RELEASE,
        packing=Packing.MEASURED,
        present=Present(Layout(4, 1)),
    ) == Layout(2, 1)


def measured(
    seconds: dict[tuple[int, int], float],
    present: Present | None,
    *,
    on_pack: OnPack = OnPack.WIDEN,
    pause: float = 0.0,
    starting_step: float | None = None,
    workers: int = 4,
) -> Layout | None:
    found = offers(dict.fromkeys(sorted({k for k, _ in seconds}), 1), seconds, pause)
    limits = bounds(starting_step=starting_step)
    return choose(found, workers, limits, on_pack=on_pack, packing=Packing.MEASURED, present=present)


@pytest.mark.parametrize(
    ("starting_step", "expected"), [(None, Layout(4, 1)), (1.0, Layout(2, 1)), (1.6, Layout(1, 1))]
)
def test_a_release_may_take_layouts_as_slow_as_the_job_began(starting_step: float | None, expected: Layout) -> None:
    seconds = {(4, 1): 0.6, (2, 1): 1.04, (1, 1): 1.6}
    present = Present(Layout(4, 1), 0.6)
    assert measured(seconds, present, on_pack=OnPack.RELEASE, starting_step=starting_step) == expected


def test_thawed_layers_bring_workers_back_until_a_step_is_as_fast_as_at_the_start() -> None:
    seconds = {(4, 1): 1.0, (2, 1): 1.8, (1, 1): 3.5}
    present = Present(Layout(1, 1), 3.5)
    assert measured(seconds, present, on_pack=OnPack.RELEASE, starting_step=1.0) == Layout(4, 1)
    assert measured(seconds, present, on_pack=OnPack.RELEASE) == Layout(1, 1)


@pytest.mark.parametrize(("present_step", "expected"), [(1.10, Layout(2, 1)), (1.11, Layout(4, 1))])
def test_a_layout_that_is_hardly_slower_than_it_may_be_is_not_left(present_step: float, expected: Layout) -> None:
    """A new layout may take 5 % more than the starting step. The present one may be as much slower again."""
    seconds = {(4, 1): 0.9, (2, 1): present_step}
    present = Present(Layout(2, 1), present_step)
    assert measured(seconds, present, on_pack=OnPack.RELEASE, starting_step=1.0) == expected


def test_before_the_first_report_a_job_has_the_pipelines_of_its_spec() -> None:
    assert choose([], 9, bounds(workers=(1, 9)), on_pack=OnPack.WIDEN, packing=Packing.PAPER) == Layout(4, 2)
    assert choose([], 3, bounds(), on_pack=OnPack.WIDEN, packing=Packing.PAPER) is None


def test_fewer_workers_than_the_starting_step_needs_train_all_the_same() -> None:
    seconds = {(4, 1): 1.0, (2, 1): 1.8, (1, 1): 3.5}
    for present in (None, Present(Layout(4, 1), 1.0), Present(Layout(2, 1), 1.8)):
        found = measured(seconds, present, on_pack=OnPack.RELEASE, starting_step=1.0, workers=3)
        assert found == Layout(2, 1)


@pytest.mark.parametrize(
    ("remaining", "pause", "expected"),
    [
        (100, 20.0, Layout(2, 2)),
        (100, 31.0, Layout(4, 1)),
        (60, 20.0, Layout(4, 1)),
        (0, 0.0, Layout(4, 1)),
        (None, 1e9, Layout(2, 2)),
    ],
)
def test_a_change_has_to_gain_more_in_the_remaining_steps_than_its_pause_costs(
    remaining: int | None, pause: float, expected: Layout
) -> None:
    present = Present(Layout(4, 1), 1.0, remaining)
    assert measured({(4, 1): 1.0, (2, 2): 0.7}, present, pause=pause) == expected


@pytest.mark.parametrize(("pause", "expected"), [(20.0, Layout(2, 1)), (70.0, Layout(4, 1))])
def test_a_release_weighs_worker_seconds_against_a_pause_of_all_workers(pause: float, expected: Layout) -> None:
    present = Present(Layout(4, 1), 1.0, 100)
    seconds = {(4, 1): 1.0, (2, 1): 1.04, (1, 1): 1.06}
    assert measured(seconds, present, on_pack=OnPack.RELEASE, pause=pause) == expected


def test_a_layout_that_is_no_longer_legal_is_left_at_any_price() -> None:
    present = Present(Layout(4, 2), 0.1, 1)
    assert measured({(4, 1): 1.0, (2, 2): 2.0}, present, pause=100.0) == Layout(4, 1)


def test_a_layout_that_no_longer_fits_the_memory_is_left_at_any_price() -> None:
    present = Present(Layout(1, 1), 0.1, 1)
    assert measured({(4, 1): 1.0}, present, pause=100.0) == Layout(4, 1)


def test_a_layout_that_is_no_quicker_is_not_worth_a_regroup() -> None:
    offered = offers({2: 20, 4: 10}, {(4, 1): 1.0, (2, 2): 1.0})
    for layout in (Layout(4, 1), Layout(2, 2)):
        present = Present(layout, step_seconds=1.0)
        assert choose(offered, 4, bounds(), on_pack=OnPack.WIDEN, packing=Packing.MEASURED, present=present) == layout


def test_a_layout_without_a_step_time_is_left_for_the_quickest_one() -> None:
    offered = offers({2: 20, 4: 10}, {(2, 1): 2.0, (2, 2): 1.0})
    present = Present(Layout(4, 1))
    assert choose(offered, 4, bounds(), on_pack=OnPack.WIDEN, packing=Packing.MEASURED, present=present) == Layout(2, 2)


def test_as_long_as_nothing_is_measured_the_layout_stays() -> None:
    nothing = offers({1: 1, 2: 1, 4: 1})
    for present, workers, expected in [
        (Present(Layout(2, 1)), 4, Layout(2, 1)),
        (Present(Layout(4, 1)), 3, Layout(2, 1)),  # the longest that 3 workers carry
        (None, 4, Layout(4, 1)),
    ]:
        assert (
            choose(nothing, workers, bounds(), on_pack=OnPack.WIDEN, packing=Packing.MEASURED, present=present)
            == expected
        )


def test_the_same_layout_is_cut_anew_where_that_pays() -> None:
    offered = offers({2: 1, 4: 1}, {(4, 1): 0.8, (2, 2): 0.9}, pause=10.0)
    assert pays_to_recut(offered, Present(Layout(4, 1), 1.0, 60), Packing.MEASURED)
    assert not pays_to_recut(offered, Present(Layout(4, 1), 1.0, 50), Packing.MEASURED)
    assert not pays_to_recut(offered, Present(Layout(4, 1)), Packing.MEASURED)
    assert measured({(4, 1): 0.8, (2, 2): 0.9}, Present(Layout(4, 1), 1.0, 60), pause=10.0) == Layout(4, 1)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 60.0])
@pytest.mark.parametrize(("remaining", "pays"), [(60, True), (45, False), (None, True), (1, False)])
def test_by_the_papers_packing_a_pause_counts_as_so_many_steps_on_every_machine(
    remaining: int | None, pays: bool, scale: float
) -> None:
    """A fifth of a step is gained in each, and ten are paid."""
    offered = offers({4: 30}, {(4, 1): 0.8 * scale}, pause=1e6)
    present = Present(Layout(4, 1), scale, remaining)
    assert pays_to_recut(offered, present, Packing.PAPER) is pays
    to = next_layout(offered, 4, bounds(), on_pack=OnPack.WIDEN, packing=Packing.PAPER, present=present)
    assert to == (Layout(4, 1) if pays else None)


def test_a_layout_that_was_just_cut_is_not_cut_anew_and_another_layout_needs_no_new_cut() -> None:
    offered = offers({2: 30, 4: 20}, {(4, 1): 1.0, (2, 2): 0.5})
    for present, to in ((Layout(4, 1), Layout(2, 2)), (Layout(2, 2), None)):
        seconds = 0.5 if to is None else 1.0
        assert to == next_layout(
            offered,
            4,
            bounds(),
            on_pack=OnPack.WIDEN,
            packing=Packing.PAPER,
            present=Present(present, seconds, 100),
        )


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize(("remaining", "changes"), [(2, True), (1, False), (0, False)])
def test_no_layout_is_chosen_that_would_train_no_step(packing: Packing, remaining: int, changes: bool) -> None:
    """Members hear of it with the vote of the next step."""
    offered = offers({2: 30, 4: 20}, {(4, 1): 1.0, (2, 2): 0.5})
    present = Present(Layout(4, 1), 1.0, remaining)
    to = next_layout(offered, 4, bounds(), on_pack=OnPack.WIDEN, packing=packing, present=present)
    assert to == (Layout(2, 2) if changes else None)
    assert choose(offered, 2, bounds(), on_pack=OnPack.WIDEN, packing=packing, present=present) == Layout(2, 1)


LAYOUTS = [(4, 1), (3, 1), (2, 1), (2, 2), (1, 1), (1, 2), (1, 3), (1, 4)]


@given(
    st.dictionaries(st.sampled_from(LAYOUTS), st.floats(0.01, 10), min_size=1),
    st.sampled_from(LAYOUTS),
    st.floats(0.01, 10),
    st.integers(0, 1000),
    st.floats(0, 100),
    st.sampled_from(OnPack),
    st.none() | st.floats(0.01, 10),
)
def test_measured_packing_never_goes_back_to_what_it_left(
    seconds: dict[tuple[int, int], float],
    start: tuple[int, int],
    step_seconds: float,
    remaining: int,
    pause: float,
    on_pack: OnPack,
    starting_step: float | None,
) -> None:
    present = Present(Layout(*start), step_seconds, remaining)
    seen = [present.layout]
    while (
        layout := measured(seconds, present, on_pack=on_pack, pause=pause, starting_step=starting_step)
    ) != present.layout:
        assert layout is not None and layout not in seen
        seen.append(layout)
        present = Present(layout, seconds.get((layout.stages, layout.pipelines)), present.remaining_steps)
    if on_pack is OnPack.WIDEN:
        assert len(seen) <= 2


@pytest.mark.parametrize("on_pack", OnPack)
def test_pipelines_of_two_never_have_fewer_workers_than_a_minimum_of_three(on_pack: OnPack) -> None:
    b = bounds(initial=Layout(2, 2), workers=(3, 4), pipelines=(1, 2), budget=50)
    assert choose(offers({2: 1}), 3, b, on_pack=on_pack, packing=Packing.PAPER) is None
    assert choose(offers({2: 1}), 4, b, on_pack=on_pack, packing=Packing.PAPER) == Layout(2, 2)


@pytest.mark.parametrize("on_pack", OnPack)
def test_bounds_that_allow_no_shorter_pipeline_keep_the_long_one(on_pack: OnPack) -> None:
    b = bounds(workers=(4, 4), pipelines=(1, 1))
    assert choose(offers({1: 60, 2: 30, 4: 20}), 4, b, on_pack=on_pack, packing=Packing.PAPER) == Layout(4, 1)


@given(
    sizes=st.dictionaries(st.integers(1, 16), st.integers(0, 100), min_size=1),
    workers=st.integers(0, 64),
    floor=st.integers(1, 16),
    ceiling=st.integers(1, 64),
    pipelines=st.tuples(st.integers(1, 4), st.integers(1, 64)),
    on_pack=st.sampled_from(OnPack),
)
def test_every_choice_is_legal(
    sizes: dict[int, int],
    workers: int,
    floor: int,
    ceiling: int,
    pipelines: tuple[int, int],
    on_pack: OnPack,
) -> None:
    b = bounds(initial=Layout(max(sizes), 1), workers=(floor, ceiling), pipelines=pipelines, budget=50)
    layout = choose(offers(sizes), workers, b, on_pack=on_pack, packing=Packing.PAPER)
    if layout is not None:
        assert layout.stages in sizes
        assert floor <= layout.workers <= min(workers, ceiling)
        assert pipelines[0] <= layout.pipelines <= pipelines[1]


@given(
    frozen=st.dictionaries(st.integers(1, 16), st.integers(0, 100), min_size=1),
    growth=st.integers(0, 100),
    budget=st.integers(0, 100),
    on_pack=st.sampled_from(OnPack),
)
def test_more_active_blocks_never_shorten_the_pipeline(
    frozen: dict[int, int], growth: int, budget: int, on_pack: OnPack
) -> None:
    b = bounds(initial=Layout(max(frozen), 1), workers=(1, 64), pipelines=(1, 64), budget=budget)
    before = choose(offers(frozen), 64, b, on_pack=on_pack, packing=Packing.PAPER)
    grown = {stages: size + growth for stages, size in frozen.items()}
    after = choose(offers(grown), 64, b, on_pack=on_pack, packing=Packing.PAPER)
    assert before is not None and after is not None
    assert after.stages >= before.stages


@given(
    sizes=st.dictionaries(st.integers(1, 8), st.integers(0, 100), min_size=1, max_size=4),
    seconds=st.dictionaries(st.tuples(st.integers(1, 8), st.integers(1, 8)), st.integers(1, 9).map(float)),
    floor=st.integers(1, 8),
    pipelines=st.tuples(st.integers(1, 3), st.integers(1, 12)),
    on_pack=st.sampled_from([OnPack.WIDEN, OnPack.AUTO]),
    packing=st.sampled_from(Packing),
)
def test_all_choices_are_what_is_chosen_for_each_number_of_workers(
    sizes: dict[int, int],
    seconds: dict[tuple[int, int], float],
    floor: int,
    pipelines: tuple[int, int],
    on_pack: OnPack,
    packing: Packing,
) -> None:
    b = bounds(initial=Layout(max(sizes), 1), workers=(floor, 24), pipelines=pipelines, budget=50)
    offered = offers(sizes, seconds)
    each = {choose(offered, workers, b, on_pack=on_pack, packing=packing) for workers in range(25)}
    assert choices(offered, b, on_pack=on_pack, packing=packing) == each - {None}
