"""Means over intervals are those of everything in them."""

import jax.numpy as jnp
import numpy as np

from pqn_eqx.metrics import Metrics, episode_metrics
from pqn_eqx.rollout import Episodes


def test_means_of_sums_weigh_every_term_alike():
    """Red if means were averaged: 3 episodes of 10 and one of 50 have a mean of 20, not of 30."""
    total = Metrics.of(episode_return=(30.0, 3)) + Metrics.of(episode_return=(50.0, 1))
    assert total.mean() == {"episode_return": 20.0}


def test_nothing_counted_is_not_a_number():
    means = Metrics.zeros(("loss",), (2,)).mean()
    assert means["loss"].shape == (2,)
    assert np.isnan(means["loss"]).all()


def test_episode_metrics_count_finished_episodes_alone():
    """Red if running episodes, or their zeros, entered the means."""
    done = jnp.asarray([[True, False], [False, True]])
    episodes = Episodes(
        done=done,
        episode_return=jnp.asarray([[1.0, 100.0], [100.0, 3.0]]),
        episode_length=jnp.asarray([[10, 999], [999, 20]]),
        extras=jnp.asarray([[[1.0, 0.0], [9.0, 9.0]], [[9.0, 9.0], [0.0, 0.0]]]),
    )
    means = episode_metrics(episodes, ("a", "b")).mean()
    assert means == {"episode_return": 2.0, "episode_length": 15.0, "a": 0.5, "b": 0.0}
