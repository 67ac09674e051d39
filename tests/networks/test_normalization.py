"""Normalisations against equinox's, and the hand-written gradient against JAX's and finite differences."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pqn_eqx.networks.normalization import EPSILON, normalization, standardize

X = jax.random.normal(jax.random.key(0), (5, 16)) * 3 + 1


@pytest.mark.parametrize(("name", "reference"), [("layer", eqx.nn.LayerNorm), ("rms", eqx.nn.RMSNorm)])
def test_values_and_gradients_equal_equinox(name, reference):
    """Red for a wrong variance, an ε in the wrong place, or an error in the written-out gradient."""
    ours = normalization(name, 16)
    theirs = reference(16, eps=EPSILON, **({"use_bias": False} if name == "rms" else {}))
    weight = jax.random.normal(jax.random.key(1), (16,))
    bias = jax.random.normal(jax.random.key(2), (16,))
    for leaf in ("weight", "bias") if name == "layer" else ("weight",):
        value = {"weight": weight, "bias": bias}[leaf]
        ours, theirs = (eqx.tree_at(lambda m, leaf=leaf: getattr(m, leaf), m, value) for m in (ours, theirs))

    def cost(module, x):
        return jnp.sum(jnp.sin(jax.vmap(module)(x)))

    np.testing.assert_allclose(jax.vmap(ours)(X), jax.vmap(theirs)(X), rtol=2e-5, atol=2e-5)
    for argument in (0, 1):
        got, expected = (jax.grad(cost, argnums=argument)(m, X) for m in (ours, theirs))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_standardize_gradient_by_finite_differences():
    check_grads(standardize, (X[0],), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


def test_no_normalization_is_the_identity():
    np.testing.assert_array_equal(normalization("none", 16)(X[0]), X[0])


def test_a_constant_input_is_finite():
    """Red without ε: a dead layer would turn the whole network into NaN."""
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(standardize(x)))(jnp.ones(8))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
