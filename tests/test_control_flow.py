"""`run_if`: the values of a conditional, and no work while nothing asks for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.control_flow import run_if


def test_value_of_one_condition():
    """Red if the branches are swapped, the function runs more than once, or leaves of the operand are mixed up."""

    def function(operand):
        return {"a": operand["a"] * 2 + 1, "b": ~operand["b"]}

    operand = {"a": jnp.arange(3.0), "b": jnp.array([True, False])}
    true = jax.jit(lambda c: run_if(c, function, operand))(jnp.array(True))
    false = jax.jit(lambda c: run_if(c, function, operand))(jnp.array(False))
    assert true["a"].tolist() == [1.0, 3.0, 5.0]
    assert true["b"].tolist() == [False, True]
    assert false["a"].tolist() == [0.0, 1.0, 2.0]
    assert false["b"].tolist() == [True, False]


@pytest.mark.parametrize("conditions", [[True, False, True, False], [False] * 4, [True] * 4])
def test_each_member_of_a_batch_follows_its_own_condition(conditions):
    """Red if one member's condition decides for another's operand, or a true member runs twice."""
    batch = jax.jit(jax.vmap(lambda c, x: run_if(c, lambda x: x * 10 + 1, x)))
    out = batch(jnp.array(conditions), jnp.arange(4))
    assert out.tolist() == [x * 10 + 1 if c else x for x, c in enumerate(conditions)]


def test_shared_condition_and_batched_operand():
    """Red if a condition that is not batched breaks the batching of the operand."""
    batch = jax.vmap(lambda c, x: run_if(c, lambda x: x + 5, x), in_axes=(None, 0))
    assert batch(jnp.array(True), jnp.arange(3)).tolist() == [5, 6, 7]
    assert batch(jnp.array(False), jnp.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("batched", [False, True])
def test_function_does_not_run_while_no_condition_holds(batched):
    """Red if the loop becomes `lax.cond` or `jnp.where`, which under `vmap` always run the function."""
    runs = []

    def function(x):
        jax.debug.callback(lambda _: runs.append(1), x)
        return x + 1

    def program(c, x):
        return run_if(c, function, x)

    if batched:
        program = jax.vmap(program)
        none, some, x = jnp.zeros(3, bool), jnp.array([False, True, False]), jnp.arange(3.0)
    else:
        none, some, x = jnp.array(False), jnp.array(True), jnp.array(0.0)
    program = jax.jit(program)

    np.testing.assert_array_equal(program(none, x), x)
    jax.effects_barrier()
    assert len(runs) == 0
    np.testing.assert_array_equal(program(some, x), x + some)
    jax.effects_barrier()
    assert len(runs) > 0
