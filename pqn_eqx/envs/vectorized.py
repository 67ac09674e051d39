"""Many copies of a simulator as one environment: stepping, resets and episode statistics."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int, Key

from pqn_eqx.envs.base import Environment, Simulator, TimeStep
from pqn_eqx.envs.resets import ResetRule


class VectorizedState(eqx.Module):
    """The worlds, and the statistics of the episodes they are in."""

    world: Any
    episode_return: Float[Array, " N"]
    episode_length: Int[Array, " N"]


class VectorizedEnvironment(Environment):
    """N copies of a `Simulator`, with a reset rule.

    `step` is batched by folding: under a `vmap` over M members it runs once on M·N environments. A plain `vmap`
    would turn the lazy loops of the reset rules into loops that gather and select the whole state of every member,
    and simulators outside JAX have no batching at all.
    """

    def __init__(self, simulator: Simulator, reset_rule: ResetRule):
        self.simulator = simulator
        self.reset_rule = reset_rule
        self.name = simulator.name
        self.num_actions = simulator.num_actions
        self.obs_shape = simulator.obs_shape
        self.time_limit = simulator.time_limit
        self.extra_names = simulator.extra_names
        self._foldable_step = fold_members(self._step)

    def reset(self, keys):
        world, obs = jax.vmap(self.simulator.reset)(keys)
        num_envs = keys.shape[0]
        return VectorizedState(world, jnp.zeros(num_envs), jnp.zeros(num_envs, int)), obs

    def step(self, state, action, keys):
        return self._foldable_step(state, action, keys)

    def _step(
        self, state: VectorizedState, action: Int[Array, " N"], keys: Key[Array, " N"]
    ) -> tuple[VectorizedState, TimeStep]:
        step_keys, reset_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
        world, next_obs, reward, terminated, truncated, extras = jax.vmap(self.simulator.step)(
            step_keys, state.world, action
        )
        done = terminated | truncated
        episode_return, episode_length = state.episode_return + reward, state.episode_length + 1
        world, obs = self.reset_rule(self.simulator.reset, done, (world, next_obs), reset_keys)
        step = TimeStep(
            obs=obs,
            next_obs=next_obs,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            valid=jnp.ones_like(done),
            episode_return=episode_return,
            episode_length=episode_length,
            extras=extras,
        )
        return VectorizedState(world, jnp.where(done, 0, episode_return), jnp.where(done, 0, episode_length)), step


def fold_members(function):
    """`function` of trees with a leading N, such that `vmap` folds its axis M into N: one call on M·N, split after.

    The function must treat the N rows alike, or in groups that divide N.
    """
    foldable = custom_vmap(function)

    @foldable.def_vmap
    def rule(num_members, in_batched, *args):
        def fold(batched, leaf):
            leaf = leaf if batched else jnp.broadcast_to(leaf, (num_members, *leaf.shape))
            return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])

        out = foldable(*jax.tree.map(fold, tuple(in_batched), args))
        out = jax.tree.map(lambda leaf: leaf.reshape(num_members, leaf.shape[0] // num_members, *leaf.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return foldable
