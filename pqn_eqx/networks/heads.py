"""Heads: features to the outputs of every action."""

import dataclasses

import equinox as eqx
from jaxtyping import Array, Float, Key

from pqn_eqx.networks.linear import Linear


class LinearHead(eqx.Module):
    """One linear layer to the K outputs of each of A actions."""

    layer: Linear
    num_outputs: int = eqx.field(static=True)

    def __call__(self, features: Float[Array, " features"]) -> Float[Array, "A K"]:
        return self.layer(features).reshape(-1, self.num_outputs)


@dataclasses.dataclass(frozen=True)
class LinearHeadConfig:
    """One linear layer to all action values."""

    def build(self, num_features: int, num_actions: int, num_outputs: int, *, key: Key[Array, ""]) -> LinearHead:
        return LinearHead(Linear(num_features, num_actions * num_outputs, key=key), num_outputs)


HeadConfig = LinearHeadConfig
