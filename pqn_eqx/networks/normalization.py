"""Normalisation of hidden activations, and the one place that says how linear layers start.

`eqx.nn.LayerNorm` computes the same numbers; the direct formula here vectorises better under `vmap` on CPU, where
normalisation is a large part of learning with small networks (``benchmarks/normalization.py`` measures it).
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

NormalizationName = Literal["layer", "rms", "none"]

# flax.linen's value, so that networks match purejaxql; eqx.nn and torch use 1e-5.
EPSILON = 1e-6


class LayerNorm(eqx.Module):
    """Zero mean and unit variance over the features, then a learned scale and shift (arXiv 1607.06450)."""

    weight: Float[Array, " features"]
    bias: Float[Array, " features"]

    def __init__(self, size: int):
        self.weight, self.bias = jnp.ones(size), jnp.zeros(size)

    def __call__(self, x: Float[Array, " features"]) -> Float[Array, " features"]:
        centred = x - jnp.mean(x)
        return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred)) + EPSILON) * self.weight + self.bias


class RMSNorm(eqx.Module):
    """Unit mean square over the features, then a learned scale (arXiv 1910.07467)."""

    weight: Float[Array, " features"]

    def __init__(self, size: int):
        self.weight = jnp.ones(size)

    def __call__(self, x: Float[Array, " features"]) -> Float[Array, " features"]:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x)) + EPSILON) * self.weight


class NoNorm(eqx.Module):
    """The identity."""

    def __call__(self, x: Float[Array, " features"]) -> Float[Array, " features"]:
        return x


def normalization(name: NormalizationName, size: int) -> LayerNorm | RMSNorm | NoNorm:
    """The normalisation called `name` over `size` features."""
    return {"layer": lambda: LayerNorm(size), "rms": lambda: RMSNorm(size), "none": NoNorm}[name]()


def linear(in_features: int, out_features: int, *, key: Key[Array, ""]) -> eqx.nn.Linear:
    """A linear layer that starts as flax.linen.Dense does, and so as purejaxql's networks do.

    Weights: LeCun normal, a normal distribution truncated at two standard deviations, of variance 1 / in_features.
    Biases: zero. (`eqx.nn.Linear` alone would draw both uniformly, as torch does.)
    """
    layer = eqx.nn.Linear(in_features, out_features, key=key)
    weight = jax.nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)(key, layer.weight.shape, layer.weight.dtype)
    return eqx.tree_at(lambda l: (l.weight, l.bias), layer, (weight, jnp.zeros_like(layer.bias)))
