"""Freeze policies against the paper's tables and formula."""

import pytest

from pipetransformer.freeze import (
    Explicit,
    FreezeObservation,
    FreezePolicy,
    GradientNorm,
    Instants,
    NoFreeze,
    PaperSchedule,
    make_policy,
)
from pipetransformer_contract.spec import Freeze, FreezePoint

EVERY_STEP = Instants(steps_per_epoch=1)


def observe(step: int, boundary: int = 0, norms: list[float] | None = None, num_layers: int = 12) -> FreezeObservation:
    return FreezeObservation(
        step=step,
        epoch=step,
        boundary=boundary,
        num_layers=num_layers,
        unit_gradient_norms=norms or [1.0] * (num_layers + 2),
    )


def run(policy: FreezePolicy, num_layers: int, decisions: int) -> list[int]:
    boundaries = [0]
    for step in range(1, decisions):
        boundaries.append(policy.decide(observe(step, boundaries[-1], num_layers=num_layers)))
    return boundaries


@pytest.mark.parametrize(
    ("num_layers", "alpha", "expected"),
    [
        (12, 0.07, [0, 1, 2, 3, 4, 4, 5, 5, 6, 6]),
        (12, 1 / 5, [0, 3, 5, 6, 8, 9, 9, 10, 10, 11]),
        (12, 1 / 4, [0, 3, 6, 7, 9, 10, 10, 11, 11, 12]),
        (12, 1 / 3, [0, 4, 7, 9, 10, 11, 11, 12, 12, 12]),
        (12, 2 / 5, [0, 5, 8, 10, 11, 12]),
        (12, 1 / 2, [0, 6, 9, 11, 12, 12]),
        (24, 1 / 5, [0, 5, 9, 12, 15, 17, 18, 19, 20, 21]),
        (24, 1 / 3, [0, 8, 14, 17, 20, 21, 22, 23, 24, 24]),
        (24, 1 / 2, [0, 12, 18, 21, 23, 24]),
    ],
)
def test_paper_schedule_gives_the_papers_tables(num_layers: int, alpha: float, expected: list[int]) -> None:
    assert run(PaperSchedule(alpha, EVERY_STEP), num_layers, len(expected)) == expected


def test_policies_by_epochs_act_only_at_their_instants() -> None:
    instants = Instants(steps_per_epoch=10, start_after_epochs=2, interval_epochs=3)
    acting = {step: number for step in range(120) if (number := instants.number(step)) is not None}
    assert acting == {50: 1, 80: 2, 110: 3}


def test_gradient_norm_freezes_up_to_the_stillest_block_when_the_bound_allows() -> None:
    norms = [0.0, 5.0, 1.0, *[5.0] * 10, 0.0]
    assert GradientNorm(1 / 3, EVERY_STEP).decide(observe(1, 0, norms)) == 2


def test_gradient_norm_never_passes_the_geometric_bound() -> None:
    norms = [9.0] * 11 + [0.1, 9.0, 9.0]
    policy = GradientNorm(1 / 3, EVERY_STEP)
    assert policy.decide(observe(1, 0, norms)) == 4
    assert policy.decide(observe(2, 9, norms)) == 10


def test_gradient_norm_looks_only_at_active_blocks() -> None:
    norms = [0.0, 0.0, 0.0, 0.0, 5.0, 1.0, *[5.0] * 7, 0.0]
    assert GradientNorm(1 / 2, EVERY_STEP).decide(observe(1, 3, norms)) == 5


def test_gradient_norm_of_an_all_frozen_model_stays() -> None:
    assert GradientNorm(1 / 2, EVERY_STEP).decide(observe(1, 12)) == 12


def test_gradient_norm_waits_for_its_next_instant_when_the_step_was_skipped() -> None:
    observation = FreezeObservation(step=1, epoch=1, boundary=3, num_layers=12, unit_gradient_norms=())
    assert GradientNorm(1 / 2, EVERY_STEP).decide(observation) == 3


def test_explicit_boundaries_may_fall_and_may_be_given_in_any_order() -> None:
    policy = Explicit(
        [FreezePoint(step=9, boundary=3), FreezePoint(step=2, boundary=4), FreezePoint(step=5, boundary=0)]
    )
    assert [policy.decide(observe(step)) for step in (1, 2, 5, 8, 9, 30)] == [0, 4, 0, 0, 3, 3]


def test_explicit_boundaries_hold_from_their_step_on() -> None:
    policy = Explicit([FreezePoint(step=0, boundary=1), FreezePoint(step=5, boundary=4)])
    assert [policy.decide(observe(step)) for step in (0, 4, 5, 9)] == [1, 1, 4, 4]


@pytest.mark.parametrize(
    "policy",
    [
        NoFreeze(),
        PaperSchedule(0.9, EVERY_STEP),
        GradientNorm(0.9, EVERY_STEP),
        Explicit([FreezePoint(step=1, boundary=4096)]),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_no_policy_lowers_the_boundary_or_freezes_more_than_there_is(policy: FreezePolicy) -> None:
    boundary = 0
    for step in range(30):
        decided = policy.decide(observe(step, boundary))
        assert boundary <= decided <= 12
        boundary = decided
    state = policy.state_dict()
    policy.load_state_dict(state)
    assert policy.state_dict() == state


@pytest.mark.parametrize(
    ("name", "kind"),
    [("None", NoFreeze), ("PaperSchedule", PaperSchedule), ("GradientNorm", GradientNorm), ("Explicit", Explicit)],
)
def test_every_policy_of_the_spec_can_be_made(name: str, kind: type) -> None:
    spec = Freeze.model_validate({"policy": name, "boundaries": [{"step": 1, "boundary": 1}]})
    assert isinstance(make_policy(spec, steps_per_epoch=7), kind)
