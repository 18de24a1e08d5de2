"""Differences of runs that should compute the same: a value that is no number must not pass for a small one."""

import math

import pytest
import torch

from tests.testkit.differences import relative_difference, relative_distance, worst_relative_difference


def test_the_worst_of_two_series_is_relative_to_the_reference() -> None:
    assert worst_relative_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert worst_relative_difference([], []) == 0
    with pytest.raises(ValueError, match="longer"):
        worst_relative_difference([1.0], [1.0, 2.0])


def test_a_loss_that_is_no_number_is_infinitely_far_wherever_it_stands() -> None:
    assert relative_difference(math.nan, 1.0) == math.inf
    for values in ([math.nan, 1.0], [1.0, math.nan]):
        assert worst_relative_difference(values, [1.0, 1.0]) == math.inf


def test_a_gradient_with_an_entry_that_is_no_number_is_infinitely_far() -> None:
    assert relative_distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4 / 3)
    assert relative_distance(torch.tensor([3.0, math.nan]), torch.tensor([3.0, 4.0])) == math.inf
