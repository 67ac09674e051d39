"""Means that can be added: what an update reports, over any number of updates and devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pqn_eqx.rollout import Episodes
from pqn_eqx.sharding import sum_over_envs


class Metrics(eqx.Module):
    """Named sums and what they are sums over, so that the mean of a longer interval is exact.

    A mean over episodes weighs every finished episode alike, whichever update or device it ended in; where none
    ended the count is 0 and the mean is not a number.
    """

    total: dict[str, Float[Array, ""]]
    count: dict[str, Float[Array, ""]]

    @classmethod
    def of(cls, **values: tuple[Float[Array, ""], Float[Array, ""] | float]) -> "Metrics":
        """From name = (sum, number of terms)."""
        return cls(
            {name: jnp.asarray(total, float) for name, (total, _) in values.items()},
            {name: jnp.asarray(count, float) for name, (_, count) in values.items()},
        )

    @classmethod
    def zeros(cls, names: tuple[str, ...], shape: tuple[int, ...] = ()) -> "Metrics":
        """Nothing counted yet, under each of `names`."""
        # No buffer may stand twice in what a compiled program is given to keep.
        return cls({name: jnp.zeros(shape) for name in names}, {name: jnp.zeros(shape) for name in names})

    def __add__(self, other: "Metrics") -> "Metrics":
        return jax.tree.map(jnp.add, self, other)

    def weighed(self, weight: float) -> "Metrics":
        """Sums and counts times `weight`, which changes no mean by itself."""
        return jax.tree.map(lambda leaf: leaf * weight, self)

    def join(self, other: "Metrics") -> "Metrics":
        """The metrics of both, whose names differ."""
        return Metrics(self.total | other.total, self.count | other.count)

    def mean(self) -> dict[str, np.ndarray]:
        """The mean of every name, on the host; NaN where nothing was counted.

        Divides on the host on purpose: a division on the device would queue behind the chunk that runs there.
        """
        total, count = jax.device_get((self.total, self.count))
        with np.errstate(invalid="ignore", divide="ignore"):
            return {name: np.asarray(total[name] / count[name]) for name in total}

    def over_devices(self) -> "Metrics":
        """The metrics of a member from those of the devices that hold its environments."""
        return sum_over_envs(self)


def episode_metrics(episodes: Episodes, extra_names: tuple[str, ...]) -> Metrics:
    """The mean return, length and extras of the episodes that ended in a rollout."""
    ended = jnp.sum(episodes.done)
    values = {
        "episode_return": (jnp.sum(episodes.episode_return, where=episodes.done), ended),
        "episode_length": (jnp.sum(episodes.episode_length, where=episodes.done), ended),
    }
    extras = jnp.sum(episodes.extras, axis=(0, 1), where=episodes.done[..., None])
    values |= {name: (extras[i], ended) for i, name in enumerate(extra_names)}
    return Metrics.of(**values)
