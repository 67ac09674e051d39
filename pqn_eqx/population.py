"""Populations: many members of one algorithm in one program."""

from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

Algorithm = TypeVar("Algorithm", bound=eqx.Module)


def stack_members(members: list[Algorithm]) -> Algorithm:
    """One object whose array leaves lead with the members; their structure must be the same."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
