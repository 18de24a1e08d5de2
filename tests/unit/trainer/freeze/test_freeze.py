"""Freeze policies against the papers' tables and formulas."""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pipetransformer.errors import SpecError
from pipetransformer.freeze import (
    Explicit,
    FreezeObservation,
    FreezePolicy,
    GradientNorm,
    Instants,
    NoFreeze,
    NormChange,
    PaperSchedule,
    Plasticity,
    PolicyCopy,
    make_policy,
)
from pipetransformer_contract.spec import Freeze, FreezePoint, FreezeTrial
from tests.testkit.operator.builders import make_job

EVERY_STEP = Instants(start=0, interval=1)


def observe(step: int, boundary: int = 0, norms: list[float] | None = None, num_layers: int = 12) -> FreezeObservation:
    return FreezeObservation(
        step=step,
        epoch=step,
        boundary=boundary,
        num_layers=num_layers,
        unit_gradient_norms=[1.0] * (num_layers + 2) if norms is None else norms,
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


def test_the_paper_schedule_thaws_nothing() -> None:
    """As in a run that resumes with a smaller alpha."""
    assert PaperSchedule(1 / 12, EVERY_STEP).decide(observe(1, 5)) == 5


def test_policies_act_only_at_their_instants() -> None:
    instants = Instants(start=20, interval=30)
    acting = {step: number for step in range(120) if (number := instants.number(step)) is not None}
    assert acting == {50: 1, 80: 2, 110: 3}
    assert [instants.after(step) for step in (0, 19, 20, 49, 50, 51)] == [50, 50, 50, 50, 80, 80]


@pytest.mark.parametrize(
    "policy",
    [
        PaperSchedule(0.9, Instants(20, 30)),
        GradientNorm(0.9, Instants(20, 30)),
        NormChange(50, Instants(20, 30)),
        Plasticity(0.5, 2, 2.0, Instants(20, 30)),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_a_round_of_several_steps_ends_at_the_policys_next_instant(policy: FreezePolicy) -> None:
    assert [policy.next_decision(step) for step in (0, 50)] == [50, 80]
    assert policy.decide(observe(51, 3)) == 3


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


def test_gradient_norm_takes_no_block_without_a_gradient_for_the_stillest() -> None:
    policy = GradientNorm(1 / 2, EVERY_STEP)
    assert policy.decide(observe(1, 0, [0.0, 1.0, *[5.0] * 10, 0.0, 0.0])) == 1
    assert policy.decide(observe(1, 0, [0.0, 0.0, 0.0, 1.0, *[5.0] * 9, 0.0])) == 3
    assert policy.decide(observe(1, 4, [0.0] * 14)) == 4


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
    assert [policy.next_decision(step) for step in (0, 4, 5)] == [5, 5, None]


@pytest.mark.parametrize(
    "policy",
    [
        NoFreeze(),
        PaperSchedule(0.9, EVERY_STEP),
        GradientNorm(0.9, EVERY_STEP),
        NormChange(100, EVERY_STEP),
        Plasticity(0.5, 2, 2.0, EVERY_STEP),
        Explicit([FreezePoint(step=1, boundary=4096), FreezePoint(step=7, boundary=0)]),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_a_policy_freezes_no_more_than_there_is_and_goes_on_from_its_state(policy: FreezePolicy) -> None:
    boundary, pristine = 0, copy.deepcopy(policy)
    for step in range(30):
        norms = [1.0 + (7 * unit + 3 * step) % 5 for unit in range(14)]
        look = [0.1 * (step % 4)] * 4
        observation = replace(observe(step, boundary, norms), learning_rate=30.0 - step, similarities=look)
        heir = copy.deepcopy(pristine)
        heir.load_state_dict(json.loads(json.dumps(policy.state_dict())))
        decided = policy.decide(observation)
        assert 0 <= decided <= 12
        assert heir.decide(observation) == decided
        boundary = decided


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("None", NoFreeze),
        ("PaperSchedule", PaperSchedule),
        ("GradientNorm", GradientNorm),
        ("NormChange", NormChange),
        ("Plasticity", Plasticity),
        ("Explicit", Explicit),
    ],
)
def test_every_policy_of_the_spec_can_be_made(name: str, kind: type) -> None:
    spec = Freeze.model_validate({"policy": name, "boundaries": [{"step": 1, "boundary": 1}]})
    assert isinstance(make_policy(spec, steps_per_epoch=7), kind)


@pytest.mark.parametrize(
    ("unit", "instants"),
    [
        ({}, Instants(0, 7)),
        ({"startAfterEpochs": 2, "intervalEpochs": 3}, Instants(14, 21)),
        ({"startAfterSteps": 5, "intervalSteps": 4}, Instants(5, 4)),
        ({"startAfterSteps": 0, "intervalEpochs": 2}, Instants(0, 14)),
    ],
)
def test_instants_are_given_in_steps_or_epochs(unit: dict[str, int], instants: Instants) -> None:
    policy = make_policy(Freeze.model_validate({"policy": "GradientNorm"} | unit), steps_per_epoch=7)
    assert isinstance(policy, GradientNorm)
    assert policy.instants == instants


def change_norms(policy: NormChange, intervals: list[list[float]], boundary: int = 0) -> list[int]:
    """Boundaries after each interval of two steps, in which four blocks have these mean gradient norms."""
    boundaries = []
    for number, means in enumerate(intervals):
        for step, share in ((2 * number + 1, 0.5), (2 * number + 2, 1.5)):
            norms = [9.0, *(share * mean for mean in means), 9.0]
            boundary = policy.decide(observe(step, boundary, norms, num_layers=4))
        boundaries.append(boundary)
    return boundaries


def test_norm_change_freezes_the_blocks_before_the_first_that_changes_as_much_as_the_median() -> None:
    # Changes 0.1, 0.2, 0.6, 0.3: the median is 0.25 and the third block is the first at or above it.
    policy = NormChange(50, Instants(0, 2))
    assert change_norms(policy, [[10, 10, 10, 10], [11, 8, 4, 7]]) == [0, 2]


def test_norm_change_looks_only_at_active_blocks_and_never_freezes_the_last() -> None:
    policy = NormChange(100, Instants(0, 2))
    norms: list[list[float]] = [[10, 10, 10, 10], [99, 11, 13, 14], [99, 11, 13, 15], [99, 99, 13, 15]]
    assert change_norms(policy, norms, boundary=1) == [1, 3, 3, 3]


def test_norm_change_leaves_out_blocks_that_have_nothing_to_train() -> None:
    policy = NormChange(50, Instants(0, 2))
    assert change_norms(policy, [[0, 0, 10, 10], [0, 0, 11, 15]]) == [0, 3]
    policy = NormChange(50, Instants(0, 2))
    assert change_norms(policy, [[0, 0, 0, 0], [0, 0, 0, 0]]) == [0, 0]


def test_norm_change_takes_a_block_that_trains_again_for_one_that_changes() -> None:
    policy = NormChange(100, Instants(0, 2))
    assert change_norms(policy, [[0, 10, 10, 10], [10, 11, 12, 13]], boundary=0) == [0, 0]


def test_norm_change_neither_counts_skipped_steps_nor_those_before_its_start() -> None:
    policy = NormChange(100, Instants(start=4, interval=2))
    boundary = 0
    for step in range(1, 9):
        norms = [9.0, *([99.0] * 4 if step <= 4 else [10, 10, 10, 10] if step <= 6 else [10, 10, 20, 10]), 9.0]
        skipped = step == 7
        observation = observe(step, boundary, [] if skipped else norms, num_layers=4)
        boundary = policy.decide(observation)
    assert boundary == 2


def test_norm_change_takes_the_mean_of_an_interval_and_not_its_last_step() -> None:
    policy = NormChange(100, Instants(0, 2))
    norms = [[10.0] * 6, [10.0] * 6, [10.0, 10.0, 10.0, 30.0, 10.0, 10.0], [10.0] * 6]
    observations = [observe(step, 0, each, num_layers=4) for step, each in enumerate(norms, start=1)]
    assert [policy.decide(observation) for observation in observations] == [0, 0, 0, 2]


def test_norm_change_compares_with_the_newest_interval_that_has_a_gradient() -> None:
    policy = NormChange(100, EVERY_STEP)
    norms: list[list[float]] = [[9, 10, 10, 10, 10, 9], [], [9, 10, 10, 20, 10, 9]]  # the second step was skipped
    observations = [observe(step, 0, each, num_layers=4) for step, each in enumerate(norms, start=1)]
    assert [policy.decide(observation) for observation in observations] == [0, 0, 2]


def plasticities(policy: Plasticity, distances: list[float], rates: list[float] | None = None) -> list[int]:
    """Boundaries after decisions between which the front block moves by these distances."""
    look, boundary, boundaries = 0.0, 0, []
    for number, distance in enumerate(distances):
        look += distance**0.5
        rate = 1.0 if rates is None else rates[number]
        observation = replace(observe(number + 1, boundary), learning_rate=rate, similarities=[look] * 4)
        boundary = policy.decide(observation)
        boundaries.append(boundary)
    return boundaries


def test_plasticity_freezes_the_front_block_once_it_no_longer_changes() -> None:
    policy = Plasticity(0.05, 2, 10.0, EVERY_STEP)
    # The first is only a reference. The average of two falls by at most 0.05 * 8 a decision from the seventh on.
    falling = [0.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.3, 0.3, 0.3]
    assert plasticities(policy, falling) == [0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_each_front_block_has_its_own_measure_of_much() -> None:
    policy = Plasticity(0.1, 2, 10.0, EVERY_STEP)
    # A tenth of what moved the first block is much for the second one.
    first, second = [0.0, 8.0, 8.0, 8.0, 8.0], [0.0, 0.8, 0.4, 0.2, 0.1, 0.1, 0.1]
    assert plasticities(policy, [*first, *second]) == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2]


def test_all_blocks_train_again_when_the_learning_rate_has_dropped_since_the_first_freeze() -> None:
    policy = Plasticity(0.5, 2, 10.0, EVERY_STEP)
    rates = [1.0] * 6 + [0.2] * 3 + [0.1] * 8
    boundaries = plasticities(policy, [1.0] * len(rates), rates)
    assert boundaries[4:10] == [1, 1, 1, 1, 1, 0]
    assert boundaries[-1] == 1, "they freeze again, and the drop counts anew"


def test_the_learning_rate_is_compared_with_that_of_the_first_freeze_and_no_later_one() -> None:
    policy = Plasticity(0.5, 2, 10.0, EVERY_STEP)
    assert plasticities(policy, [1.0] * 12, [1.0] * 6 + [0.5] * 5 + [0.1])[-3:] == [2, 2, 0]


def test_the_scale_of_a_models_outputs_changes_no_decision_of_plasticity() -> None:
    first, second = [0.0, 8.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.5, 0.5], [0.8, 0.4, 0.2, 0.1, 0.1, 0.1]
    large, small = (
        plasticities(Plasticity(0.1, 2, 10.0, EVERY_STEP), [scale * each for each in (*first, *second)])
        for scale in (1.0, 4.0**-9)
    )
    assert small == large
    assert large[-1] == 2


def test_plasticity_freezes_blocks_that_do_not_change_at_all_and_then_stays() -> None:
    policy = Plasticity(0.5, 2, 10.0, EVERY_STEP)
    boundary = 0
    for step in range(1, 30):
        still = replace(observe(step, boundary, num_layers=3), learning_rate=1.0, similarities=[0.5] * 4)
        boundary = policy.decide(still)
    assert boundary == 3


def test_the_learning_rate_thaws_blocks_only_at_an_instant() -> None:
    policy = Plasticity(0.5, 2, 10.0, Instants(start=0, interval=5))
    boundary, boundaries = 0, {}
    for step in range(1, 46):
        observation = replace(observe(step, boundary), learning_rate=1.0 if step <= 31 else 0.1)
        boundaries[step] = boundary = policy.decide(replace(observation, similarities=[float(step)] * 4))
    assert [boundaries[step] for step in (24, 25, 31, 32, 34, 35)] == [0, 1, 1, 1, 1, 0]


def test_blocks_that_train_again_are_measured_from_the_start() -> None:
    """A freeze takes five decisions: the first is only a reference, and two averages in a row need four distances."""
    boundaries = plasticities(Plasticity(0.5, 2, 10.0, EVERY_STEP), [1.0] * 11, [1.0] * 5 + [0.1] * 6)
    assert boundaries == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_plasticity_asks_again_for_a_freeze_that_waits_for_the_trial_of_another() -> None:
    policy = Plasticity(0.5, 2, 10.0, EVERY_STEP)
    looks = [replace(observe(step, 3), learning_rate=1.0, similarities=[float(step)] * 4) for step in range(1, 9)]
    assert [policy.decide(look) for look in looks] == [3, 3, 3, 3, 4, 4, 4, 4]


def test_plasticity_asks_for_similarities_only_when_it_decides() -> None:
    policy = Plasticity(0.5, 2, 10.0, Instants(start=10, interval=5))
    assert [step for step in range(30) if policy.needs_similarities(step)] == [15, 20, 25]


def test_plasticity_leaves_out_similarities_that_are_not_finite() -> None:
    policy = Plasticity(0.5, 2, 10.0, EVERY_STEP)
    assert plasticities(policy, [1.0, 1.0, math.nan, math.nan, 1.0]) == [0] * 5
    assert policy.state_dict()["history"] == [1.0]


def test_a_policy_that_decides_next_at_the_same_step_is_refused() -> None:
    class Stuck(NoFreeze):
        def next_decision(self, step: int) -> int:  # type: ignore[override]
            return step

    with pytest.raises(SpecError, match=r"next_decision\(5\) is 5, which is not later"):
        PolicyCopy(Stuck(), {}).next_decision(5)


def test_a_run_that_resumes_without_trials_forgets_the_trial_before() -> None:
    before = PolicyCopy(NoFreeze(), {}, None, FreezeTrial(steps=10))
    assert "trial" not in PolicyCopy(NoFreeze(), before.state_dict()).state_dict()


def test_a_trial_counts_the_losses_of_steps_within_a_round_as_those_of_other_steps() -> None:
    losses = {1: 4.0, 2: 3.0, 3: 2.5, 4: 2.25}
    each_step, each_round = (PolicyCopy(NoFreeze(), {}, None, FreezeTrial(steps=10)) for _ in range(2))
    for step, loss in losses.items():
        each_step.decide(replace(observe(step), loss=loss))
        if step < 4:
            each_round.note_loss(step, loss)
    each_round.decide(replace(observe(4), loss=losses[4]))
    assert each_round.state_dict() == each_step.state_dict()

    without_trial = PolicyCopy(NoFreeze(), {})
    without_trial.note_loss(1, 4.0)
    assert without_trial.verdict is None


def test_a_run_that_resumes_with_another_policy_begins_that_anew() -> None:
    before = PolicyCopy(NormChange(50, EVERY_STEP), {})
    before.decide(observe(1))
    assert PolicyCopy(Plasticity(0.5, 2, 10.0, EVERY_STEP), before.state_dict()).decide(observe(2)) == 0


class EveryOther(FreezePolicy):
    """A policy of a user: freezes `blocks` at every instant with an odd number, none at the others."""

    def __init__(self, instants: Instants, blocks: int) -> None:
        self.instants, self.blocks = instants, blocks

    def decide(self, observation: FreezeObservation) -> int:
        number = self.instants.number(observation.step)
        return observation.boundary if number is None else self.blocks * (number % 2)


def test_a_users_policy_is_asked_after_each_step_and_costs_no_forwards_unless_it_says_otherwise() -> None:
    policy = EveryOther(EVERY_STEP, blocks=1)
    assert [policy.next_decision(step) for step in (0, 7)] == [1, 8]
    assert not policy.needs_similarities(1)
    assert not policy.known_ahead, "a plan does not say when it freezes"


def test_a_job_that_does_not_mention_freeze_freezes_nothing() -> None:
    job = make_job().manifest()
    assert "freeze" not in job["spec"]
    for freeze in (make_job().job().spec.freeze, Freeze()):
        assert isinstance(make_policy(freeze, steps_per_epoch=10), NoFreeze)


@pytest.mark.parametrize(
    ("freeze", "fields"),
    [
        ({"policy": "PaperSchedule", "alpha": 0.5, "startAfterEpochs": 3, "never": ["head"]}, ""),
        ({"policy": "tests.unit.trainer.freeze.test_freeze:EveryOther", "options": {"blocks": 1}}, ""),
        ({"policy": "None", "always": ["embedding"]}, ""),
        ({"alpha": 0.5, "startAfterEpochs": 3, "never": ["head"]}, "alpha, never, startAfterEpochs"),
        ({"policy": "PaperSchedule", "options": {"alpha": 0.5}}, "options"),
        ({"policy": "GradientNorm", "percentile": 30}, "percentile"),
        ({"policy": "Explicit", "boundaries": [{"step": 1, "boundary": 1}], "startAfterEpochs": 3}, "startAfterEpochs"),
    ],
)
def test_fields_that_a_policy_does_not_read_are_named_in_a_warning(
    freeze: dict[str, Any], fields: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_policy(Freeze.model_validate(freeze), steps_per_epoch=10)

    assert caplog.messages == ([f"spec.freeze: policy {freeze.get('policy')} ignores {fields}"] if fields else [])


def not_a_policy(instants: Instants) -> str:
    return "policy"


def imported(name: str, **options: int) -> FreezePolicy:
    path = f"tests.unit.trainer.freeze.test_freeze:{name}"
    return make_policy(Freeze.model_validate({"policy": path, "options": options}), steps_per_epoch=10)


def test_a_policy_can_be_imported() -> None:
    policy = imported("EveryOther", blocks=3)
    assert [policy.decide(observe(step, 1)) for step in (5, 10, 15, 20)] == [1, 3, 1, 0]


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("Missing", {}, "spec.freeze.policy"),
        ("not_a_policy", {}, "spec.freeze.policy"),
        ("EveryOther", {"depth": 3}, "spec.freeze.options"),
    ],
)
def test_an_imported_policy_that_cannot_be_made_is_refused(name: str, options: dict[str, int], field: str) -> None:
    with pytest.raises(SpecError) as refusal:
        imported(name, **options)
    assert refusal.value.field == field


class Broken(FreezePolicy):
    def __init__(self, state: str = "") -> None:
        self.state = state

    def decide(self, observation: FreezeObservation) -> int:
        if observation.step:
            raise RuntimeError("no such layer")
        return observation.num_layers + 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state["state"]


def test_a_policy_that_fails_is_the_users_to_mend_and_no_broken_connection() -> None:
    for step, words in ((0, "boundary 13 of 12 layers"), (1, "RuntimeError: no such layer")):
        with pytest.raises(SpecError, match=words) as refusal:
            PolicyCopy(Broken(), {}).decide(observe(step))
        assert refusal.value.reason == "PolicyFailed"
    with pytest.raises(SpecError, match="KeyError: 'state'"):
        PolicyCopy(Broken(), {"policy": "Broken", "state": {"something": "else"}})


class Forgetful(Broken):
    def state_dict(self) -> dict[str, Any]:
        return {"layers": {1, 2}}


def test_a_policy_whose_state_is_no_json_fails_at_its_first_checkpoint() -> None:
    with pytest.raises(SpecError, match=r"Forgetful failed: TypeError: .*set is not JSON") as refusal:
        PolicyCopy(Forgetful(), {}).state_dict()
    assert refusal.value.reason == "PolicyFailed"


def test_a_worker_asks_its_own_copy_of_the_policy() -> None:
    pristine = Broken("fresh")
    PolicyCopy(pristine, {"policy": "Broken", "state": {"state": "used"}})
    assert pristine.state == "fresh"


def test_a_front_block_that_another_replaces_is_not_compared_with_it() -> None:
    """As when a trial thaws layers."""

    def decide(policy: Plasticity, step: int, boundary: int, look: float) -> int:
        return policy.decide(replace(observe(step, boundary), learning_rate=1.0, similarities=[look] * 4))

    thawed, fresh = (Plasticity(0.1, 2, 10.0, EVERY_STEP) for _ in range(2))
    for step in (1, 2, 3):
        decide(thawed, step, 3, look=0.0)
    looks = [9.0, 9.2, 9.34, 9.44, 9.51, 9.56, 9.595]  # the outputs of the layer before, which moves less and less

    found, wanted = (
        [decide(policy, step, 2, look) for step, look in enumerate(looks, start=4)] for policy in (thawed, fresh)
    )

    assert found == wanted
