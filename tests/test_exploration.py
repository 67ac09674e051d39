"""ε-greedy frequencies and the schedule's values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from pqn_eqx.errors import ConfigError
from pqn_eqx.exploration import EpsilonGreedyConfig, LinearSchedule, epsilon_greedy


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_action_frequencies(epsilon):
    """Red if ε is not the share of random actions, if random actions skip one, or if greedy ones are not the best."""
    draws, q = 20_000, jnp.asarray([0.0, 2.0, -1.0, 1.0])
    keys = jax.random.split(jax.random.key(0), draws)
    actions = jax.jit(jax.vmap(epsilon_greedy, in_axes=(0, None, None)))(keys, q, epsilon)
    counts = np.bincount(actions, minlength=4)
    expected = draws * (epsilon / 4 + np.array([0, 1 - epsilon, 0, 0]))
    if epsilon == 0:
        np.testing.assert_array_equal(counts, expected)
    else:
        assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3


def test_whether_to_explore_and_which_action_are_independent():
    """Red if one key served both draws: then explored actions would be those of small uniform numbers alone."""
    keys = jax.random.split(jax.random.key(1), 20_000)
    actions = jax.vmap(epsilon_greedy, in_axes=(0, None, None))(keys, jnp.asarray([1.0, 0.0, 0.0]), 0.5)
    assert abs(np.mean(np.asarray(actions) == 1) - 0.5 / 3) < 0.01
    assert abs(np.mean(np.asarray(actions) == 2) - 0.5 / 3) < 0.01


def test_schedule():
    schedule = LinearSchedule(1.0, 0.2, 100)
    times = jnp.asarray([0.0, 50, 100, 1e9])
    np.testing.assert_allclose(jax.vmap(schedule)(times), [1, 0.6, 0.2, 0.2], rtol=1e-6)
    assert LinearSchedule(1.0, 0.2, 0)(jnp.asarray(0.0)) == pytest.approx(0.2)


def test_the_schedule_runs_over_environment_steps():
    epsilon = EpsilonGreedyConfig(1.0, 0.0, 0.5).build(total_timesteps=1000)
    assert epsilon(jnp.asarray(250.0)) == pytest.approx(0.5)
    # A billion steps are past the exact integers of float32, and precise all the same.
    long = EpsilonGreedyConfig(1.0, 0.0, 1.0).build(total_timesteps=8_000_000_000)
    assert long(jnp.asarray(6e9)) == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("field", ["start", "finish"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_refuses_what_is_no_probability(field, value):
    with pytest.raises(ConfigError, match=rf"exploration.{field} must lie in \[0, 1\]"):
        EpsilonGreedyConfig(**{field: value})


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_refuses_a_decay_that_is_no_share(value):
    """More than 1 is one: the decay is then not over when the run is."""
    with pytest.raises(ConfigError, match="exploration.decay_fraction must be a finite number of at least 0"):
        EpsilonGreedyConfig(decay_fraction=value)
    assert EpsilonGreedyConfig(1.0, 0.0, 2.0).build(100)(jnp.asarray(100.0)) == pytest.approx(0.5)
