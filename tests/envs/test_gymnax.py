"""The adapter of gymnax: every environment it admits, and what it refuses."""

import functools
import sys
import urllib.error

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.envs.gymnax import GymnaxConfig
from pqn_eqx.envs.resets import FullReset, OptimisticReset, OptimisticResetConfig
from pqn_eqx.errors import ConfigError

# Programs that run for milliseconds: half the time to compile them matters more than their speed.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

# name: (actions, shape of an observation, time limit)
ENVIRONMENTS = {
    "CartPole-v1": (2, (4,), 500),
    "Acrobot-v1": (3, (6,), 500),
    "MountainCar-v0": (3, (2,), 200),
    "Asterix-MinAtar": (5, (10, 10, 4), 1000),
    "Breakout-MinAtar": (3, (10, 10, 4), 1000),
    "Freeway-MinAtar": (3, (10, 10, 7), 2500),
    "Seaquest-MinAtar": (6, (10, 10, 10), 1000),
    "SpaceInvaders-MinAtar": (4, (10, 10, 6), 1000),
    "Catch-bsuite": (3, (10, 5), 1000),
    "DeepSea-bsuite": (2, (8, 8), 8),
    "MemoryChain-bsuite": (2, (3,), 1000),
    "UmbrellaChain-bsuite": (2, (3,), 100),
    "DiscountingChain-bsuite": (5, (2,), 100),
    "SimpleBandit-bsuite": (11, (1, 1), 100),
    "FourRooms-misc": (4, (4,), 500),
    "MetaMaze-misc": (4, (15,), 200),
    "BernoulliBandit-misc": (2, (4,), 100),
    "GaussianBandit-misc": (2, (4,), 100),
    "Pong-misc": (3, (30, 40, 3), 1000),
    "FrozenLake-misc": (4, (16,), 100),
}
CONTINUOUS = ["Pendulum-v1", "MountainCarContinuous-v0", "PointRobot-misc", "Reacher-misc", "Swimmer-misc"]


def episode(simulator, actions, seed=0):
    """One world under `actions` without resets: first observation, and what each step returned, stacked."""
    key = jax.random.key(seed)

    def run(actions):
        state, first = simulator.reset(key)

        def step(state, t):
            state, *results = simulator.step(jax.random.fold_in(key, 100 + t), state, actions[t])
            return state, (state, *results)

        return first, jax.lax.scan(step, state, jnp.arange(len(actions)))[1]

    return jit(run)(jnp.asarray(actions))


def test_every_environment_of_gymnax_is_accounted_for():
    """Red if gymnax gains or loses an environment that the table of this file does not know."""
    assert {*ENVIRONMENTS, *CONTINUOUS, "MNISTBandit-bsuite"} == set(gymnax.registered_envs)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_three_steps_of_three_environments(name):
    """Red if a shape differs from the declared one, integers leak into rewards or observations, a step changes the
    types of the state so that it cannot be scanned, or numbers are not finite."""
    simulator = GymnaxConfig(name=name).simulator()
    assert (simulator.name, simulator.num_actions, simulator.obs_shape) == (name, *ENVIRONMENTS[name][:2])
    assert simulator.time_limit == ENVIRONMENTS[name][2]

    def step(state, x):
        state, *results = jax.vmap(simulator.step)(x[0], state, x[1])
        return state, results

    def run(key):
        keys = jax.random.split(key, (4, 3))
        state, first = jax.vmap(simulator.reset)(keys[0])
        actions = jax.random.randint(key, (3, 3), 0, simulator.num_actions)
        return first, *jax.lax.scan(step, state, (keys[1:], actions))[1]

    first, obs, reward, terminated, truncated, extras = jit(run)(jax.random.key(0))
    assert (first.shape, first.dtype) == ((3, *simulator.obs_shape), jnp.float32)
    assert (obs.shape, obs.dtype) == ((3, 3, *simulator.obs_shape), jnp.float32)
    assert (reward.shape, reward.dtype) == ((3, 3), jnp.float32)
    assert (terminated.shape, terminated.dtype) == ((3, 3), bool)
    assert (truncated.shape, truncated.dtype) == ((3, 3), bool)
    assert extras.shape == (3, 3, 0)
    assert all(np.isfinite(numbers).all() for numbers in (first, obs, reward))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_state_keeps_its_types(name):
    """Red if the state after a step differs in type from a new one, so that a reset would cast what it writes."""
    env = GymnaxConfig(name=name).build(3)
    keys = jax.random.split(jax.random.key(0), 3)
    before, obs = jax.eval_shape(env.reset, keys)
    after, step = jax.eval_shape(env.step, before, jnp.zeros(3, int), keys)

    def types(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    assert jax.tree.leaves(types(after)) == jax.tree.leaves(types(before))
    assert types(step.obs) == types(step.next_obs) == types(obs)


def test_cartpole_is_gymnaxs_own():
    """Red if observation, reward and end are taken from another step, or the automatic reset of gymnax takes part:
    the pole, always pushed to the right, falls within 12 steps and lies on."""
    key, env, params = jax.random.key(0), *gymnax.make("CartPole-v1")
    actions = [1] * 12
    first, (_, obs, reward, terminated, truncated, _) = episode(GymnaxConfig(name="CartPole-v1").simulator(), actions)
    expected, state = env.reset_env(key, params)
    np.testing.assert_allclose(first, expected, rtol=1e-6)
    step = jit(lambda key, state: env.step_env(key, state, jnp.array(1), params))
    for t in range(len(actions)):
        expected, state, expected_reward, expected_end, _ = step(jax.random.fold_in(key, 100 + t), state)
        np.testing.assert_allclose(obs[t], expected, rtol=1e-5, atol=1e-6)
        assert (float(reward[t]), bool(terminated[t])) == (float(expected_reward), bool(expected_end))
    assert 8 <= int(jnp.argmax(terminated)) < 12
    assert not truncated.any()


def test_time_limit_truncates():
    """Red if gymnax's limit is reported as termination, one step off, or the parameter is not used."""
    simulator = GymnaxConfig(name="CartPole-v1", params={"max_steps_in_episode": 5}).simulator()
    assert simulator.time_limit == 5
    _, (_, _, _, terminated, truncated, _) = episode(simulator, [0, 1, 0, 1, 0])
    assert terminated.tolist() == [False] * 5
    assert truncated.tolist() == [False] * 4 + [True]


def test_deep_sea_ends_for_both_reasons_at_once_and_has_the_size_of_its_options():
    """Red if one flag hides the other where an episode always has the length of its time limit, or `options` do not
    reach the constructor as integers."""
    simulator = GymnaxConfig(name="DeepSea-bsuite", options={"size": 4.0}).simulator()
    assert (simulator.obs_shape, simulator.time_limit) == ((4, 4), 4)
    first, (_, obs, _, terminated, truncated, _) = episode(simulator, [0, 0, 0, 0])
    assert terminated.tolist() == [False, False, False, True]
    assert truncated.tolist() == [False, False, False, True]
    assert first.argmax() == 0
    assert obs.sum(axis=(1, 2)).tolist() == [1, 1, 1, 0]


def test_discrete_observation_is_one_hot():
    """Red if FrozenLake shows the number of its cell instead of a vector, or the vector of another cell."""
    first, (state, obs, *_) = episode(GymnaxConfig(name="FrozenLake-misc").simulator(), [2, 1, 2, 1])
    assert first.tolist() == [1.0] + [0.0] * 15
    assert obs.tolist() == np.eye(16)[np.asarray(state.position)].tolist()
    assert obs.argmax(axis=1).max() > 0


@pytest.mark.parametrize(("params", "length"), [({}, 6), ({"memory_length": 2.0}, 3)])
def test_params_change_the_environment(params, length):
    """Red if `memory_length` is dropped or stays a fraction: the episode ends the step after the question."""
    _, (_, _, _, terminated, truncated, _) = episode(
        GymnaxConfig(name="MemoryChain-bsuite", params=params).simulator(), [0] * 6
    )
    assert int(jnp.argmax(terminated)) + 1 == length
    assert terminated.sum() == 1
    assert not truncated.any()


def test_reset_rule_gets_the_number_of_environments():
    """Red if the config's rule is ignored, or its groups are not all of a member's environments."""
    assert GymnaxConfig(name="Catch-bsuite").build(8).reset_rule == FullReset()
    env = GymnaxConfig(name="Catch-bsuite", reset=OptimisticResetConfig(ratio=4)).build(8)
    assert env.reset_rule == OptimisticReset(8, 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "Cartpole-v0"}, "no environment 'Cartpole-v0'. Did you mean CartPole-v1?.*FrozenLake-misc"),
        ({"name": ""}, "no environment ''. It has: CartPole-v1, "),
        ({"params": {"max_steps": 5}}, r"no parameter 'max_steps'. Did you mean max_steps_in_episode\?"),
        ({"params": {"max_steps_in_episode": 5.5}}, "max_steps_in_episode is of type int, got 5.5"),
        ({"options": {"size": 4}}, "env.options: the constructor of CartPole-v1 does not take {'size': 4}"),
    ],
)
def test_what_gymnax_does_not_have_is_refused(config, message):
    """Red if a slip in the configuration ends in a traceback, or is dropped silently."""
    with pytest.raises(ConfigError, match=message):
        GymnaxConfig(**config).build(1)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_actions_are_refused(name):
    """Red if an environment without a finite number of actions fails inside JAX instead."""
    with pytest.raises(ConfigError, match=f"{name} has continuous actions"):
        GymnaxConfig(name=name).build(1)


def test_data_set_that_cannot_be_fetched_is_explained(monkeypatch):
    """Red if a machine without network gets a traceback from MNISTBandit."""
    from gymnax.utils import load_mnist

    def no_network():
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(load_mnist, "load_mnist", no_network)
    with pytest.raises(ConfigError, match=r"MNISTBandit-bsuite needs a data set that could not be fetched.*no network"):
        GymnaxConfig(name="MNISTBandit-bsuite").build(1)


def test_missing_gymnax_is_explained(monkeypatch):
    """Red if an installation without gymnax ends in a bare ImportError."""
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(ConfigError, match="the package gymnax is not installed"):
        GymnaxConfig().build(1)
