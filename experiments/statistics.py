"""What is said of the scores of several seeds: interquartile means and bootstrap intervals (arXiv 2108.13264)."""

import dataclasses

import numpy as np
import scipy.stats

RESAMPLES = 5000


def interquartile_mean(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean of the middle half; of fewer than four scores, the mean of all."""
    return scipy.stats.trim_mean(scores, 0.25, axis=axis)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number and its 95 % percentile bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def estimate(scores: np.ndarray) -> Estimate:
    """The interquartile mean of `scores` [seeds]; of a single one, that score, with an interval of no width."""
    if len(scores) < 2:
        return Estimate(*(float(scores[0]),) * 3)
    interval = scipy.stats.bootstrap(
        (scores,), interquartile_mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return Estimate(float(interquartile_mean(scores)), float(interval.low), float(interval.high))


def difference(scores: np.ndarray, baseline: np.ndarray) -> Estimate:
    """How much higher the interquartile mean of `scores` is than that of `baseline`; seeds are not paired."""

    def gap(scores, baseline, axis=-1):
        return interquartile_mean(scores, axis) - interquartile_mean(baseline, axis)

    value = float(gap(scores, baseline))
    if min(len(scores), len(baseline)) < 2:
        return Estimate(value, -float("inf"), float("inf"))
    interval = scipy.stats.bootstrap(
        (scores, baseline), gap, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high))
