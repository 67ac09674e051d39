"""What an environment is.

A `Simulator` is one world that never resets itself: what an adapter of an environment library in JAX provides. An
`Environment` is N worlds side by side with their resets: what acting sees. Batching belongs to it, because resets,
and simulators that live outside JAX, are batched by nature.
"""

import abc
from typing import Any

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

State = Any
"""The state of a world (or of N worlds, with a leading N on every leaf): a pytree of arrays."""


class TimeStep(eqx.Module):
    """What N environments return for one action each.

    `obs` is what the agent sees next: where an episode ended, the first observation of the new one. `next_obs` is the
    true successor, before any reset. `episode_return` and `episode_length` run from the start of the episode up to
    and including this step, in raw rewards; where `done` they are those of the whole episode.
    """

    obs: Shaped[Array, "N ..."]
    next_obs: Shaped[Array, "N ..."]
    reward: Float[Array, " N"]
    terminated: Bool[Array, " N"]
    """The episode ended for good: nothing of value follows."""
    truncated: Bool[Array, " N"]
    """A time limit cut the episode: the value of `next_obs` follows. Both flags may be set; termination wins."""
    valid: Bool[Array, " N"]
    """False where the simulator ignored the action, so that the transition is no experience."""
    episode_return: Float[Array, " N"]
    episode_length: Int[Array, " N"]
    extras: Float[Array, "N E"]
    """Further numbers about the episode, named by `Environment.extra_names`; read where `done` (achievements)."""

    @property
    def done(self) -> Bool[Array, " N"]:
        """Whether an episode ended with this step, for either reason."""
        return self.terminated | self.truncated


class Simulator(abc.ABC):
    """One world without automatic resets. Instances hold no arrays: they are constants of a compiled program."""

    name: str
    num_actions: int
    obs_shape: tuple[int, ...]
    time_limit: int
    """Steps after which an episode is truncated."""
    extra_names: tuple[str, ...] = ()

    @abc.abstractmethod
    def reset(self, key: Key[Array, ""]) -> tuple[State, Shaped[Array, "..."]]:
        """A new world and its first observation."""

    @abc.abstractmethod
    def step(
        self, key: Key[Array, ""], state: State, action: Int[Array, ""]
    ) -> tuple[State, Shaped[Array, "..."], Float[Array, ""], Bool[Array, ""], Bool[Array, ""], Float[Array, " E"]]:
        """State, observation, reward, terminated, truncated and extras after `action`, with no reset of any kind."""


class Environment(abc.ABC):
    """N environments side by side. Instances hold no arrays; N is the length of what they are given.

    `step` has a batching rule of its own: a `vmap` over members folds them into N (see `envs.vectorized`).
    """

    name: str
    num_actions: int
    obs_shape: tuple[int, ...]
    time_limit: int
    extra_names: tuple[str, ...]

    @abc.abstractmethod
    def reset(self, keys: Key[Array, " N"]) -> tuple[State, Shaped[Array, "N ..."]]:
        """N new episodes and their first observations, one key each."""

    @abc.abstractmethod
    def step(self, state: State, action: Int[Array, " N"], keys: Key[Array, " N"]) -> tuple[State, TimeStep]:
        """One step in each; episodes that end are followed by new ones, by the environment's reset rule."""
