"""Control flow that stays lazy when it is vmapped, and a `vmap` that knows the mean over its batch."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

T = TypeVar("T")


def run_if(condition: Bool[Array, ""], function: Callable[[T], T], operand: T) -> T:
    """`function(operand)` where `condition` holds, else `operand`.

    Unlike `jax.lax.cond`, which `vmap` turns into a select that always runs both branches, this loop of zero or one
    turns does no work while the condition is false in the whole batch.
    """

    def turn(carry):
        _, operand = carry
        return jnp.zeros_like(condition), function(operand)

    return jax.lax.while_loop(lambda carry: carry[0], turn, (condition, operand))[1]


def map_with_mean(
    function: Callable[..., Any], mean: Callable[[Array], Array], in_axes: Any = 0, out_axes: Any = 0
) -> Callable[..., Any]:
    """A `vmap` of `function(mean_of_batch, *args)`, which is given how to average over the mapped axis.

    `mean` goes on from there, over what the caller maps or over devices, so that calls can be nested.
    """
    axis = object()  # a name that no other call has

    def mean_of_batch(x):
        return mean(jax.lax.pmean(x, axis))

    return jax.vmap(lambda *args: function(mean_of_batch, *args), in_axes, out_axes, axis_name=axis)
