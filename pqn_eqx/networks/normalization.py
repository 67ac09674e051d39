"""Normalisation of hidden activations.

`eqx.nn.LayerNorm` computes the same numbers; the direct formula and its gradient here vectorise better under `vmap`
on CPU, where normalisation is a large part of learning with small networks.
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

NormalizationName = Literal["layer", "rms", "none"]

# flax.linen's value, so that networks match purejaxql; eqx.nn and torch use 1e-5.
EPSILON = 1e-6


@jax.custom_vjp
def standardize(x: Float[Array, " features"]) -> Float[Array, " features"]:
    """x̂ = (x - mean) / sqrt(var + ε), with the population variance.

    The gradient is written out, since it needs x̂ and one number where JAX would keep every intermediate:
    dx = (dx̂ - mean(dx̂) - x̂ mean(dx̂ x̂)) / sqrt(var + ε).
    """
    return _standardize(x)[0]


def _standardize(x):
    centred = x - jnp.mean(x)
    inverse_deviation = jax.lax.rsqrt(jnp.mean(jnp.square(centred)) + EPSILON)
    standardized = centred * inverse_deviation
    return standardized, (standardized, inverse_deviation)


def _standardize_gradient(residuals, gradient):
    standardized, inverse_deviation = residuals
    projection = jnp.mean(gradient) + standardized * jnp.mean(gradient * standardized)
    return (inverse_deviation * (gradient - projection),)


standardize.defvjp(_standardize, _standardize_gradient)


class LayerNorm(eqx.Module):
    """Zero mean and unit variance over the features, then a learned scale and shift (arXiv 1607.06450)."""

    weight: Float[Array, " features"]
    bias: Float[Array, " features"]

    def __init__(self, size: int):
        self.weight, self.bias = jnp.ones(size), jnp.zeros(size)

    def __call__(self, x: Float[Array, " features"]) -> Float[Array, " features"]:
        return standardize(x) * self.weight + self.bias


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
    if name == "layer":
        return LayerNorm(size)
    return RMSNorm(size) if name == "rms" else NoNorm()
