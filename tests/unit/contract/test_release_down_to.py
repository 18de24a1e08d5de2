"""`releaseDownTo` over whole runs that freeze: what `choose()` takes of offers by `StepModel`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer_contract.choose import Bounds, OnPack, Packing, Present, choose
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer, StepTime

LAYERS = 12
#: A layer's forward, and both halves of its backward.
WORK = 3.0


def step_seconds(boundary: int, stages: int, pipelines: int, fixed: float) -> float:
    """A step of 48 samples: balanced stages, four micro-batches a stage, and a part that no worker shares."""
    work = (boundary + (LAYERS - boundary) * WORK) * 48 / (stages * pipelines)
    return fixed + work * (1 + (stages - 1) / (4 * stages))


def offers(boundary: int, fixed: float, shortest: int) -> list[Offer]:
    return [
        Offer(
            stages=stages,
            bytes_per_worker=1,
            step_seconds=[StepTime(pipelines=r, seconds=step_seconds(boundary, stages, r, fixed)) for r in (1, 2, 3)],
            pause_seconds=1.0,
        )
        for stages in (4, 3, 2, 1)
        if stages >= shortest
    ]


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, LAYERS), min_size=1, max_size=6).map(sorted),
    st.integers(1, 3),
    st.floats(0, 400),
    st.integers(10, 2000),
)
def test_a_run_that_only_freezes_ends_no_later_than_unfrozen_and_holds_less(
    boundaries: list[int], pipelines: int, fixed: float, steps_each: int
) -> None:
    first = Layout(4, pipelines)
    starting = step_seconds(0, 4, pipelines, fixed)
    took = {}
    for bar in (None, starting):
        bounds = Bounds(first, 1, first.workers, 1, 3, 0, bar)
        layout, seconds, held = first, 0.0, 0.0
        for number, boundary in enumerate(boundaries):
            left = (len(boundaries) - number) * steps_each
            shortest = 4 - 3 * boundary // LAYERS  # frozen layers take less memory
            present = Present(layout, step_seconds(boundary, layout.stages, layout.pipelines, fixed), left)
            found = choose(
                offers(boundary, fixed, shortest),
                first.workers,
                bounds,
                on_pack=OnPack.RELEASE,
                packing=Packing.MEASURED,
                present=present,
            )
            assert found is not None
            layout = found
            taken = step_seconds(boundary, layout.stages, layout.pipelines, fixed)
            seconds += steps_each * taken
            held += steps_each * taken * layout.workers
        took[bar] = seconds, held
    unfrozen = len(boundaries) * steps_each * starting
    assert took[starting][0] <= 1.05 * unfrozen * (1 + 1e-9)
    assert took[starting][1] <= unfrozen * first.workers * (1 + 1e-9)


@pytest.mark.parametrize(("bar", "workers"), [(None, 4), (step_seconds(0, 4, 1, 0.0), 2)])
def test_nine_of_twelve_frozen_layers_give_two_of_four_workers_back_only_down_to_the_start(
    bar: float | None, workers: int
) -> None:
    present = Present(Layout(4, 1), step_seconds(9, 4, 1, 0.0), 1000)
    found = choose(
        offers(9, 0.0, 1),
        4,
        Bounds(Layout(4, 1), 1, 4, 1, 3, 0, bar),
        on_pack=OnPack.RELEASE,
        packing=Packing.MEASURED,
        present=present,
    )
    assert found is not None and found.workers == workers
