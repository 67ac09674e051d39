"""Normalisations against equinox's, and the hand-written gradient against JAX's and finite differences."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pqn_eqx.networks.normalization import (
    EPSILON,
    RunningMoments,
    input_normalization,
    normalization,
    split_statistics,
    standardize,
)

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


def test_layer_norm_of_an_image_is_over_the_channels_of_each_pixel():
    image = jax.random.normal(jax.random.key(3), (4, 5, 16))
    got = normalization("layer", 16)(image)
    np.testing.assert_allclose(got[1, 2], normalization("layer", 16)(image[1, 2]), rtol=1e-5, atol=1e-5)


def batches(norm, xs):
    """`norm` after learning from the batches `xs` in turn, and the outputs for the last one."""
    for x in xs:
        outputs, norm = jax.vmap(
            lambda x, norm=norm: norm.learn(x, lambda y: jax.lax.pmean(y, "batch")),
            axis_name="batch",
            out_axes=(0, None),
        )(x)
    return outputs, norm


def test_batch_renorm_is_batch_norm_while_it_warms_up():
    """Zero mean and unit variance over the batch; the running moments move by a thousandth of the way."""
    outputs, norm = batches(normalization("batch-renorm", 16), [X])
    np.testing.assert_allclose(outputs.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(outputs.std(0), X.std(0) / np.sqrt(X.var(0) + 1e-3), rtol=1e-4)
    np.testing.assert_allclose(norm.running.mean, 0.001 * X.mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(norm.running.variance, 0.999 + 0.001 * X.var(0), rtol=1e-5)
    assert norm.running.batches == 1


@pytest.mark.parametrize("shift", [0.5, 100.0])
def test_batch_renorm_after_warm_up(shift):
    """Where r and d are not clipped, learning gives what acting gives; where they are, the formula with r = 3, d = 5.

    Red if the warm-up ended elsewhere than at 1000 batches, or if r and d were swapped or unclipped.
    """
    norm = normalization("batch-renorm", 16)
    moments = RunningMoments(X.mean(0) - shift, X.var(0) * (1.2 if shift < 1 else 0.01), jnp.asarray(1000.0))
    norm = eqx.tree_at(lambda n: n.running, norm, moments)
    outputs, _ = batches(norm, [X])
    if shift < 1:
        np.testing.assert_allclose(outputs, norm(X), rtol=1e-4, atol=1e-4)
    else:
        np.testing.assert_allclose(outputs, (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-3) * 3 + 5, rtol=1e-3, atol=1e-3)
    still_warming = eqx.tree_at(lambda n: n.running.batches, norm, jnp.asarray(999.0))
    np.testing.assert_allclose(batches(still_warming, [X])[0].mean(0), 0, atol=1e-5)


def test_batch_renorm_acts_by_the_running_moments():
    norm = normalization("batch-renorm", 16)
    norm = eqx.tree_at(lambda n: n.running, norm, RunningMoments(X.mean(0), X.var(0), jnp.zeros(())))
    np.testing.assert_allclose(norm(X), (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-3), rtol=1e-4, atol=1e-5)


def test_batch_renorm_of_images_counts_every_pixel():
    images = jax.random.normal(jax.random.key(5), (3, 4, 5, 16)) * 2 + 1
    outputs, norm = batches(normalization("batch-renorm", 16), [images])
    np.testing.assert_allclose(outputs.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(norm.running.mean, 0.001 * images.mean((0, 1, 2)), rtol=1e-4, atol=1e-7)


def test_batch_renorm_gradient_flows_through_the_moments_but_not_the_running_ones():
    """Against plain batch normalisation written out. Red if the batch moments were held constant."""
    weight = jax.random.normal(jax.random.key(6), X.shape)

    def ours(x):
        return jnp.sum(weight * batches(normalization("batch-renorm", 16), [x])[0])

    def plain(x):
        return jnp.sum(weight * (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3))

    np.testing.assert_allclose(jax.grad(ours)(X), jax.grad(plain)(X), rtol=1e-3, atol=1e-4)


def test_running_norm_has_the_moments_of_all_it_saw():
    """Merging batches of several sizes equals the moments of their union. Red if batches were weighed alike."""
    parts = [jax.random.normal(jax.random.key(i), (n, 3)) * (i + 1) + i for i, n in enumerate((5, 50, 7))]
    norm = input_normalization("running", (3,))
    np.testing.assert_array_equal(norm(parts[0][0]), parts[0][0])
    for part in parts:
        norm = norm.observe(part, lambda tree: tree, len(part))
    together = np.concatenate(parts)
    np.testing.assert_allclose(norm.mean, together.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.variance, together.var(0), rtol=1e-5)
    assert norm.count == 62
    np.testing.assert_allclose(jax.vmap(norm)(together).std(0), 1, rtol=1e-4)


def test_running_norm_does_not_blow_up_what_hardly_moves():
    norm = input_normalization("running", (1,)).observe(jnp.full((4, 1), 2.0), lambda tree: tree, 4)
    np.testing.assert_allclose(norm(jnp.asarray([2.5])), [50.0], rtol=1e-5)


def test_statistics_are_told_from_what_is_learned():
    """Red if a gradient step could move running moments, or if a learned scale were taken for a statistic."""
    layers = {"norm": normalization("batch-renorm", 4), "input": input_normalization("running", (2,))}
    learned, measured = split_statistics(layers)
    assert [leaf.shape for leaf in jax.tree.leaves(learned)] == [(4,), (4,)]
    assert len(jax.tree.leaves(measured)) == 6
    assert jax.tree.structure(eqx.combine(learned, measured)) == jax.tree.structure(layers)
