"""A freeze on trial, with losses that are drawn: a bad freeze thaws, a harmless one stays."""

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from pipetransformer.errors import SpecError
from pipetransformer.freeze import (
    Explicit,
    FreezeObservation,
    FreezePolicy,
    GradientNorm,
    Instants,
    NormChange,
    PaperSchedule,
    Plasticity,
    PolicyCopy,
    Trial,
    Verdict,
)
from pipetransformer.job.checks import check_parts
from pipetransformer_contract.spec import FreezePoint, FreezeTrial
from tests.testkit.trainer.numerics import ADAMW, make_spec

LAYERS = 6
SPEC = FreezeTrial(steps=20, tolerance=0.02, backoff=2)
#: Log loss that each step with frozen layers adds, for the rest of the run.
HARM = 0.005


@dataclass
class Run:
    """Losses that follow a power law with noise, and what a trial decides on them.

    Attributes:
        harm: log loss that a step adds by its number of frozen layers.
    """

    policy: FreezePolicy
    spec: FreezeTrial = SPEC
    harm: Callable[[int], float] = lambda frozen: HARM if frozen else 0.0
    noise: float = 0.02
    evaluates_every: int = 0
    seed: int = 0
    boundaries: list[int] = field(default_factory=list)
    verdicts: list[tuple[int, Verdict]] = field(default_factory=list)

    def take(self, steps: int, *, resume_at: Sequence[int] = (), skipped: Sequence[int] = ()) -> "Run":
        """Take steps; at those of `resume_at` another copy resumes from the state as a checkpoint stores it."""
        chance, worse, boundary = random.Random(self.seed), 0.0, 0
        copy = PolicyCopy(self.policy, {}, None, self.spec)
        for step in range(steps):
            if step in resume_at:
                copy = PolicyCopy(self.policy, json.loads(json.dumps(copy.state_dict())), None, self.spec)
            worse += self.harm(boundary)
            true = 2.0 * (step + 1) ** -0.3 * 2.718281828**worse
            loss = true * (1 + chance.gauss(0, self.noise))
            evaluated = bool(step and self.evaluates_every and step % self.evaluates_every == 0)
            boundary = copy.decide(
                FreezeObservation(
                    step=step,
                    epoch=0,
                    boundary=boundary,
                    num_layers=LAYERS,
                    unit_gradient_norms=[1.0 + (7 * unit + step) % 5 for unit in range(LAYERS + 2)],
                    learning_rate=0.1,
                    similarities=[0.1] * 4,
                    loss=None if step in skipped or not step else loss,
                    held_out_loss=true if evaluated else None,
                )
            )
            self.boundaries.append(boundary)
            if copy.verdict is not None:
                self.verdicts.append((step, copy.verdict))
        return self


def explicit(step: int = 100, boundary: int = 3) -> Explicit:
    return Explicit([FreezePoint(step=step, boundary=boundary)])


def moves(run: Run) -> list[tuple[int, int]]:
    before = [0, *run.boundaries]
    return [(step, now) for step, now in enumerate(run.boundaries) if now != before[step]]


def test_a_bad_freeze_thaws_and_is_tried_again_later_each_time() -> None:
    """A trial takes 20 steps. The waits after it are 20 * 2, 20 * 2^2 and 20 * 2^3 steps."""
    run = Run(explicit()).take(450)

    assert moves(run) == [(100, 3), (120, 0), (160, 3), (180, 0), (260, 3), (280, 0), (440, 3)]
    assert [verdict.kept for _, verdict in run.verdicts] == [False] * 3


@pytest.mark.parametrize("seed", range(20))
def test_a_harmless_freeze_stays_whatever_the_noise(seed: int) -> None:
    run = Run(explicit(), harm=lambda frozen: 0.0, seed=seed, noise=0.1).take(200)

    assert moves(run) == [(100, 3)]
    assert [(step, verdict.kept) for step, verdict in run.verdicts] == [(120, True)]


def test_losses_within_the_tolerance_are_no_reason_to_thaw() -> None:
    """The trend is exact here, so that only the tolerance speaks for the freeze."""
    harmful = Run(explicit(), noise=0.0).take(121)
    ((_, verdict),) = harmful.verdicts
    assert not verdict.kept and 0.05 < verdict.excess < 0.06

    generous = SPEC.model_copy(update={"tolerance": 0.06})
    assert Run(explicit(), spec=generous, noise=0.0).take(121).boundaries[-1] == 3


def test_one_outlier_never_thaws_layers() -> None:
    def spike(trial: Trial, step: int, boundary: int) -> int:
        loss = 1e6 if step == 110 else 2.0 * step**-0.3
        observation = FreezeObservation(step, 0, boundary, LAYERS, (), loss=loss)
        return trial.decide(observation, 3 if step >= 100 else 0)

    trial, boundary = Trial(SPEC), 0
    for step in range(1, 125):
        boundary = spike(trial, step, boundary)
    assert boundary == 3


def test_held_out_losses_judge_where_there_are_enough() -> None:
    often, seldom = (Run(explicit(), evaluates_every=every).take(121).verdicts[0][1] for every in (5, 7))
    assert often.held_out and not seldom.held_out
    assert not often.kept and not seldom.kept


def test_one_trial_at_a_time_and_freezes_of_others_wait_for_its_end() -> None:
    policy = PaperSchedule(1 / 3, Instants(start=80, interval=10))
    run = Run(policy, harm=lambda frozen: 0.0, noise=0.0).take(140)

    assert moves(run) == [(90, 2), (120, 5)], "at 100 and 110 the first freeze is on trial, at 120 it has ended"


def test_after_a_failure_at_most_the_layers_that_failed_freeze() -> None:
    policy = PaperSchedule(1 / 3, Instants(start=80, interval=10))
    run = Run(policy, noise=0.0).take(160)

    assert moves(run) == [(90, 2), (110, 0), (150, 2)]


def test_a_freeze_that_stays_ends_the_series_of_failures() -> None:
    """The first trial fails, its second try does not, and then more layers may freeze, which wait as after a first
    failure."""
    asked = itertools.count()

    def harm(frozen: int) -> float:
        return HARM if (next(asked) < 130 and frozen) or frozen == 5 else 0.0

    points = [FreezePoint(step=100, boundary=3), FreezePoint(step=200, boundary=5)]
    run = Run(Explicit(points), harm=harm, noise=0.0).take(270)

    assert moves(run) == [(100, 3), (120, 0), (160, 3), (200, 5), (220, 3), (260, 5)]
    assert [verdict.kept for _, verdict in run.verdicts] == [False, True, False]


def decided(losses: Callable[[int], float], steps: int, evaluated: Sequence[int] = ()) -> tuple[Trial, int]:
    """A trial after these steps, in which three layers are to freeze after step 100, and the boundary."""
    trial, boundary = Trial(SPEC), 0
    for step in range(1, steps + 1):
        loss, held_out = losses(step), 2.0 if step in evaluated else None
        observation = FreezeObservation(step, 0, boundary, LAYERS, (), loss=loss, held_out_loss=held_out)
        boundary = trial.decide(observation, 3 if step >= 100 else 0)
    return trial, boundary


def test_the_trend_is_that_of_four_trials_before_the_freeze_until_the_trial_ends() -> None:
    trial, boundary = decided(lambda step: 2.0 * step**-0.3, 119)
    steps, _ = trial.state_dict()["training"]
    assert boundary == 3 and steps == list(range(100 + 1 - 4 * SPEC.steps, 120))


@pytest.mark.parametrize(("standard_errors", "kept"), [(1.9999, True), (2.0001, False)])
def test_a_freeze_fails_if_the_loss_is_two_standard_errors_above_its_trend(standard_errors: float, kept: bool) -> None:
    """numpy fits the trend here, and tells how uncertain it is."""
    x, chance = np.log(np.arange(1, 121)), random.Random(1)
    y = np.array([-0.3 * each + chance.gauss(0, 0.1) for each in x])
    before, after = slice(100 - 4 * SPEC.steps, 100), slice(100, 120)
    trend, covariance = np.polyfit(x[before], y[before], 1, cov=True)
    above = y[after] - np.polyval(trend, x[after])
    at = np.array([x[after].mean(), 1.0])
    error = math.sqrt(at @ covariance @ at + above.var(ddof=1) / SPEC.steps)
    y[after] += standard_errors * error - above.mean()

    trial, _ = decided(lambda step: math.exp(y[step - 1]), 120)

    assert trial.verdict is not None and trial.verdict.kept is kept
    assert math.log1p(trial.verdict.excess) == pytest.approx(standard_errors * error)


def test_losses_without_a_logarithm_do_not_count() -> None:
    assert decided(lambda step: -1.0, 110)[1] == decided(lambda step: 0.0, 110)[1] == 0


def test_held_out_losses_judge_only_if_there_are_enough_before_the_freeze() -> None:
    for first, held_out in ((90, False), (85, True)):
        trial, _ = decided(lambda step: 2.0 * step**-0.3, 120, evaluated=range(first, 121, 5))
        assert trial.verdict is not None and trial.verdict.held_out is held_out


def test_a_failed_trial_leaves_no_losses_to_the_next() -> None:
    trial, boundary = decided(lambda step: 2.0 if step > 100 else 2.0 / step, 120, evaluated=[80, 90, 110])
    state = trial.state_dict()
    assert boundary == 0 and state["training"] == state["held_out"] == [[], []]


def test_a_freeze_waits_for_a_trend() -> None:
    run = Run(explicit(step=5), harm=lambda frozen: 0.0).take(60, skipped=[7, 8])
    assert moves(run) == [(22, 3)], "20 losses of the steps before, without two that were skipped"
    assert [step for step, _ in run.verdicts] == [42]


def test_what_is_frozen_before_the_first_step_is_not_on_trial() -> None:
    run = Run(explicit(step=0)).take(200)
    assert moves(run) == [(0, 3)] and not run.verdicts


def test_a_policy_that_lets_layers_train_ends_their_trial() -> None:
    points = [FreezePoint(step=100, boundary=3), FreezePoint(step=110, boundary=1)]
    run = Run(Explicit(points)).take(150)
    assert moves(run) == [(100, 3), (110, 1)] and not run.verdicts


@pytest.mark.parametrize(
    "policy",
    [
        explicit(),
        PaperSchedule(1 / 3, Instants(30, 10)),
        GradientNorm(1 / 2, Instants(30, 10)),
        NormChange(80, Instants(30, 7)),
        Plasticity(0.5, 2, 2.0, Instants(30, 5)),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_a_copy_that_resumes_decides_as_one_that_does_not(policy: FreezePolicy) -> None:
    stayed, resumed = Run(policy).take(300), Run(policy).take(300, resume_at=range(0, 300, 3))
    assert resumed.boundaries == stayed.boundaries
    assert resumed.verdicts == stayed.verdicts
    assert not all(verdict.kept for _, verdict in stayed.verdicts), "each policy froze something, and it thawed"


def test_layers_on_trial_are_told_apart_from_those_that_are_settled() -> None:
    trial = Trial(SPEC)
    boundary, seen = 1, {}
    for step in range(1, 50):
        observation = FreezeObservation(step, 0, boundary, LAYERS, (), loss=2.0 * step**-0.3)
        boundary = trial.decide(observation, 3 if step >= 25 else 1)
        seen[step] = (boundary, trial.on_trial(boundary))
    assert (seen[24], seen[25], seen[44], seen[45]) == ((1, 0), (3, 2), (3, 2), (3, 0))


def test_a_round_of_several_steps_ends_where_a_trial_may_end() -> None:
    """`Explicit` itself decides next at step 200, and after that never."""
    points = [FreezePoint(step=100, boundary=3), FreezePoint(step=200, boundary=4)]
    copy = PolicyCopy(Explicit(points), {}, None, SPEC)
    assert copy.next_decision(90) == 100
    for step in range(101):
        copy.decide(FreezeObservation(step, 0, 3 * (step > 100), LAYERS, (), loss=2.0 * (step + 1) ** -0.3))
    ends = 100 + SPEC.steps
    assert [copy.next_decision(step) for step in (100, ends - 1, ends, ends + 3)] == [ends, ends, ends + 1, ends + 4]


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Verdict(range(3, 6), False, 0.021, False), "layers 3-5 thawed: training loss 2.1 % above its trend"),
        (Verdict(range(1), True, -0.004, True), "layer 0 stays frozen: held-out loss 0.4 % below its trend"),
    ],
)
def test_a_verdict_in_words(verdict: Verdict, words: str) -> None:
    assert verdict.words == words


def test_a_trial_without_a_policy_is_refused() -> None:
    spec = make_spec(ADAMW, freeze={"trial": {"steps": 20}})
    with pytest.raises(SpecError, match="policy None freezes nothing") as refusal:
        check_parts(spec)
    assert refusal.value.field == "spec.freeze.trial"


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 20, "tolerance": -0.1}, {"steps": 20, "backoff": 0.5}])
def test_a_trial_that_could_not_be_judged_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="greater than or equal"):
        FreezeTrial.model_validate(wrong)


def test_without_trials_no_frozen_layer_is_on_trial() -> None:
    assert PolicyCopy(Explicit([]), {}).on_trial(3) == 0
