"""Populations: many members of one algorithm in one program."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

Algorithm = TypeVar("Algorithm", bound=eqx.Module)


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a population: what sets it apart from the others."""

    number: int
    """Its place in the whole population, whatever group it is trained in."""
    seed: int
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Swept options and their values here, by name: `learning_rate`, `loss.delta`."""

    def row(self) -> dict[str, Any]:
        """As a row of a table."""
        return {"member": self.number, "seed": self.seed, **self.values}


def stack_members(members: list[Algorithm]) -> Algorithm:
    """One object whose array leaves lead with the members; their structure must be the same."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)


def map_members(function: Callable[..., Any], *trees: Any) -> Any:
    """`function` of every member of `trees`, whose leaves lead with the members: a `vmap`.

    A single member is unpacked instead. The numbers are the same, but XLA keeps a batch axis of length 1 in every
    matrix product, which makes learning with small networks half as fast on CPU.
    """
    if jax.tree.leaves(trees)[0].shape[0] > 1:
        return eqx.filter_vmap(function)(*trees)
    result = function(*jax.tree.map(lambda leaf: leaf[0], trees))
    return jax.tree.map(lambda leaf: leaf[None], result)
