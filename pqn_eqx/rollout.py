"""Acting in N environments, one step at a time. Training and evaluation share it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from pqn_eqx.control_flow import run_if
from pqn_eqx.envs.base import Environment, TimeStep
from pqn_eqx.exploration import epsilon_greedy
from pqn_eqx.losses import Loss
from pqn_eqx.networks.memory import MemoryState
from pqn_eqx.networks.q_network import Inputs, QNetwork
from pqn_eqx.sharding import keys_per_env


class Actors(eqx.Module):
    """N environments and what the agent keeps for each; every leaf has a leading N."""

    index: Int[Array, " N"]
    """The environment's number among all of the member's, on whatever device: its random numbers come from it."""
    env_state: Any
    inputs: Inputs
    """What the network is told next."""
    memory: MemoryState


class Transition(eqx.Module):
    """One step of experience. Where T steps are stacked, time comes before N."""

    inputs: Inputs
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
    inputs = Inputs(obs, jnp.zeros_like(index), jnp.zeros(index.shape), jnp.ones(index.shape, bool))
    return Actors(index, env_state, inputs, memory)


def q_values(
    network: QNetwork, loss: Loss, memory: MemoryState, inputs: Inputs
) -> tuple[Float[Array, "N A"], MemoryState]:
    """Action values and the next memory of N environments."""
    outputs, memory = jax.vmap(network.step)(memory, inputs)
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
    q, memory = q_values(network, loss, actors.memory, actors.inputs)
    action = jax.vmap(epsilon_greedy, in_axes=(0, 0, None))(action_keys, q, epsilon)
    env_state, step = env.step(actors.env_state, action, env_keys)
    transition = Transition(
        inputs=actors.inputs,
        action=action,
        reward=step.reward,
        terminated=step.terminated,
        truncated=step.truncated,
        valid=step.valid,
        value=jnp.max(q, axis=-1),
        final_value=_final_value(network, loss, memory, action, step),
    )
    inputs = Inputs(step.obs, action, step.reward, step.done)
    episodes = Episodes(step.done, step.episode_return, step.episode_length, step.extras)
    return Actors(actors.index, env_state, inputs, memory), transition, episodes


def _final_value(
    network: QNetwork, loss: Loss, memory: MemoryState, action: Int[Array, " N"], step: TimeStep
) -> Float[Array, " N"]:
    """max_a Q(next_obs, a) where truncated, with the memory after the step. No forward pass while nothing is."""

    def evaluate(_):
        inputs = Inputs(step.next_obs, action, step.reward, jnp.zeros_like(step.truncated))
        q, _ = q_values(network, loss, memory, inputs)
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
    remember_at: int | None = None,
) -> tuple[Actors, Transition, Episodes, MemoryState]:
    """`num_steps` ε-greedy steps in every environment; transitions and episode statistics are stacked to [T, N].

    The last of what is returned is the memory before step `remember_at`: one state, not one for each step. It is
    empty where no step is given.
    """

    def step(carry, inputs):
        actors, remembered = carry
        number, keys = inputs
        if remember_at is not None:
            remembered = jax.tree.map(
                lambda now, kept: jnp.where(number == remember_at, now, kept), actors.memory, remembered
            )
        actors, transition, episodes = act(env, network, loss, epsilon, actors, keys)
        return (actors, remembered), (transition, episodes)

    keys = jax.vmap(keys_per_env, in_axes=(0, None))(jax.random.split(key, num_steps), actors.index)
    remembered = () if remember_at is None else actors.memory
    (actors, remembered), (transitions, episodes) = jax.lax.scan(
        step, (actors, remembered), (jnp.arange(num_steps), keys)
    )
    return actors, transitions, episodes, remembered
