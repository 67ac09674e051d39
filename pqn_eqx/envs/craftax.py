"""Craftax and Craftax-Classic (arXiv 2402.16801), from the classes without automatic reset."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pqn_eqx.config_groups import group_member
from pqn_eqx.envs.base import Environment, Simulator
from pqn_eqx.envs.params import with_params
from pqn_eqx.envs.resets import OptimisticResetConfig, ResetConfig
from pqn_eqx.envs.vectorized import VectorizedEnvironment
from pqn_eqx.packages import import_or_explain

CraftaxName = Literal[
    "Craftax-Symbolic-v1", "Craftax-Pixels-v1", "Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1"
]


class CraftaxSimulator(Simulator):
    """One Craftax world. Its extras are the achievements, 1 where unlocked in the current episode."""

    def __init__(self, env: Any, params: Any, achievements: Any, name: str):
        self.env, self.params, self.name = env, params, name
        self.num_actions = int(env.num_actions)
        self.time_limit = int(params.max_timesteps)
        self.extra_names = tuple(f"achievement/{a.name.lower()}" for a in sorted(achievements, key=lambda a: a.value))
        self.obs_shape = tuple(jax.eval_shape(self.reset, jax.random.key(0))[1].shape)

    def reset(self, key):
        obs, state = self.env.reset_env(key, self.params)
        return state, obs.astype(jnp.result_type(float))

    def step(self, key, state, action):
        obs, state, reward, _, _ = self.env.step_env(key, state, action, self.params)
        # Craftax tells one `done`. At time 0 its time limit cannot be the reason, so what remains is the game's end.
        terminated = self.env.is_terminal(state.replace(timestep=jnp.zeros_like(state.timestep)), self.params)
        truncated = (state.timestep >= self.params.max_timesteps) & ~terminated
        dtype = jnp.result_type(float)
        return state, obs.astype(dtype), reward.astype(dtype), terminated, truncated, state.achievements.astype(dtype)


@group_member("craftax")
@dataclasses.dataclass(frozen=True)
class CraftaxConfig:
    """Craftax or Craftax-Classic."""

    name: CraftaxName = "Craftax-Symbolic-v1"
    """Which of the games, and what is observed of it: a vector of symbols, or pixels."""
    params: dict[str, float] = dataclasses.field(default_factory=dict)
    """Environment parameters to change, as pairs: max_timesteps 1000 god_mode 1."""
    reset: ResetConfig = OptimisticResetConfig()
    """Which worlds follow the episodes that ended. Evaluation always uses the full rule."""

    def build(self, block_envs: int) -> Environment:
        """Environments in blocks of `block_envs`, which share new worlds among themselves.

        Raises `ConfigError` where Craftax is missing.
        """
        return VectorizedEnvironment(self.simulator(), self.reset.build(block_envs))

    def simulator(self) -> CraftaxSimulator:
        craftax_env = import_or_explain("craftax.craftax_env", extra="craftax", field="env")
        if "Classic" in self.name:
            constants = import_or_explain("craftax.craftax_classic.constants", extra="craftax", field="env")
        else:
            constants = import_or_explain("craftax.craftax.constants", extra="craftax", field="env")
        env = craftax_env.make_craftax_env_from_name(self.name, auto_reset=False)
        return CraftaxSimulator(env, with_params(env.default_params, self.params), constants.Achievement, self.name)
