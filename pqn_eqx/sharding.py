"""Where members and environments live: the one file that names mesh axes.

Every program runs under `shard_map` on a mesh with the axes `member` and `env`, also on one device. A training state
has two parts: the *learner* (network, optimiser, keys), split over members and replicated over environments, and the
*actors*, whose leaves lead with members and environments and are split over both.

The number of devices changes nothing but speed. Random numbers of an environment come from its global index, and
whatever mixes environments (shuffling, the dealing of optimistic resets) stays within *blocks* of neighbours, whose
number is part of the configuration. Devices hold whole blocks.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, PyTree

from pqn_eqx.errors import require, require_at_least

MEMBER, ENV = "member", "env"

REPLICATED = PartitionSpec()
PER_MEMBER = PartitionSpec(MEMBER)
PER_ENV = PartitionSpec(ENV)
PER_MEMBER_AND_ENV = PartitionSpec(MEMBER, ENV)
PER_DEVICE = PartitionSpec((MEMBER, ENV))


class TrainState(eqx.Module):
    """The whole state of a run: every algorithm fills it with modules of its own."""

    learner: Any
    actors: Any


STATE_SPEC = TrainState(learner=PER_MEMBER, actors=PER_MEMBER_AND_ENV)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are laid out: members of the population x shares of each member's environments."""

    member: int | None = None
    """Devices along members; must divide their number. Default: what uses the most devices, members first."""
    env: int | None = None
    """Devices along environments; must divide num_env_blocks and eval.num_envs. Default: as many as fit."""

    def __post_init__(self):
        for name in ("member", "env"):
            if (size := getattr(self, name)) is not None:
                require_at_least(1, **{f"mesh.{name}": size})

    def shape(self, num_members: int, num_env_blocks: int, num_eval_envs: int, num_devices: int) -> tuple[int, int]:
        """(devices along members, devices along environments). Raises `ConfigError` where an explicit one cannot be."""
        shared = math.gcd(num_env_blocks, num_eval_envs)
        if self.member is not None:
            require(
                num_members % self.member == 0,
                f"mesh.member must divide the number of members: {self.member} does not divide {num_members}. "
                f"Possible: {_divisors(num_members, num_devices)}.",
            )
        if self.env is not None:
            require(
                shared % self.env == 0,
                f"mesh.env must divide num_env_blocks and eval.num_envs: {self.env} does not divide {num_env_blocks} "
                f"and {num_eval_envs}. Possible: {_divisors(shared, num_devices)}; or change --num-env-blocks.",
            )
        shapes = [
            (member, env)
            for member in _divisors(num_members, num_devices)
            for env in _divisors(shared, num_devices // member)
            if self.member in (None, member) and self.env in (None, env)
        ]
        require(
            bool(shapes),
            f"mesh needs {self.member or 1} x {self.env or 1} devices (member x env), and there are {num_devices}. "
            f"On CPUs, XLA_FLAGS=--xla_force_host_platform_device_count=N emulates N.",
        )
        return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))

    def build(self, num_members: int, num_env_blocks: int, num_eval_envs: int) -> Mesh:
        """The mesh over all devices of all processes, or over the first of them where not all can be used."""
        devices = jax.devices()
        shape = self.shape(num_members, num_env_blocks, num_eval_envs, len(devices))
        require(
            jax.process_count() == 1 or math.prod(shape) == len(devices),
            f"mesh: with several processes all devices must be used: {shape[0]} x {shape[1]} (member x env) of "
            f"{len(devices)}. Members: {num_members}; num_env_blocks {num_env_blocks} and eval.num_envs "
            f"{num_eval_envs} must be divisible by the devices along environments.",
        )
        return make_mesh(devices[: math.prod(shape)], shape[0])


def _divisors(number: int, largest: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]


def make_mesh(devices: list[jax.Device], num_member_shards: int = 1) -> Mesh:
    """A mesh of `devices` with `num_member_shards` along members and the rest along environments."""
    return Mesh(np.asarray(devices).reshape(num_member_shards, -1), (MEMBER, ENV), axis_types=(AxisType.Auto,) * 2)


def describe(mesh: Mesh) -> str:
    """The mesh in words."""
    sizes = mesh.shape
    unused = len(jax.devices()) - mesh.size
    words = f"{mesh.size} {mesh.devices.flat[0].platform} device{'s' * (mesh.size > 1)}"
    if mesh.size > 1:
        words += f": {sizes[MEMBER]} along members x {sizes[ENV]} along environments"
    return words + (f" ({unused} not used)" if unused else "")


def distribute(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`function` on every device's share of the data.

    Varying-axes checking is off on purpose. With it on, JAX sums the gradient of replicated parameters over `env` by
    itself, one all-reduce per use, and the mean taken in `mean_over_envs` would come on top of a sum. With it off,
    gradients are local until that one reduction.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def mean_over_envs(tree: PyTree) -> PyTree:
    """The mean over the devices that hold a member's environments: the one reduction of gradients."""
    return jax.lax.pmean(tree, ENV) if _shared() else tree


def sum_over_envs(tree: PyTree) -> PyTree:
    """The sum over the devices that hold a member's environments: the one reduction of metrics."""
    return jax.lax.psum(tree, ENV) if _shared() else tree


def share_of_envs() -> float:
    """What this device holds of a member's environments."""
    return 1 / jax.lax.axis_size(ENV)


def _shared() -> bool:
    """Whether a member's environments lie on several devices. XLA would keep a reduction over one."""
    return jax.lax.axis_size(ENV) > 1


def blocks_here(num_blocks: int) -> Int[Array, " B"]:
    """The numbers of the blocks of environments that this device holds, of a member's `num_blocks`."""
    count = num_blocks // jax.lax.axis_size(ENV)
    return jax.lax.axis_index(ENV) * count + jnp.arange(count)


def place(tree: PyTree, mesh: Mesh, spec: PartitionSpec) -> PyTree:
    """Host arrays laid out over the mesh; every process gives all of them and keeps what its devices hold."""
    sharding = NamedSharding(mesh, spec)

    def place_one(leaf):
        array = np.asarray(jnp.asarray(leaf))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place_one, tree)


def place_own(value: np.ndarray, mesh: Mesh) -> Array:
    """An array [devices, ...] whose row for each device is `value` as the process of that device gives it."""
    shape = (mesh.size, *value.shape)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, PER_DEVICE), lambda _: value[None])


def everywhere(mesh: Mesh) -> Callable[[Any], Any]:
    """A program that copies arrays to every device, so that every process can read them; a lone process can already.

    (It would not be free: on several emulated devices a call waits for its inputs, and so for the chunk under way.)
    """
    if jax.process_count() == 1:
        return lambda tree: tree
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, REPLICATED))


def abstract(tree: PyTree, mesh: Mesh, spec: PyTree) -> PyTree:
    """Shapes for arrays, laid out by `spec` (a prefix of `tree`): enough to compile a program without its data."""

    def with_sharding(spec, subtree):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), subtree)

    return jax.tree.map(with_sharding, spec, tree, is_leaf=lambda node: isinstance(node, PartitionSpec))


def keys_per_env(key: Key[Array, ""], index: Int[Array, " N"]) -> Key[Array, " N"]:
    """One key for each environment, from its global index: the same on whatever device it lives."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.asarray(index))
