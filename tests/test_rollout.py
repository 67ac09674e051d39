"""Acting in a corridor whose every number is known, and the targets that come out of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.envs.resets import FullReset
from pqn_eqx.envs.vectorized import VectorizedEnvironment
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.losses import MSEConfig
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.q_network import QNetworkConfig
from pqn_eqx.optimizers import RAdamConfig
from pqn_eqx.pqn import PQNConfig
from pqn_eqx.returns import successor_values
from pqn_eqx.rollout import initial_actors, rollout
from tests.toys import Corridor, inputs

NUM_CELLS = 8
VALUES = jnp.asarray([[10.0, 11, 12, 13, 14, 15, 16, 17], [0.0, 0, 0, 0, 0, 0, 0, 0]])
"""Q(cell, action): action 0 is always the better one, and the value of cell c is 10 + c."""


class Table(eqx.Module):
    """A network that reads its values from a table, and counts its steps within the episode as memory."""

    values: jax.Array

    def initial_memory(self):
        return jnp.zeros((), int)

    def step(self, memory, inputs):
        memory = jnp.where(inputs.reset, 0, memory) + 1
        return (self.values @ inputs.obs)[:, None], memory


def roll(terminal, time_limit, num_steps=6, num_envs=3, epsilon=0.0):
    env = VectorizedEnvironment(Corridor(terminal, time_limit, NUM_CELLS), FullReset())
    network, loss = Table(VALUES), MSEConfig().build()
    actors = initial_actors(env, network, jnp.arange(num_envs), jax.random.key(0))
    return rollout(env, network, loss, epsilon, actors, jax.random.key(1), num_steps)[:3]


def targets(transitions, last_value, gamma, td_lambda):
    """PQN's targets of a window."""
    env = VectorizedEnvironment(Corridor(), FullReset())
    config = PQNConfig(gamma=gamma, td_lambda=td_lambda, reward_scale=1.0)
    algorithm = config.build(env, QNetworkConfig(), MSEConfig(), RAdamConfig(), EpsilonGreedyConfig(), 10_000)
    return algorithm.targets(transitions, last_value)


@pytest.mark.parametrize("td_lambda", [0.0, 0.5, 1.0])
def test_truncation_bootstraps_from_the_final_observation(td_lambda):
    """A time limit after 4 steps: the successor of step 3 is cell 4 (value 14), not cell 0 of the next episode (10)."""
    actors, transitions, episodes = roll(terminal=99, time_limit=4)
    np.testing.assert_array_equal(transitions.truncated[:, 0], [0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(transitions.value[:, 0], [10, 11, 12, 13, 10, 11])
    np.testing.assert_array_equal(transitions.final_value[:, 0], [0, 0, 0, 14, 0, 0])
    last_value = jnp.full(3, 12.0)
    next_value = successor_values(transitions.value, last_value, transitions.final_value, transitions.truncated)
    np.testing.assert_array_equal(next_value[:, 0], [11, 12, 13, 14, 11, 12])

    got = targets(transitions, last_value, gamma=0.5, td_lambda=td_lambda)[:, 0]
    expected = np.zeros(6)
    expected[3], expected[5] = 0.5 * 14, 0.5 * 12  # all rewards are 0; the chain is cut at both
    for t in (2, 1, 0, 4):
        expected[t] = 0.5 * ((1 - td_lambda) * (11 + t % 4) + td_lambda * expected[t + 1])
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_array_equal(episodes.episode_length[3], 4)


def test_termination_does_not_bootstrap():
    """Red if the end of the corridor, reached at the time limit too, were given the value of cell 4."""
    _, transitions, _ = roll(terminal=4, time_limit=4)
    np.testing.assert_array_equal(transitions.terminated[:, 0], [0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(transitions.truncated[:, 0], [0, 0, 0, 1, 0, 0])
    got = targets(transitions, jnp.full(3, 12.0), gamma=0.5, td_lambda=1.0)[:, 0]
    np.testing.assert_allclose(got, [0, 0, 0, 0, 3, 6])


def test_the_memory_is_emptied_by_the_end_that_precedes_an_observation():
    """Red if the end that follows an observation emptied the memory: the count of steps would be one off."""
    actors, transitions, _ = roll(terminal=4, time_limit=100, num_steps=6)
    # Two steps into the second episode; the memory counts them, and the next observation is no first one.
    np.testing.assert_array_equal(actors.memory, 2)
    np.testing.assert_array_equal(actors.inputs.reset, False)
    actors, *_ = roll(terminal=4, time_limit=100, num_steps=4)
    np.testing.assert_array_equal(actors.memory, 4)
    np.testing.assert_array_equal(actors.inputs.reset, True)


def test_transitions_hold_what_was_seen_and_done():
    _, transitions, episodes = roll(terminal=4, time_limit=100, epsilon=1.0)
    np.testing.assert_array_equal(jnp.argmax(transitions.inputs.obs, -1)[:, 0], [0, 1, 2, 3, 0, 1])
    np.testing.assert_array_equal(transitions.reward, transitions.action)
    np.testing.assert_array_equal(episodes.episode_return[3], transitions.reward[:4].sum(0))
    np.testing.assert_array_equal(episodes.extras[:, 0, 0], [1, 2, 3, 4, 1, 2])


def test_random_numbers_belong_to_the_environment_not_to_its_place():
    """Red if keys were dealt by position: then splitting the environments over devices would change the run."""
    env = VectorizedEnvironment(Corridor(), FullReset())
    network, loss = Table(VALUES), MSEConfig().build()

    def actions(index):
        actors = initial_actors(env, network, index, jax.random.key(0))
        _, transitions, _, _ = rollout(env, network, loss, 1.0, actors, jax.random.key(1), 20)
        return actors.env_state.world["tag"], transitions.action

    tags, whole = actions(jnp.arange(6))
    half_tags, half = actions(jnp.arange(3, 6))
    np.testing.assert_array_equal(tags[3:], half_tags)
    np.testing.assert_array_equal(whole[:, 3:], half)
    assert len({tuple(column) for column in np.asarray(whole).T.tolist()}) == 6


@pytest.mark.parametrize("step", [0, 1, 3])
def test_remembers_the_memory_before_a_step(step):
    """Red if the state after the step, or of another one, were kept. Episodes of 4 steps; the memory counts them."""
    env = VectorizedEnvironment(Corridor(terminal=4), FullReset())
    network, loss = Table(VALUES), MSEConfig().build()
    actors = initial_actors(env, network, jnp.arange(3), jax.random.key(0))
    actors, *_ = rollout(env, network, loss, 0.0, actors, jax.random.key(1), 2)
    *_, remembered = rollout(env, network, loss, 0.0, actors, jax.random.key(1), 4, remember_at=step)
    np.testing.assert_array_equal(remembered, [2, 3, 4, 1][step])


def test_the_network_is_told_what_it_did_last():
    """Red if action or reward were off by a step: in a corridor the reward is the action."""
    actors, transitions, _ = roll(terminal=4, time_limit=100, epsilon=1.0)
    told = transitions.inputs
    np.testing.assert_array_equal(told.last_action[1:], transitions.action[:-1])
    np.testing.assert_array_equal(told.last_reward[1:], transitions.reward[:-1])
    np.testing.assert_array_equal(told.reset[:, 0], [1, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(actors.inputs.last_action, transitions.action[-1])


def test_a_real_network_acts_by_its_values():
    """Red if acting and learning read the network differently: greedy actions are the argmax of a forward pass."""
    env = VectorizedEnvironment(Corridor(), FullReset())
    network = QNetworkConfig(MLPConfig(hidden_size=8)).build(env.obs_shape, 2, 1, key=jax.random.key(3))
    actors = initial_actors(env, network, jnp.arange(2), jax.random.key(0))
    _, transitions, _, _ = rollout(env, network, MSEConfig().build(), 0.0, actors, jax.random.key(1), 4)
    q = jax.vmap(jax.vmap(lambda obs: network.step((), inputs(obs))[0][:, 0]))(transitions.inputs.obs)
    np.testing.assert_array_equal(transitions.action, jnp.argmax(q, -1))
    np.testing.assert_allclose(transitions.value, jnp.max(q, -1), rtol=1e-5)
