"""Reset rules: which new worlds follow the episodes that ended.

Building a world can cost more than a hundred steps (Craftax generates its map), and under `vmap` a conditional per
environment would build one for every environment on every step. Both rules are therefore *lazy*: a loop builds
worlds for finished environments only, a small block at a time, and scatters them into the state. While nothing
finishes the loop turns zero times, and the state of the other environments is never touched.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from pqn_eqx.config_groups import group_member
from pqn_eqx.errors import require_at_least

Worlds = Any
"""What a reset replaces, leading N: states and their first observations."""


class ResetRule(abc.ABC):
    """Replaces the worlds of finished environments. Instances hold no arrays."""

    @abc.abstractmethod
    def __call__(
        self,
        make: Callable[[Key[Array, ""]], Worlds],
        done: Bool[Array, " N"],
        worlds: Worlds,
        keys: Key[Array, " N"],
    ) -> Worlds:
        """`worlds` with new ones where `done`; `make` builds one from a key, and environment i owns `keys[i]`."""


def replace_selected(
    source: Callable[[Int[Array, " B"]], Worlds],
    selected: Bool[Array, " N"],
    worlds: Worlds,
    block_size: int | None,
) -> Worlds:
    """`worlds` with those of `selected` environments replaced by `source(indices)`, `block_size` at a time.

    The loop turns ceil(selected / block_size) times. A last, incomplete block is filled up with index N: `source`
    reads it as the last environment, and the scatter drops it. By default a block is one environment in 128 (at
    least one), about as many as end an episode of Craftax on one step: larger blocks build worlds that nobody needs.
    """
    num_envs = selected.shape[0]
    block_size = min(block_size or max(1, num_envs // 128), num_envs)
    num_blocks = -(-num_envs // block_size)
    indices = jnp.nonzero(selected, size=num_blocks * block_size, fill_value=num_envs)[0]
    count = jnp.sum(selected)

    def replace_block(carry):
        start, worlds = carry
        block = jax.lax.dynamic_slice(indices, (start,), (block_size,))
        new = source(block)
        return start + block_size, jax.tree.map(lambda old, new: old.at[block].set(new, mode="drop"), worlds, new)

    return jax.lax.while_loop(lambda carry: carry[0] < count, replace_block, (jnp.zeros_like(count), worlds))[1]


@dataclasses.dataclass(frozen=True)
class FullReset(ResetRule):
    """Every finished environment gets a world of its own, made from its own key."""

    block_size: int | None = None

    def __call__(self, make, done, worlds, keys):
        return replace_selected(lambda block: jax.vmap(make)(keys[block]), done, worlds, self.block_size)


_DRAW = 0x0DEA15ED
"""Sets the draws of the optimistic rule apart from the worlds, which are made from the same key. Any small number
would not: `fold_in(key, i)` is `split(key, n)[i]`, so a draw would be one of the numbers that a world is made of, and
which world wins would depend on what is in it."""


@dataclasses.dataclass(frozen=True)
class OptimisticReset(ResetRule):
    """At most group_size / ratio new worlds in each group of environments on one step.

    Environments are dealt with in groups of `group_size` neighbours that know nothing of each other, so that a group
    fares the same whatever stands beside it. Of a group's finished environments as many as may, chosen at random,
    get a new world each, the very one the full rule would have given them. Each of the others gets a copy of one of
    these, drawn uniformly. (purejaxql's wrapper, whose rule this makes exact, draws the winners with probabilities
    that are undefined when few are done, and builds its worlds on every step.)
    """

    group_size: int
    ratio: int
    block_size: int | None = None

    def __call__(self, make, done, worlds, keys):
        num_worlds = max(1, self.group_size // self.ratio)
        grouped = done.reshape(-1, self.group_size)
        draws = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, _DRAW)))(keys)
        priority = jax.vmap(jax.random.uniform)(draws[:, 0]).reshape(grouped.shape)
        # Finished environments first, in random order; `rank` is each environment's place in that order.
        order = jnp.argsort(jnp.where(grouped, priority, jnp.inf), axis=1)
        rank = jnp.argsort(order, axis=1)
        fresh = (grouped & (rank < num_worlds)).reshape(-1)
        shared = done & ~fresh
        # Where something is shared, all num_worlds places of the group are taken: any of them may be drawn.
        drawn = jax.vmap(lambda key: jax.random.randint(key, (), 0, num_worlds))(draws[:, 1]).reshape(grouped.shape)
        first_of_group = jnp.arange(grouped.shape[0])[:, None] * self.group_size
        donor = (first_of_group + jnp.take_along_axis(order, drawn, axis=1)).reshape(-1)

        worlds = FullReset(self.block_size)(make, fresh, worlds, keys)

        def copy(block):
            return jax.tree.map(lambda leaf: leaf[donor[block]], worlds)

        return replace_selected(copy, shared, worlds, self.block_size)


@group_member("full")
@dataclasses.dataclass(frozen=True)
class FullResetConfig:
    """Exact: a new world for every finished environment."""

    block_size: int | None = None
    """Worlds built at once when episodes end; default: one environment in 128. Changes speed alone."""

    def __post_init__(self):
        if self.block_size is not None:
            require_at_least(1, **{"env.reset.block_size": self.block_size})

    def build(self, block_envs: int) -> FullReset:
        return FullReset(self.block_size)


@group_member("optimistic")
@dataclasses.dataclass(frozen=True)
class OptimisticResetConfig:
    """Approximate: at most one new world for every `ratio` environments of a block (num_env_blocks) on one step, at
    least one; further finished environments of the block share them."""

    ratio: int = 16
    """Environments for each world that may be built on one step."""
    block_size: int | None = None
    """Worlds built at once when episodes end; default: one environment in 128. Changes speed alone."""

    def __post_init__(self):
        require_at_least(1, **{"env.reset.ratio": self.ratio})
        if self.block_size is not None:
            require_at_least(1, **{"env.reset.block_size": self.block_size})

    def build(self, block_envs: int) -> OptimisticReset:
        return OptimisticReset(block_envs, self.ratio, self.block_size)


ResetConfig = FullResetConfig | OptimisticResetConfig
