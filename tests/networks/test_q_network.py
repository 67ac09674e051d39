"""The network against a plain numpy forward pass, its sizes, and how it starts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.errors import ConfigError
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.layers import Linear
from pqn_eqx.networks.q_network import QNetworkConfig
from tests.toys import inputs


def linear_layers(encoder):
    return [layer for layer in encoder.layers if isinstance(layer, Linear)]


@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_forward_pass(norm, num_outputs):
    """Red if a layer, a normalisation or a ReLU stands in the wrong place, or if A and K are mixed up."""
    config = QNetworkConfig(MLPConfig(hidden_size=8, num_layers=2, normalization=norm))
    network = config.build((2, 3), num_actions=4, num_outputs=num_outputs, key=jax.random.key(0))
    obs = jax.random.normal(jax.random.key(1), (2, 3))
    outputs, memory = network.step(network.initial_memory(), inputs(obs))

    x = np.asarray(obs).reshape(-1)
    for layer in linear_layers(network.encoder):
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
    weights = [np.asarray(layer.weight) for layer in (*linear_layers(network.encoder), network.head.layer)]
    assert all(not np.array_equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_bytes_are_brightness_and_binary_planes_are_not():
    """Red if uint8 pixels went in undivided, or if 0/1 planes were divided by 255 (copied from an Atari network)."""
    network = QNetworkConfig(MLPConfig(hidden_size=8)).build((3,), 2, 1, key=jax.random.key(0))

    def q(obs):
        return network.step((), inputs(obs))[0]

    np.testing.assert_allclose(q(jnp.asarray([51, 102, 255], jnp.uint8)), q(jnp.asarray([0.2, 0.4, 1.0])), rtol=1e-6)
    for dtype in (bool, jnp.int32):
        np.testing.assert_array_equal(q(jnp.asarray([1, 0, 1], dtype)), q(jnp.asarray([1.0, 0.0, 1.0])))


@pytest.mark.parametrize("sizes", [{"hidden_size": 0}, {"num_layers": 0}])
def test_refuses_empty_networks(sizes):
    with pytest.raises(ConfigError, match=r"network.encoder.\w+ must be at least 1, got 0"):
        MLPConfig(**sizes)
