"""The network against a plain numpy forward pass, its sizes, and how it starts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.errors import ConfigError
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.linear import Linear
from pqn_eqx.networks.q_network import QNetworkConfig


@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_forward_pass(norm, num_outputs):
    """Red if a layer, a normalisation or a ReLU stands in the wrong place, or if A and K are mixed up."""
    config = QNetworkConfig(MLPConfig(hidden_size=8, num_layers=2, normalization=norm))
    network = config.build((2, 3), num_actions=4, num_outputs=num_outputs, key=jax.random.key(0))
    obs = jax.random.normal(jax.random.key(1), (2, 3))
    outputs, memory = network.step(network.initial_memory(), obs, jnp.asarray(False))

    x = np.asarray(obs).reshape(-1)
    for layer in network.encoder.layers:
        x = x @ np.asarray(layer.weight) + np.asarray(layer.bias)
        if norm == "layer":
            x = (x - x.mean()) / np.sqrt(x.var() + 1e-6)
        elif norm == "rms":
            x = x / np.sqrt((x**2).mean() + 1e-6)
        x = np.maximum(x, 0)
    x = x @ np.asarray(network.head.layer.weight) + np.asarray(network.head.layer.bias)
    assert memory == ()
    assert outputs.shape == (4, num_outputs)
    np.testing.assert_allclose(outputs, x.reshape(4, num_outputs), rtol=1e-5, atol=1e-5)


def test_linear_layers_start_as_flax_dense_does():
    """LeCun normal: variance 1 / fan-in, truncated at two standard deviations of the untruncated normal; biases 0."""
    layer = Linear(400, 300, key=jax.random.key(0))
    weight = np.asarray(layer.weight)
    assert weight.std() == pytest.approx(1 / np.sqrt(400), rel=0.01)
    assert np.abs(weight).max() <= 2 / np.sqrt(400) / 0.8796 + 1e-6
    np.testing.assert_array_equal(layer.bias, 0)


def test_layers_start_from_different_keys():
    network = QNetworkConfig(MLPConfig(hidden_size=8, num_layers=3)).build((8,), 8, 1, key=jax.random.key(0))
    weights = [np.asarray(layer.weight) for layer in (*network.encoder.layers, network.head.layer)]
    assert all(not np.array_equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_integer_observations_are_taken():
    network = QNetworkConfig(MLPConfig(hidden_size=8)).build((3,), 2, 1, key=jax.random.key(0))
    integers, _ = network.step((), jnp.asarray([1, 2, 3], jnp.uint8), jnp.asarray(False))
    floats, _ = network.step((), jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray(False))
    np.testing.assert_array_equal(integers, floats)


@pytest.mark.parametrize("sizes", [{"hidden_size": 0}, {"num_layers": 0}])
def test_refuses_empty_networks(sizes):
    with pytest.raises(ConfigError, match=r"network.encoder.\w+ must be at least 1, got 0"):
        MLPConfig(**sizes)
