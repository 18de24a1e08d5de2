"""What all agree on after a round, from the sums of their ballots."""

import math
from typing import Any, cast

import pytest

from pipetransformer.training.vote import StepSums, Vote


def test_gradients_are_divided_by_the_weight_and_clipped_by_their_norm() -> None:
    vote = Vote(loss_sum=8.0, weight=4.0, square_norms=[9.0 * 16, 16.0 * 16])  # the mean has a norm of 5

    assert (vote.loss, vote.gradient_norm, vote.unit_norms) == (2.0, 5.0, [3.0, 4.0])
    assert vote.gradient_scale(None) == vote.gradient_scale(5.0) == vote.gradient_scale(6.0) == 1 / 4
    assert vote.gradient_scale(2.5) == 1 / 8


@pytest.mark.parametrize(
    ("vote", "finite"),
    [
        (Vote(loss_sum=1.0, weight=1.0, square_norms=[1.0]), True),
        (Vote(loss_sum=math.nan, weight=1.0, square_norms=[1.0]), False),
        (Vote(loss_sum=1.0, weight=1.0, square_norms=[1.0, math.inf]), False),
        (Vote(loss_sum=0.0, weight=0.0, square_norms=[0.0]), False),
        (Vote(loss_sum=1.0, weight=1.0, square_norms=[1.0], earlier=[StepSums(1.0, 1.0, 1.0)]), True),
        (Vote(loss_sum=1.0, weight=1.0, square_norms=[1.0], earlier=[StepSums(0.0, 0.0, 0.0)]), False),
        (Vote(loss_sum=1.0, weight=1.0, square_norms=[1.0], earlier=[StepSums(1.0, 1.0, math.inf)]), False),
    ],
)
def test_a_step_counts_only_with_finite_mean_loss_and_gradients(vote: Vote, finite: bool) -> None:
    assert vote.finite == finite


def test_a_ballot_comes_back_from_its_numbers() -> None:
    vote = Vote(loss_sum=4.0, weight=5.0, square_norms=[6.0, 7.0])

    assert vote.to_list() == [4.0, 5.0, 6.0, 7.0], "only what a late commit needs"
    assert Vote.from_list(vote.to_list()) == vote


def test_a_sum_of_ballots_has_each_number_in_its_place() -> None:
    class Ballots:
        """Of three members that all say the same."""

        def sum(self, values: list[float]) -> list[float]:
            return [3 * value for value in values]

    ballot = Vote(
        1.0, 2.0, 3.0, 4.0, 5.0, [6.0],
        similarities=[0.5], behind=7.0, save=8.0, computing=9.0, keeps_layers_on_device=1.0,
    )  # fmt: skip
    expected = Vote(
        3.0, 6.0, 9.0, 12.0, 15.0, [18.0],
        similarities=[0.5], behind=21.0, save=24.0, computing=27.0, keeps_layers_on_device=3.0,
    )  # fmt: skip

    assert ballot.reduce(cast(Any, Ballots())) == expected
    ballot.earlier = [StepSums(1.0, 2.0, 3.0), StepSums(4.0, 5.0, 6.0)]
    expected.earlier = [StepSums(3.0, 6.0, 9.0), StepSums(12.0, 15.0, 18.0)]
    assert ballot.reduce(cast(Any, Ballots())) == expected
    assert expected.num_steps == 3


def test_a_round_is_finite_if_all_its_steps_are() -> None:
    good, bad = StepSums(1.0, 1.0, 1.0), StepSums(math.nan, 1.0, 1.0)

    assert Vote(loss_sum=1.0, weight=1.0, earlier=[good, good]).finite
    assert not Vote(loss_sum=1.0, weight=1.0, earlier=[good, bad]).finite
    assert not Vote(loss_sum=math.nan, weight=1.0, earlier=[good, good]).finite
