"""The encoder of tiles against a dense layer with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.envs.craftax import CraftaxConfig
from pqn_eqx.errors import ConfigError
from pqn_eqx.networks.encoders import MLPConfig
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


def drawn_states(simulator, num_blocks, num_states):
    """States of Craftax that no game need reach: any block, item, light and mob anywhere about the player."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        shape = (num_states, *leaf.shape)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(KEY, shape)
        # Light of 0.05 is what divides darkness from day.
        numbers = rng.uniform(0, 0.1 if jnp.issubdtype(leaf.dtype, jnp.floating) else 5, shape)
        return rng.random(shape) < 0.9 if leaf.dtype == bool else numbers.astype(leaf.dtype)

    states = jax.tree.map(draw, jax.eval_shape(simulator.reset, KEY)[0])
    return states.replace(map=rng.integers(0, num_blocks, states.map.shape).astype(states.map.dtype))


@pytest.mark.parametrize(("name", "num_blocks"), [("craftax", 37), ("craftax-classic", 17)])
def test_equals_the_dense_layer_on_whatever_craftax_renders(name, num_blocks, craftax_classic):
    """Red if a layout had its groups in another order, or took for one-hot what holds two mobs of a class at once."""
    layout = LAYOUTS[name]
    simulator = craftax_classic if name == "craftax-classic" else CraftaxConfig("Craftax-Symbolic-v1").simulator()
    render = jax.jit(jax.vmap(lambda state: simulator.env.get_obs(state).astype(float)))
    obs = render(drawn_states(simulator, num_blocks, num_states=128))
    tiles = np.asarray(obs[:, : layout.num_tiles * layout.tile_size]).reshape(-1, layout.tile_size)
    blocks, mobs = tiles[:, :num_blocks], tiles[:, sum(layout.groups) :][:, :8]
    assert blocks.any(0).all()
    assert (blocks.sum(1).min() == 0) == (name == "craftax")
    assert mobs.sum(1).max() > 1
    dense = Linear(layout.size, 16, key=KEY)
    np.testing.assert_allclose(jax.vmap(TileLinear(dense, layout))(obs), jax.vmap(dense)(obs), rtol=1e-4, atol=1e-5)


def test_equals_the_dense_layer_on_real_observations(craftax_classic):
    """Red if the layout were not that of the game."""
    layout = LAYOUTS["craftax-classic"]
    dense = Linear(layout.size, 16, key=KEY)
    _, obs = jax.jit(jax.vmap(craftax_classic.reset))(jax.random.split(KEY, 3))
    np.testing.assert_allclose(jax.vmap(TileLinear(dense, layout))(obs), jax.vmap(dense)(obs), rtol=1e-4, atol=1e-5)


def test_layouts_are_of_the_sizes_that_craftax_has():
    """Red for a wrong number of tiles, of flags or of numbers after the tiles."""
    assert {name: layout.size for name, layout in LAYOUTS.items()} == {"craftax": 8268, "craftax-classic": 1345}
    assert LAYOUTS["craftax"].tile_size == 83


@pytest.mark.parametrize("num_layers", [1, 2])
def test_encoder_is_the_mlp_of_the_same_key(num_layers):
    """Red if a normalisation or a ReLU were missing, if sizes were not heeded, or if a second layer looked rows up."""
    obs = observation(LAYOUTS["craftax-classic"], KEY)
    sizes = {"hidden_size": 8, "num_layers": num_layers, "normalization": "rms"}
    encoder, mlp = (
        config.build((1345,), key=KEY) for config in (TileEncoderConfig("craftax-classic", **sizes), MLPConfig(**sizes))
    )
    assert mlp(obs).shape == (8,)
    np.testing.assert_allclose(encoder(obs), mlp(obs), rtol=1e-4, atol=1e-5)


def test_refuses_another_observation():
    """Red if a vector of another game were cut up as tiles."""
    with pytest.raises(
        ConfigError, match=r"layout craftax is for observations of 8,268 numbers, got the shape \(1345,"
    ):
        TileEncoderConfig().build((1345,), key=KEY)
    with pytest.raises(ConfigError, match="network.encoder.hidden_size must be at least 1, got 0"):
        TileEncoderConfig(hidden_size=0)
