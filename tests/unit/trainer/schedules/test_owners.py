"""Who owns which span, and what runs where a layout cannot run the schedule of the spec."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.errors import SpecError
from pipetransformer.schedules import Action, RoundShape, fit
from pipetransformer_contract.spec import ScheduleName

INTERLEAVED, ZERO_BUBBLE, ZERO_BUBBLE_V = (
    ScheduleName.INTERLEAVED,
    ScheduleName.ZERO_BUBBLE,
    ScheduleName.ZERO_BUBBLE_V,
)


@pytest.mark.parametrize("schedule", [ScheduleName.GPIPE, ScheduleName.ONE_FORWARD_ONE_BACKWARD, ScheduleName.SCRIPT])
@pytest.mark.parametrize("stages", [1, 4])
def test_a_schedule_of_one_span_a_worker_runs_in_every_layout(schedule: ScheduleName, stages: int) -> None:
    fitted = fit(schedule, stages, spans_per_worker=1, micro_batches=1, num_layers=4)

    assert (fitted.schedule, fitted.owners, fitted.reason) == (schedule, tuple(range(stages)), "")


@pytest.mark.parametrize(
    ("schedule", "spans", "owners"),
    [
        (INTERLEAVED, 2, (0, 1, 2, 0, 1, 2)),
        (ZERO_BUBBLE, 3, (0, 1, 2, 0, 1, 2, 0, 1, 2)),
        (ZERO_BUBBLE_V, 2, (0, 1, 2, 2, 1, 0)),
    ],
)
def test_spans_go_round_the_workers_or_there_and_back(
    schedule: ScheduleName, spans: int, owners: tuple[int, ...]
) -> None:
    fitted = fit(schedule, stages=3, spans_per_worker=spans, micro_batches=6, num_layers=12)

    assert (fitted.schedule, fitted.owners, fitted.reason) == (schedule, owners, "")


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "num_layers", "reason"),
    [
        (INTERLEAVED, 1, 4, 12, "Interleaved needs at least 2 stages"),
        (ZERO_BUBBLE_V, 4, 8, 7, "ZeroBubbleV needs a layer for each of 8 spans (4 stages of 2), not 7"),
        (INTERLEAVED, 2, 5, 12, "Interleaved needs micro-batches in 2 equal rounds over 2 stages, not 5"),
        (ZERO_BUBBLE, 3, 7, 12, "ZeroBubble needs micro-batches in 2 equal rounds over 3 stages, not 7"),
    ],
)
def test_a_layout_that_cannot_run_the_schedule_runs_1f1b_and_says_why(
    schedule: ScheduleName, stages: int, micro_batches: int, num_layers: int, reason: str
) -> None:
    fitted = fit(schedule, stages, 2, micro_batches, num_layers)

    assert fitted.schedule is ScheduleName.ONE_FORWARD_ONE_BACKWARD
    assert fitted.owners == tuple(range(stages))
    assert fitted.reason == reason


@pytest.mark.parametrize("spans", [1, 2])
@pytest.mark.parametrize(("micro_batches", "runs"), [(3, True), (8, True), (9, False), (10, True)])
def test_zero_bubble_runs_if_the_micro_batches_divide_into_equal_rounds(
    spans: int, micro_batches: int, runs: bool
) -> None:
    """On 4 stages 3 are one round, and 8 to 11 are two."""
    fitted = fit(ZERO_BUBBLE, 4, spans, micro_batches, num_layers=12)

    assert fitted.schedule is (ZERO_BUBBLE if runs else ScheduleName.ONE_FORWARD_ONE_BACKWARD)


@dataclass(frozen=True)
class Own:
    """A schedule of the user's program, which says who owns its spans."""

    says: Callable[[int], Any]
    spans: int = 2

    def owners(self, workers: int) -> Any:
        return self.says(workers)

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        return []


def test_the_users_schedule_says_who_owns_its_spans() -> None:
    fitted = fit(ScheduleName.SCRIPT, 2, 2, 4, 4, script_schedule=Own(lambda workers: [1, 0, 0, 1]))

    assert (fitted.owners, hash(fitted)) == ((1, 0, 0, 1), hash(replace(fitted)))


def test_more_spans_than_layers_run_1f1b_however_many_the_users_schedule_counts() -> None:
    fitted = fit(ScheduleName.SCRIPT, 2, 2, 4, 6, script_schedule=Own(lambda workers: (0, 1) * 4))

    assert (fitted.schedule, fitted.owners) == (ScheduleName.ONE_FORWARD_ONE_BACKWARD, (0, 1))
    assert fitted.reason.startswith("Script needs a layer for each of the 8 spans of Own(")
    assert fitted.reason.endswith(", not 6")


def test_spans_of_another_schedule_are_not_dealt_by_the_users() -> None:
    fitted = fit(INTERLEAVED, 2, 2, 4, 4, script_schedule=Own(lambda workers: [1, 0, 0, 1]))

    assert fitted.owners == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (lambda workers: (0,) * 4, r"gives its spans to the workers \(0, 0, 0, 0\), but there are 2 workers"),
        (lambda workers: (0, 1, 2, 2), "but there are 2 workers"),
        (lambda workers: {3: (0, 1)}[workers], "KeyError: 2"),
    ],
)
def test_owners_that_cannot_be_right_are_the_fault_of_the_users_schedule(says: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        fit(ScheduleName.SCRIPT, 2, 2, 4, 4, script_schedule=Own(says))


@given(
    st.sampled_from([INTERLEAVED, ZERO_BUBBLE, ZERO_BUBBLE_V]),
    st.integers(1, 8),
    st.integers(2, 4),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_each_worker_of_any_layout_owns_as_many_spans_as_the_others(
    schedule: ScheduleName, stages: int, spans: int, micro_batches: int, num_layers: int
) -> None:
    spans = 2 if schedule is ZERO_BUBBLE_V else spans
    fitted = fit(schedule, stages, spans, micro_batches, num_layers)

    counts = {fitted.owners.count(stage) for stage in range(stages)}
    assert counts == ({1} if fitted.reason else {spans})
    assert max(len(fitted.owners), stages) <= max(num_layers, stages)
    assert (fitted.schedule is schedule) == (not fitted.reason)
