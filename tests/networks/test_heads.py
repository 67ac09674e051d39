"""Heads by hand, and the identity of the dueling one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.networks.heads import DuelingHeadConfig, LinearHeadConfig

FEATURES = jax.random.normal(jax.random.key(1), (6,))


@pytest.mark.parametrize("num_outputs", [1, 5])
def test_dueling_is_value_plus_centred_advantage_for_each_output(num_outputs):
    """Q = V + A - mean_a A. Red if the mean were over the outputs, or over both axes."""
    head = DuelingHeadConfig().build(6, 4, num_outputs, key=jax.random.key(0))
    head = eqx.tree_at(lambda h: h.value.bias, head, jnp.arange(1.0, num_outputs + 1))
    value = FEATURES @ head.value.weight + head.value.bias
    advantage = (FEATURES @ head.advantage.weight).reshape(4, num_outputs)
    got = head(FEATURES)
    np.testing.assert_allclose(got, value + advantage - advantage.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.mean(0), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [LinearHeadConfig, DuelingHeadConfig])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_normalization_stands_before_the_layers(config, norm):
    """Scaling the features changes nothing behind a normalisation, and does without one."""
    plain = config().build(6, 4, 2, key=jax.random.key(0))
    normalized = config(norm).build(6, 4, 2, key=jax.random.key(0))
    np.testing.assert_allclose(normalized(3 * FEATURES), normalized(FEATURES), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(plain(3 * FEATURES), 3 * plain(FEATURES), rtol=1e-5, atol=1e-6)
    expected = FEATURES - FEATURES.mean() if norm == "layer" else FEATURES
    np.testing.assert_allclose(normalized(FEATURES), plain(expected / jnp.sqrt(jnp.mean(expected**2))), rtol=1e-3)
