"""gymnax (>= 1.0): classic control, MinAtar, bsuite and the rest with discrete actions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pqn_eqx.config_groups import group_member
from pqn_eqx.envs.base import Environment, Simulator
from pqn_eqx.envs.params import with_params
from pqn_eqx.envs.resets import FullResetConfig, ResetConfig
from pqn_eqx.envs.vectorized import VectorizedEnvironment
from pqn_eqx.errors import ConfigError, nearest
from pqn_eqx.packages import import_or_explain


class GymnaxSimulator(Simulator):
    """One gymnax environment.

    Uniform dtypes: gymnax returns integer rewards from some environments and integer observations from others; here
    rewards are floats, and observations are floats, a discrete one (FrozenLake) as a one-hot vector.
    """

    def __init__(self, env: Any, params: Any, name: str):
        self.env, self.params, self.name = env, params, name
        actions, observations = env.action_space(params), env.observation_space(params)
        if not hasattr(actions, "n"):
            raise ConfigError(f"env.name: {name} has continuous actions; PQN needs a finite number of them.")
        if not hasattr(observations, "n") and not getattr(observations, "shape", None):
            raise ConfigError(f"env.name: the observation of {name} is neither an array nor a discrete number.")
        self.num_actions = int(actions.n)
        self.num_categories = int(observations.n) if hasattr(observations, "n") else None
        self.time_limit = int(params.max_steps_in_episode)
        # From the environment itself: the declared shape does not hold for every environment.
        state, obs = jax.eval_shape(self.reset, jax.random.key(0))
        self.state_like, self.obs_shape = state, tuple(obs.shape)

    def _obs(self, obs):
        if self.num_categories is not None:
            return jax.nn.one_hot(obs, self.num_categories)
        return obs.astype(jnp.result_type(float))

    def reset(self, key):
        obs, state = self.env.reset_env(key, self.params)
        # Python's numbers become arrays of a fixed type, so that a state looks alike after a reset and after a step.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), state), self._obs(obs)

    def step(self, key, state, action):
        obs, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        truncated = jnp.asarray(self.env.is_truncated(state, self.params), bool)
        state = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), state, self.state_like)
        reward = jnp.asarray(reward, jnp.result_type(float)).reshape(())
        return state, self._obs(obs), reward, jnp.asarray(terminated, bool), truncated, jnp.zeros(0)


@group_member("gymnax")
@dataclasses.dataclass(frozen=True)
class GymnaxConfig:
    """A gymnax environment with discrete actions."""

    name: str = "CartPole-v1"
    """Name in gymnax: CartPole-v1, Acrobot-v1, Asterix-MinAtar, MemoryChain-bsuite, ..."""
    params: dict[str, float] = dataclasses.field(default_factory=dict)
    """Environment parameters to change, as pairs: memory_length 32 max_steps_in_episode 100."""
    options: dict[str, float] = dataclasses.field(default_factory=dict)
    """Arguments of the environment's constructor, as pairs: size 16 (DeepSea-bsuite)."""
    reset: ResetConfig = FullResetConfig()
    """Which worlds follow the episodes that ended. Evaluation always uses the full rule."""

    def build(self, block_envs: int) -> Environment:
        """Environments in blocks of `block_envs`, which share new worlds among themselves.

        Raises `ConfigError` for what gymnax does not have.
        """
        return VectorizedEnvironment(self.simulator(), self.reset.build(block_envs))

    def simulator(self) -> GymnaxSimulator:
        gymnax = import_or_explain("gymnax", extra=None, field="env")
        if self.name not in gymnax.registered_envs:
            raise ConfigError(
                f"env.name: gymnax has no environment {self.name!r}. {nearest(self.name, gymnax.registered_envs)}"
                f"It has: {', '.join(gymnax.registered_envs)}."
            )
        options = {name: int(value) if float(value).is_integer() else value for name, value in self.options.items()}
        try:
            env, params = gymnax.make(self.name, **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"env.options: the constructor of {self.name} does not take {options}: {error}"
            ) from error
        except OSError as error:
            raise ConfigError(f"env.name: {self.name} needs a data set that could not be fetched: {error}") from error
        return GymnaxSimulator(env, with_params(params, self.params), self.name)
