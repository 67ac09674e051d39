"""Whole episodes, the first of each environment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.envs.resets import FullReset
from pqn_eqx.envs.vectorized import VectorizedEnvironment
from pqn_eqx.episodes import Evaluation, EvaluationConfig, advance_episodes, begin_episodes
from pqn_eqx.errors import ConfigError
from pqn_eqx.losses import MSEConfig
from tests.test_rollout import VALUES, Table
from tests.toys import Corridor

NETWORK = Table(-VALUES)
"""Prefers action 1, which pays 1."""


def play(num_steps, chunks=1, terminal=4, epsilon=0.0, num_envs=5):
    env = VectorizedEnvironment(Corridor(terminal, 100), FullReset())
    loss, key = MSEConfig().build(), jax.random.key(0)
    episodes = begin_episodes(env, NETWORK, jnp.arange(num_envs), key)
    advance = jax.jit(lambda e, start, n: advance_episodes(env, NETWORK, loss, epsilon, e, key, start, n))
    for chunk in range(chunks):
        episodes = advance(episodes, chunk * num_steps, num_steps)
    return episodes


def test_the_first_episode_counts_and_later_ones_do_not():
    """Red if a second episode, or the steps after the end, were added."""
    episodes = play(num_steps=11)
    np.testing.assert_array_equal(episodes.episode_return, 4)
    np.testing.assert_array_equal(episodes.episode_length, 4)
    np.testing.assert_array_equal(episodes.extras[:, 0], 4)
    np.testing.assert_array_equal(episodes.finished, True)


def test_the_greedy_policy_is_greedy_and_epsilon_1_is_random():
    np.testing.assert_array_equal(play(num_steps=4).episode_return, 4)
    random = np.asarray(play(num_steps=7, terminal=7, epsilon=1.0, num_envs=400).episode_return)
    assert random.mean() == pytest.approx(3.5, abs=0.3)


def test_how_it_is_cut_into_chunks_changes_nothing():
    """Red if keys started anew in every chunk, which would also repeat the same random numbers."""
    whole, cut = play(6, 1, terminal=7, epsilon=0.5), play(2, 3, terminal=7, epsilon=0.5)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        np.testing.assert_array_equal(a, b)


def test_unfinished_episodes_are_counted_and_left_out():
    """Red if a running episode's return, or a zero for it, entered the mean."""
    evaluation = Evaluation(
        finished=np.array([[True, False, True], [False, False, False]]),
        episode_return=np.array([[1.0, 100.0, 3.0], [7.0, 7.0, 7.0]]),
        episode_length=np.array([[10, 999, 20], [5, 5, 5]]),
        extras=np.array([[[1.0], [1.0], [0.0]], [[1.0], [1.0], [1.0]]]),
        extra_names=("achievement/x",),
    )
    first, second = evaluation.rows()
    assert first == {
        "episodes": 2,
        "unfinished": 1,
        "episode_return": 2.0,
        "episode_return_std": 1.0,
        "episode_length": 15.0,
        "achievement/x": 0.5,
    }
    assert second["episodes"] == 0
    assert second["unfinished"] == 3
    assert second["episode_return"] is None
    assert second["achievement/x"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_envs": 0}, "eval.num_envs must be at least 1"),
        ({"interval": 0}, "eval.interval must be at least 1"),
        ({"max_steps": -5}, "eval.max_steps must be at least 1"),
        ({"epsilon": 2.0}, r"eval.epsilon must lie in \[0, 1\]"),
    ],
)
def test_refuses_what_cannot_work(fields, message):
    with pytest.raises(ConfigError, match=message):
        EvaluationConfig(**fields)
