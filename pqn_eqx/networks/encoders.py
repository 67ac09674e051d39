"""Encoders: one observation to a feature vector."""

import dataclasses
import math
from typing import Any

import jax
from jaxtyping import Array, Key

from pqn_eqx.config_groups import group_member
from pqn_eqx.errors import require_at_least
from pqn_eqx.networks.layers import Function, Linear, Sequential, as_float, flatten
from pqn_eqx.networks.normalization import NormalizationName, normalization


@group_member("mlp")
@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """A multilayer perceptron on the flattened observation: linear ► normalisation ► ReLU (the MLP of PQN)."""

    hidden_size: int = 256
    """Width of every hidden layer."""
    num_layers: int = 2
    """Number of hidden layers."""
    normalization: NormalizationName = "layer"
    """What stands between each linear layer and its ReLU; PQN's default is layer norm."""

    def __post_init__(self):
        require_at_least(
            1, **{"network.encoder.hidden_size": self.hidden_size, "network.encoder.num_layers": self.num_layers}
        )

    def build(self, obs_shape: tuple[int, ...], *, key: Key[Array, ""]) -> Sequential:
        sizes = [math.prod(obs_shape)] + [self.hidden_size] * self.num_layers
        keys = jax.random.split(key, self.num_layers)
        layers: list[Any] = [Function(as_float), Function(flatten)]
        for num_inputs, size, layer_key in zip(sizes[:-1], sizes[1:], keys, strict=True):
            layers += [
                Linear(num_inputs, size, key=layer_key),
                normalization(self.normalization, size),
                Function(jax.nn.relu),
            ]
        return Sequential(tuple(layers))
