"""Weights: quantity times quality, summing to one."""

from __future__ import annotations

import math

import pytest

from wan_diloco.algorithm.weights import contribution_weight, normalised


def test_weight_is_tokens_squared_over_steps(vectors):
    for case in vectors["merge_weight"]["cases"]:
        assert contribution_weight(case["tokens"], case["steps"]) == case["w"]


def test_weights_of_long_runs_are_exact_quotients():
    assert contribution_weight(10**12, 3) == 10**24 / 3


def test_weights_sum_to_one_and_a_staleness_factor_cancels_between_equal_deltas():
    weights = normalised([1.0, 0.5])
    assert sum(weights) == 1.0
    assert weights == (2 / 3, 1 / 3)
    assert sum(weight * 1.0 for weight in weights) == 1.0


def test_the_sum_does_not_depend_on_the_order():
    weights = [1e16, 1.0, 1.0, 3e-3]
    assert sorted(normalised(weights)) == sorted(normalised(weights[::-1]))


@pytest.mark.parametrize(("tokens", "steps"), [(-1, 1), (10, 0), (10, -2)])
def test_counts_that_no_learner_means_are_refused(tokens, steps):
    with pytest.raises(ValueError, match="at least"):
        contribution_weight(tokens, steps)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [math.inf]])
def test_weights_that_cannot_be_normalised_are_refused(weights):
    with pytest.raises(ValueError, match=r"weight"):
        normalised(weights)
