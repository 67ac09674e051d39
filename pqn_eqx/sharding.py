"""Where members and environments live: the one file that names mesh axes.

Every program runs under `shard_map` on a mesh with the axes `member` and `env`, also on one device. A training state
has two parts: the *learner* (network, optimiser, keys), split over members and replicated over environments, and the
*actors*, whose leaves lead with members and environments and are split over both.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, PyTree

MEMBER, ENV = "member", "env"

REPLICATED = PartitionSpec()
PER_MEMBER = PartitionSpec(MEMBER)
PER_ENV = PartitionSpec(ENV)
PER_MEMBER_AND_ENV = PartitionSpec(MEMBER, ENV)


class TrainState(eqx.Module):
    """The whole state of a run: every algorithm fills it with modules of its own."""

    learner: Any
    actors: Any


STATE_SPEC = TrainState(learner=PER_MEMBER, actors=PER_MEMBER_AND_ENV)


def make_mesh(devices: list[jax.Device], num_member_shards: int = 1) -> Mesh:
    """A mesh of `devices` with `num_member_shards` along members and the rest along environments."""
    return Mesh(np.asarray(devices).reshape(num_member_shards, -1), (MEMBER, ENV))


def distribute(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`function` on every device's share of the data.

    Varying-axes checking is off on purpose. With it on, JAX sums the gradient of replicated parameters over `env` by
    itself, one all-reduce per use, and the mean taken in `mean_over_envs` would come on top of a sum. With it off,
    gradients are local until that one reduction.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def mean_over_envs(tree: PyTree) -> PyTree:
    """The mean over the devices that hold a member's environments: the one reduction of gradients."""
    return jax.lax.pmean(tree, ENV)


def sum_over_envs(tree: PyTree) -> PyTree:
    """The sum over the devices that hold a member's environments: the one reduction of metrics."""
    return jax.lax.psum(tree, ENV)


def place(tree: PyTree, mesh: Mesh, spec: PartitionSpec) -> PyTree:
    """Host arrays laid out over the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, spec))


def keys_per_env(key: Key[Array, ""], index: Int[Array, " N"]) -> Key[Array, " N"]:
    """One key for each environment, from its global index: the same on whatever device it lives."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.asarray(index))
