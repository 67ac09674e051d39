"""Whole episodes of a policy: the first episode of each evaluation environment, from start to end."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from pqn_eqx.envs.base import Environment
from pqn_eqx.errors import require, require_at_least, require_unit_interval
from pqn_eqx.losses import Loss
from pqn_eqx.networks.q_network import QNetwork
from pqn_eqx.rollout import Actors, act, initial_actors
from pqn_eqx.sharding import keys_per_env


class FirstEpisodes(eqx.Module):
    """E environments in play and what is known of the first episode of each; every leaf has a leading E."""

    actors: Actors
    finished: Bool[Array, " E"]
    episode_return: Float[Array, " E"]
    """In raw rewards; until the episode is finished, what it has collected so far."""
    episode_length: Int[Array, " E"]
    extras: Float[Array, "E X"] | None
    """None where the environment has none: loops over several devices cannot carry arrays of no elements (jaxlib
    0.11.2 crashes)."""


def begin_episodes(env: Environment, network: QNetwork, index: Int[Array, " E"], key: Key[Array, ""]) -> FirstEpisodes:
    """New episodes in the environments numbered `index`."""
    zeros = jnp.zeros(index.shape)
    return FirstEpisodes(
        actors=initial_actors(env, network, index, jax.random.fold_in(key, 0)),
        finished=jnp.zeros(index.shape, bool),
        episode_return=zeros,
        episode_length=zeros.astype(int),
        extras=jnp.zeros((*index.shape, len(env.extra_names))) if env.extra_names else None,
    )


def advance_episodes(
    env: Environment,
    network: QNetwork,
    loss: Loss,
    epsilon: float,
    episodes: FirstEpisodes,
    key: Key[Array, ""],
    start: Int[Array, ""],
    num_steps: Int[Array, ""],
) -> FirstEpisodes:
    """`num_steps` further steps, of which `start` have been taken. Environments that are through are not counted on."""

    def step(i, episodes):
        keys = keys_per_env(jax.random.fold_in(key, 1 + start + i), episodes.actors.index)
        actors, _, now = act(env, network, loss, epsilon, episodes.actors, keys)
        through = episodes.finished
        return FirstEpisodes(
            actors=actors,
            finished=through | now.done,
            episode_return=jnp.where(through, episodes.episode_return, now.episode_return),
            episode_length=jnp.where(through, episodes.episode_length, now.episode_length),
            extras=None if episodes.extras is None else jnp.where(through[:, None], episodes.extras, now.extras),
        )

    return jax.lax.fori_loop(0, num_steps, step, episodes)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """First episodes of every member, on the host: arrays [M, E] (extras [M, E, X])."""

    finished: np.ndarray
    episode_return: np.ndarray
    episode_length: np.ndarray
    extras: np.ndarray | None
    extra_names: tuple[str, ...]

    def rows(self) -> list[dict[str, float | int | None]]:
        """One summary per member. Means are over finished episodes; None where no episode finished."""
        rows: list[dict[str, float | int | None]] = []
        for member in range(self.finished.shape[0]):
            through = self.finished[member]
            row: dict[str, float | int | None] = {
                "episodes": int(through.sum()),
                "unfinished": int((~through).sum()),
                "episode_return": _mean(self.episode_return[member][through]),
                "episode_return_std": float(self.episode_return[member][through].std()) if through.any() else None,
                "episode_length": _mean(self.episode_length[member][through]),
            }
            if self.extras is not None:
                row |= {name: _mean(self.extras[member, through, i]) for i, name in enumerate(self.extra_names)}
            rows.append(row)
        return rows


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation by whole episodes, always with exact resets."""

    num_envs: int = 128
    """Evaluation environments of each member; the first episode of each counts."""
    interval: int | None = None
    """Environment steps between evaluations, rounded to whole log intervals; default: a tenth of the run."""
    max_steps: int | None = None
    """Steps after which an episode counts as unfinished; default: the environment's own time limit."""
    epsilon: float = 0.0
    """Probability of a random action: 0 is the greedy policy, 1 the uniformly random one."""

    def __post_init__(self):
        require_at_least(1, **{"eval.num_envs": self.num_envs})
        for name in ("interval", "max_steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"eval.{name} must be at least 1 where it is given, got {value}.")
        require_unit_interval(**{"eval.epsilon": self.epsilon})
