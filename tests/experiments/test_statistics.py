"""Statistics by hand."""

import numpy as np
import pytest

from experiments.statistics import difference, estimate, interquartile_mean


def test_interquartile_mean_is_of_the_middle_half():
    """Red for a plain mean or a median: outliers are cut, and the rest is averaged."""
    assert interquartile_mean(np.array([1000.0, 1, 2, 3, 4, 5, 6, -1000])) == pytest.approx(3.5)
    assert interquartile_mean(np.array([0.0, 1, 2, 9, 90])) == pytest.approx(4)
    assert interquartile_mean(np.array([1.0, 2, 6])) == pytest.approx(3)
    np.testing.assert_allclose(interquartile_mean(np.array([[0.0, 1, 3, 99], [2, 2, 2, 2]])), [2, 2])


def test_the_interval_shrinks_with_the_seeds_and_covers_the_truth():
    """Of many samples of a known mean, about 95 % have it in their interval (bootstraps of 20 undercover a little)."""
    rng = np.random.default_rng(1)
    samples = rng.normal(3, 2, size=(200, 20))
    estimates = [estimate(sample) for sample in samples]
    covered = np.mean([e.low <= 3 <= e.high for e in estimates])
    assert 0.85 <= covered <= 0.99
    few = np.mean([e.high - e.low for e in map(estimate, samples[:, :5])])
    assert few > 1.3 * np.mean([e.high - e.low for e in estimates])


def test_one_seed_has_no_width_and_the_same_scores_have_none():
    assert (estimate(np.array([7.0])).low, estimate(np.array([7.0])).high) == (7, 7)
    same = estimate(np.full(5, 500.0))
    assert (same.value, same.low, same.high) == (500, 500, 500)


def test_difference_tells_what_differs_from_what_does_not():
    rng = np.random.default_rng(2)
    low, high = rng.normal(0, 1, 8), rng.normal(5, 1, 8)
    assert difference(high, low).low > 3
    assert difference(low, high).high < -3
    same = difference(low, rng.normal(0, 1, 8))
    assert same.low < 0 < same.high
    assert difference(high, low).value == pytest.approx(interquartile_mean(high) - interquartile_mean(low))
    assert difference(np.array([1.0]), np.array([0.0])).low == -float("inf")
