"""Linear layers, and the one place that says how they start."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


class Linear(eqx.Module):
    """x ↦ x W + b, starting as flax.linen.Dense does, and so as purejaxql's networks do.

    W: LeCun normal, a normal distribution truncated at two standard deviations, of variance 1 / in_features. b: zero.

    W lies as [in, out], unlike that of `eqx.nn.Linear`: acting multiplies few rows by it, and XLA would turn the
    matrix round on each step.
    """

    weight: Float[Array, "in out"]
    bias: Float[Array, " out"]

    def __init__(self, in_features: int, out_features: int, *, key: Key[Array, ""]):
        self.weight = jax.nn.initializers.lecun_normal()(key, (in_features, out_features))
        self.bias = jnp.zeros(out_features)

    def __call__(self, x: Float[Array, " in"]) -> Float[Array, " out"]:
        return x @ self.weight + self.bias
