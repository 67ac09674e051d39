"""The layers networks are made of, and the one place that says how they start.

A layer maps one input, without batch axes, to one output; callers `vmap` it. Containers (`Sequential`, `Residual`,
`Product`) apply layers, and know the second way to apply one: `learn`, in which a batch normalisation sees the whole
batch (see `normalization.BatchRenorm`).
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

BatchMean = Callable[[Array], Array]
"""The mean of what each example of the batch holds, over the whole batch, on all devices."""


class Linear(eqx.Module):
    """x ↦ x W + b, starting as flax.linen.Dense does, and so as purejaxql's networks do.

    W: LeCun normal, a normal distribution truncated at two standard deviations, of variance 1 / in_features, unless
    `init` says otherwise. b: zero.

    W lies as [in, out], unlike that of `eqx.nn.Linear`: acting multiplies few rows by it, and XLA would turn the
    matrix round on each step.
    """

    weight: Float[Array, "in out"]
    bias: Float[Array, " out"]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        key: Key[Array, ""],
        init: Callable[..., Array] = jax.nn.initializers.lecun_normal(),  # noqa: B008
    ):
        self.weight = init(key, (in_features, out_features))
        self.bias = jnp.zeros(out_features)

    def __call__(self, x: Float[Array, " in"]) -> Float[Array, " out"]:
        return x @ self.weight + self.bias


class Function(eqx.Module):
    """A function without parameters as a layer."""

    function: Callable[[Array], Array] = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        return self.function(x)


def as_float(obs: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """An observation as a network reads it: bytes are the brightness of pixels and become [0, 1], the rest stays.

    Only `uint8` is divided by 255: binary planes, whatever their type, are 0 and 1 already.
    """
    dtype = jnp.result_type(float)
    return obs.astype(dtype) / 255 if obs.dtype == jnp.uint8 else obs.astype(dtype)


def flatten(x: Shaped[Array, "..."]) -> Shaped[Array, " size"]:
    """All axes as one."""
    return x.reshape(-1)


def learn_through(layer: Any, x: Array, mean: BatchMean) -> tuple[Array, Any]:
    """The output of `layer` as learning sees it, and the layer with its statistics moved."""
    return layer.learn(x, mean) if hasattr(layer, "learn") else (layer(x), layer)


class Sequential(eqx.Module):
    """Layers one after the other."""

    layers: tuple[Any, ...]

    def __call__(self, x: Shaped[Array, "..."]) -> Float[Array, "..."]:
        for layer in self.layers:
            x = layer(x)
        return x

    def learn(self, x: Shaped[Array, "..."], mean: BatchMean) -> tuple[Float[Array, "..."], "Sequential"]:
        """`__call__` as learning sees it, and the layers with their statistics moved."""
        layers = []
        for layer in self.layers:
            x, layer = learn_through(layer, x, mean)
            layers.append(layer)
        return x, Sequential(tuple(layers))


class Residual(eqx.Module):
    """x ↦ x + inner(x)."""

    inner: Any

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return x + self.inner(x)

    def learn(self, x: Float[Array, "*shape"], mean: BatchMean) -> tuple[Float[Array, "*shape"], "Residual"]:
        """`__call__` as learning sees it, and the layers with their statistics moved."""
        y, inner = learn_through(self.inner, x, mean)
        return x + y, Residual(inner)


class Product(eqx.Module):
    """x ↦ left(x) ⊙ right(x), element by element."""

    left: Any
    right: Any

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.left(x) * self.right(x)

    def learn(self, x: Float[Array, "..."], mean: BatchMean) -> tuple[Float[Array, "..."], "Product"]:
        """`__call__` as learning sees it, and the layers with their statistics moved."""
        a, left = learn_through(self.left, x, mean)
        b, right = learn_through(self.right, x, mean)
        return a * b, Product(left, right)
