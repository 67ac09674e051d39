"""Control flow that stays lazy when it is vmapped."""

from collections.abc import Callable
from typing import TypeVar

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
