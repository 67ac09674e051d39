"""Behaviour policies and schedules."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from pqn_eqx.errors import require, require_unit_interval


class LinearSchedule(eqx.Module):
    """A value that moves linearly from `start` to `finish` over `duration` and stays there. All three are leaves."""

    start: Float[Array, ""]
    finish: Float[Array, ""]
    duration: Float[Array, ""]

    def __init__(self, start: float, finish: float, duration: float):
        self.start, self.finish, self.duration = jnp.asarray(start), jnp.asarray(finish), jnp.asarray(float(duration))

    def __call__(self, time: Float[Array, ""]) -> Float[Array, ""]:
        """The value at `time`, in the unit of `duration`. A duration of 0 gives `finish` from the start."""
        share = jnp.where(self.duration > 0, time / jnp.maximum(self.duration, 1e-9), 1.0)
        return self.start + jnp.clip(share, 0, 1) * (self.finish - self.start)


def epsilon_greedy(key: Key[Array, ""], q: Float[Array, " A"], epsilon: Float[Array, ""] | float) -> Int[Array, ""]:
    """A uniformly random action with probability ε, else the action of highest value (the first of equals)."""
    explore_key, action_key = jax.random.split(key)
    random_action = jax.random.randint(action_key, (), 0, q.shape[-1])
    return jnp.where(jax.random.uniform(explore_key) < epsilon, random_action, jnp.argmax(q)).astype(
        random_action.dtype
    )


@dataclasses.dataclass(frozen=True)
class EpsilonGreedyConfig:
    """ε-greedy behaviour with ε falling linearly in environment steps."""

    start: float = 1.0
    """Probability of a random action at the first step."""
    finish: float = 0.2
    """Probability of a random action once the decay is over."""
    decay_fraction: float = 0.2
    """Share of total_timesteps over which the probability falls from start to finish: 0 starts at finish, more than 1
    does not get there."""

    def __post_init__(self):
        require_unit_interval(**{f"exploration.{name}": getattr(self, name) for name in ("start", "finish")})
        require(
            0 <= self.decay_fraction < float("inf"),
            f"exploration.decay_fraction must be a finite number of at least 0, got {self.decay_fraction}.",
        )

    def build(self, total_timesteps: int) -> LinearSchedule:
        """ε as a function of the environment steps taken."""
        return LinearSchedule(self.start, self.finish, self.decay_fraction * total_timesteps)
