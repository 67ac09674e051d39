"""Heads: features to the outputs of every action."""

import dataclasses
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from pqn_eqx.config_groups import group_member
from pqn_eqx.networks.layers import Linear
from pqn_eqx.networks.normalization import Normalization, normalization

HeadNormalizationName = Literal["none", "layer", "rms"]


class LinearHead(eqx.Module):
    """One linear layer to the K outputs of each of A actions."""

    norm: Normalization
    layer: Linear
    num_outputs: int = eqx.field(static=True)

    def __call__(self, features: Float[Array, " F"]) -> Float[Array, "A K"]:
        return self.layer(self.norm(features)).reshape(-1, self.num_outputs)


class DuelingHead(eqx.Module):
    """Q = V + A - mean_a A for each of the K outputs (arXiv 1511.06581, equation 9)."""

    norm: Normalization
    value: Linear
    advantage: Linear
    num_outputs: int = eqx.field(static=True)

    def __call__(self, features: Float[Array, " F"]) -> Float[Array, "A K"]:
        features = self.norm(features)
        advantage = self.advantage(features).reshape(-1, self.num_outputs)
        return self.value(features) + advantage - jnp.mean(advantage, axis=0)


@group_member("linear")
@dataclasses.dataclass(frozen=True)
class LinearHeadConfig:
    """One linear layer to all action values."""

    normalization: HeadNormalizationName = "none"
    """Normalisation of the features before the layer."""

    def build(self, num_features: int, num_actions: int, num_outputs: int, *, key: Key[Array, ""]) -> LinearHead:
        norm = normalization(self.normalization, num_features)
        return LinearHead(norm, Linear(num_features, num_actions * num_outputs, key=key), num_outputs)


@group_member("dueling")
@dataclasses.dataclass(frozen=True)
class DuelingHeadConfig:
    """A value, and the advantage of each action over their mean."""

    normalization: HeadNormalizationName = "none"
    """Normalisation of the features before both layers."""

    def build(self, num_features: int, num_actions: int, num_outputs: int, *, key: Key[Array, ""]) -> DuelingHead:
        value_key, advantage_key = jax.random.split(key)
        return DuelingHead(
            norm=normalization(self.normalization, num_features),
            value=Linear(num_features, num_outputs, key=value_key),
            advantage=Linear(num_features, num_actions * num_outputs, key=advantage_key),
            num_outputs=num_outputs,
        )
