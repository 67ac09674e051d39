"""Normalisation of hidden activations and of inputs.

`eqx.nn.LayerNorm` computes the same numbers; the direct formula and its gradient here vectorise better under `vmap`
on CPU, where normalisation is a large part of learning with small networks.
"""

from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from pqn_eqx.networks.layers import BatchMean

NormalizationName = Literal["layer", "rms", "batch-renorm", "none"]
InputNormalizationName = Literal["none", "running", "batch-renorm"]

# flax.linen's value, so that networks match purejaxql; eqx.nn and torch use 1e-5.
EPSILON = 1e-6


class Statistics(eqx.Module):
    """What is measured of the data and not learned: no gradient reaches its leaves."""


def split_statistics(network: PyTree) -> tuple[PyTree, PyTree]:
    """(what is learned, what is measured) of a network; `eqx.combine` puts them together again."""

    def learned(node):
        return jax.tree.map(lambda _: not isinstance(node, Statistics), node)

    return eqx.partition(network, jax.tree.map(learned, network, is_leaf=lambda node: isinstance(node, Statistics)))


@jax.custom_vjp
def standardize(x: Float[Array, "*axes features"]) -> Float[Array, "*axes features"]:
    """x̂ = (x - mean) / sqrt(var + ε) over the last axis, with the population variance.

    The gradient is written out, since it needs x̂ and one number where JAX would keep every intermediate:
    dx = (dx̂ - mean(dx̂) - x̂ mean(dx̂ x̂)) / sqrt(var + ε).
    """
    return _standardize(x)[0]


def _mean(x):
    return jnp.mean(x, axis=-1, keepdims=True)


def _standardize(x):
    centred = x - _mean(x)
    inverse_deviation = jax.lax.rsqrt(_mean(jnp.square(centred)) + EPSILON)
    standardized = centred * inverse_deviation
    return standardized, (standardized, inverse_deviation)


def _standardize_gradient(residuals, gradient):
    standardized, inverse_deviation = residuals
    projection = _mean(gradient) + standardized * _mean(gradient * standardized)
    return (inverse_deviation * (gradient - projection),)


standardize.defvjp(_standardize, _standardize_gradient)


class LayerNorm(eqx.Module):
    """Zero mean and unit variance over the last axis, then a learned scale and shift (arXiv 1607.06450).

    On an image [H, W, C] it normalises the channels of each pixel, as purejaxql's networks do.
    """

    weight: Float[Array, " features"]
    bias: Float[Array, " features"]

    def __init__(self, size: int):
        self.weight, self.bias = jnp.ones(size), jnp.zeros(size)

    def __call__(self, x: Float[Array, "*axes features"]) -> Float[Array, "*axes features"]:
        return standardize(x) * self.weight + self.bias


class RMSNorm(eqx.Module):
    """Unit mean square over the last axis, then a learned scale (arXiv 1910.07467)."""

    weight: Float[Array, " features"]

    def __init__(self, size: int):
        self.weight = jnp.ones(size)

    def __call__(self, x: Float[Array, "*axes features"]) -> Float[Array, "*axes features"]:
        return x * jax.lax.rsqrt(_mean(jnp.square(x)) + EPSILON) * self.weight


class NoNorm(eqx.Module):
    """The identity."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return x


class RunningMoments(Statistics):
    """Mean and variance of the batches seen so far, and how many."""

    mean: Float[Array, " features"]
    variance: Float[Array, " features"]
    batches: Float[Array, ""]


class BatchRenorm(eqx.Module):
    """Batch renormalisation (arXiv 1702.03275, algorithm 1) over the last axis, as purejaxql uses it.

    Acting normalises by the running moments μ, σ. Learning normalises by those of the batch, corrected towards the
    running ones so that both agree where the correction is not clipped:

        x̂ = (x - μ_B) / σ_B · r + d,   r = clip(σ_B / σ, 1/3, 3),   d = clip((μ_B - μ) / σ, -5, 5),

    without a gradient through r and d. Warm-up: during the first 1000 batches r = 1 and d = 0, which is plain batch
    normalisation. The running moments move by 0.001 of the way with every batch. ε is 0.001. On an image [H, W, C] the
    batch is over pixels too.
    """

    weight: Float[Array, " features"]
    bias: Float[Array, " features"]
    running: RunningMoments

    MOMENTUM = 0.999
    EPSILON = 1e-3
    MAX_R = 3.0
    MAX_D = 5.0
    WARM_UP = 1000

    def __init__(self, size: int):
        self.weight, self.bias = jnp.ones(size), jnp.zeros(size)
        self.running = RunningMoments(jnp.zeros(size), jnp.ones(size), jnp.zeros(()))

    def __call__(self, x: Float[Array, "*axes features"]) -> Float[Array, "*axes features"]:
        running = self.running
        return (x - running.mean) * jax.lax.rsqrt(running.variance + self.EPSILON) * self.weight + self.bias

    def learn(
        self, x: Float[Array, "*axes features"], mean: BatchMean
    ) -> tuple[Float[Array, "*axes features"], "BatchRenorm"]:
        """`x` normalised by its batch, and the layer with its running moments moved."""
        running, pixels = self.running, tuple(range(x.ndim - 1))
        batch_mean = mean(jnp.mean(x, axis=pixels))
        batch_variance = mean(jnp.mean(jnp.square(x - batch_mean), axis=pixels))
        deviation = jnp.sqrt(batch_variance + self.EPSILON)
        running_deviation = jnp.sqrt(running.variance + self.EPSILON)
        warm = running.batches >= self.WARM_UP
        r = jnp.where(warm, jnp.clip(deviation / running_deviation, 1 / self.MAX_R, self.MAX_R), 1)
        d = jnp.where(warm, jnp.clip((batch_mean - running.mean) / running_deviation, -self.MAX_D, self.MAX_D), 0)
        r, d = jax.lax.stop_gradient((r, d))
        normalized = (x - batch_mean) / deviation * r + d

        def moved(old, new):
            return self.MOMENTUM * old + (1 - self.MOMENTUM) * jax.lax.stop_gradient(new)

        running = RunningMoments(
            moved(running.mean, batch_mean), moved(running.variance, batch_variance), running.batches + 1
        )
        return normalized * self.weight + self.bias, eqx.tree_at(lambda norm: norm.running, self, running)


class RunningNorm(Statistics):
    """Zero mean and unit variance by the moments of all observations so far, each element of its own.

    The moments move once an update, by `observe`, so that acting, targets and every gradient step of an update see
    the same. Before anything was seen it is the identity.
    """

    mean: Float[Array, "*shape"]
    variance: Float[Array, "*shape"]
    count: Float[Array, ""]

    MIN_VARIANCE = 1e-4
    """An element that has hardly moved yet is not blown up by more than 100."""

    def __init__(self, shape: tuple[int, ...]):
        self.mean, self.variance, self.count = jnp.zeros(shape), jnp.ones(shape), jnp.zeros(())

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        deviation = jnp.sqrt(jnp.maximum(self.variance, self.MIN_VARIANCE))
        return (x - self.mean) / deviation

    def observe(
        self, batch: Float[Array, "B *shape"], mean_over_devices: Callable[[PyTree], PyTree], num_observations: int
    ) -> "RunningNorm":
        """With the moments of a batch merged in (Welford; Chan et al. 1979, the pairwise rule).

        `batch` is this device's share of `num_observations`; every device holds as many.
        """
        batch_mean = mean_over_devices(jnp.mean(batch, axis=0))
        batch_variance = mean_over_devices(jnp.mean(jnp.square(batch - batch_mean), axis=0))
        count = self.count + num_observations
        share = num_observations / count
        difference = batch_mean - self.mean
        # Of the identity it starts as, nothing remains: with count 0 the share of the batch is 1.
        variance = (1 - share) * self.variance + share * batch_variance + share * (1 - share) * jnp.square(difference)
        return eqx.tree_at(
            lambda norm: (norm.mean, norm.variance, norm.count),
            self,
            (self.mean + share * difference, variance, count),
        )


Normalization = LayerNorm | RMSNorm | BatchRenorm | NoNorm


def normalization(name: NormalizationName, size: int) -> Normalization:
    """The normalisation called `name` over `size` features."""
    if name == "layer":
        return LayerNorm(size)
    if name == "rms":
        return RMSNorm(size)
    return BatchRenorm(size) if name == "batch-renorm" else NoNorm()


def input_normalization(name: InputNormalizationName, obs_shape: tuple[int, ...]) -> RunningNorm | BatchRenorm | NoNorm:
    """The normalisation called `name` for observations."""
    if name == "running":
        return RunningNorm(obs_shape)
    return BatchRenorm(obs_shape[-1]) if name == "batch-renorm" else NoNorm()
