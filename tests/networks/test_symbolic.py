"""The encoder of tiles against a dense layer with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.errors import ConfigError
from pqn_eqx.networks.layers import Linear
from pqn_eqx.networks.symbolic import LAYOUTS, TileEncoderConfig, TileLinear

KEY = jax.random.key(0)


def observation(layout, key):
    """Tiles as Craftax writes them: blocks and items one-hot, or nothing at all in darkness; mobs anywhere."""
    keys = jax.random.split(key, len(layout.groups) + 3)
    dark = jax.random.bernoulli(keys[-1], 0.3, (layout.num_tiles, 1))
    parts = [
        jnp.where(dark, 0, jax.nn.one_hot(jax.random.randint(k, (layout.num_tiles,), 0, size), size))
        for k, size in zip(keys, layout.groups, strict=False)
    ]
    parts.append(jax.random.bernoulli(keys[-2], 0.1, (layout.num_tiles, layout.num_flags)).astype(float))
    return jnp.concatenate([jnp.concatenate(parts, 1).reshape(-1), jax.random.normal(keys[-3], (layout.num_numbers,))])


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_dense_layer_and_its_gradient(name):
    """Red if a group began at the wrong place, or if darkness looked up a row."""
    layout = LAYOUTS[name]
    dense = Linear(layout.size, 16, key=KEY)
    obs = jnp.stack([observation(layout, key) for key in jax.random.split(KEY, 4)])
    assert obs.shape == (4, layout.size)

    def cost(layer, obs):
        return jnp.sum(jnp.sin(jax.vmap(layer)(obs)))

    tiles = TileLinear(dense, layout)
    np.testing.assert_allclose(jax.vmap(tiles)(obs), jax.vmap(dense)(obs), rtol=1e-4, atol=1e-5)
    expected, got = jax.grad(cost)(dense, obs), jax.grad(cost)(tiles, obs).layer
    np.testing.assert_allclose(got.weight, expected.weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.bias, expected.bias, rtol=1e-4, atol=1e-5)


def test_equals_the_dense_layer_on_real_observations(craftax_classic):
    layout = LAYOUTS["craftax-classic"]
    dense = Linear(layout.size, 16, key=KEY)
    _, obs = jax.jit(jax.vmap(craftax_classic.reset))(jax.random.split(KEY, 3))
    np.testing.assert_allclose(jax.vmap(TileLinear(dense, layout))(obs), jax.vmap(dense)(obs), rtol=1e-4, atol=1e-5)


def test_layouts_are_of_the_sizes_that_craftax_has():
    assert {name: layout.size for name, layout in LAYOUTS.items()} == {"craftax": 8268, "craftax-classic": 1345}
    assert LAYOUTS["craftax"].tile_size == 83


def test_further_layers_are_dense():
    encoder = TileEncoderConfig("craftax-classic", hidden_size=8, num_layers=2).build((1345,), key=KEY)
    assert encoder(observation(LAYOUTS["craftax-classic"], KEY)).shape == (8,)
    assert [layer.weight.shape for layer in encoder.layers if isinstance(layer, Linear)] == [(8, 8)]


def test_refuses_another_observation():
    with pytest.raises(
        ConfigError, match=r"layout craftax is for observations of 8,268 numbers, got the shape \(1345,"
    ):
        TileEncoderConfig().build((1345,), key=KEY)
    with pytest.raises(ConfigError, match="network.encoder.hidden_size must be at least 1, got 0"):
        TileEncoderConfig(hidden_size=0)
