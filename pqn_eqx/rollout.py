"""Acting in N environments, one step at a time. Training and evaluation share it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from pqn_eqx.control_flow import run_if
from pqn_eqx.envs.base import Environment, TimeStep
from pqn_eqx.exploration import epsilon_greedy
from pqn_eqx.losses import Loss
from pqn_eqx.networks.q_network import QNetwork
from pqn_eqx.sharding import keys_per_env


class Actors(eqx.Module):
    """N environments and what the agent keeps for each; every leaf has a leading N."""

    index: Int[Array, " N"]
    """The environment's number among all of the member's, on whatever device: its random numbers come from it."""
    env_state: Any
    obs: Shaped[Array, "N ..."]
    reset: Bool[Array, " N"]
    """Whether `obs` is the first of an episode, so that the memory is emptied before it is read."""
    memory: Any


class Transition(eqx.Module):
    """One step of experience. Where T steps are stacked, time comes before N."""

    obs: Shaped[Array, "..."]
    action: Int[Array, "*T N"]
    reward: Float[Array, "*T N"]
    terminated: Bool[Array, "*T N"]
    truncated: Bool[Array, "*T N"]
    valid: Bool[Array, "*T N"]
    value: Float[Array, "*T N"]
    """max_a Q(obs, a): known from acting, and the successor value of the step before."""
    final_value: Float[Array, "*T N"]
    """max_a Q(next_obs, a) where truncated, else 0."""


class Episodes(eqx.Module):
    """The statistics of the episodes, read where `done`. Where T steps are stacked, time comes before N."""

    done: Bool[Array, "*T N"]
    episode_return: Float[Array, "*T N"]
    episode_length: Int[Array, "*T N"]
    extras: Float[Array, "*T N E"]


def initial_actors(env: Environment, network: QNetwork, index: Int[Array, " N"], key: Key[Array, ""]) -> Actors:
    """Actors at the start of an episode in each of the environments numbered `index`."""
    env_state, obs = env.reset(keys_per_env(key, index))
    memory = jax.vmap(lambda _: network.initial_memory())(index)
    return Actors(index, env_state, obs, jnp.ones(index.shape, bool), memory)


def q_values(network: QNetwork, loss: Loss, memory: Any, obs: Shaped[Array, "N ..."], reset: Bool[Array, " N"]):
    """Action values [N, A] and the next memory of N environments."""
    outputs, memory = jax.vmap(network.step)(memory, obs, reset)
    return loss.value(outputs), memory


def act(
    env: Environment,
    network: QNetwork,
    loss: Loss,
    epsilon: Float[Array, ""] | float,
    actors: Actors,
    keys: Key[Array, " N"],
) -> tuple[Actors, Transition, Episodes]:
    """One ε-greedy step in every environment, each with a key of its own."""
    action_keys, env_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
    q, memory = q_values(network, loss, actors.memory, actors.obs, actors.reset)
    action = jax.vmap(epsilon_greedy, in_axes=(0, 0, None))(action_keys, q, epsilon)
    env_state, step = env.step(actors.env_state, action, env_keys)
    transition = Transition(
        obs=actors.obs,
        action=action,
        reward=step.reward,
        terminated=step.terminated,
        truncated=step.truncated,
        valid=step.valid,
        value=jnp.max(q, axis=-1),
        final_value=_final_value(network, loss, memory, step),
    )
    episodes = Episodes(step.done, step.episode_return, step.episode_length, step.extras)
    return Actors(actors.index, env_state, step.obs, step.done, memory), transition, episodes


def _final_value(network: QNetwork, loss: Loss, memory: Any, step: TimeStep) -> Float[Array, " N"]:
    """max_a Q(next_obs, a) where truncated, with the memory after the step. No forward pass while nothing is."""

    def evaluate(_):
        q, _ = q_values(network, loss, memory, step.next_obs, jnp.zeros_like(step.truncated))
        return jnp.where(step.truncated, jnp.max(q, axis=-1), 0)

    return run_if(jnp.any(step.truncated), evaluate, jnp.zeros_like(step.reward))


def rollout(
    env: Environment,
    network: QNetwork,
    loss: Loss,
    epsilon: Float[Array, ""] | float,
    actors: Actors,
    key: Key[Array, ""],
    num_steps: int,
) -> tuple[Actors, Transition, Episodes]:
    """`num_steps` ε-greedy steps in every environment; transitions and episode statistics are stacked to [T, N]."""

    def step(actors, keys):
        actors, transition, episodes = act(env, network, loss, epsilon, actors, keys)
        return actors, (transition, episodes)

    keys = jax.vmap(keys_per_env, in_axes=(0, None))(jax.random.split(key, num_steps), actors.index)
    actors, (transitions, episodes) = jax.lax.scan(step, actors, keys)
    return actors, transitions, episodes
