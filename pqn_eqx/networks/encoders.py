"""Encoders: one observation to a feature vector."""

import dataclasses
import math

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key, Shaped

from pqn_eqx.errors import require_at_least
from pqn_eqx.networks.linear import Linear
from pqn_eqx.networks.normalization import LayerNorm, NoNorm, NormalizationName, RMSNorm, normalization


class MLPEncoder(eqx.Module):
    """Hidden layers of linear ► normalisation ► ReLU on the flattened observation (the MLP of PQN)."""

    layers: list[Linear]
    norms: list[LayerNorm | RMSNorm | NoNorm]

    def __call__(self, obs: Shaped[Array, "..."]) -> Float[Array, " features"]:
        x = obs.reshape(-1).astype(self.layers[0].weight.dtype)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = jax.nn.relu(norm(layer(x)))
        return x

    @property
    def num_features(self) -> int:
        return self.layers[-1].bias.shape[0]


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """A multilayer perceptron on the flattened observation."""

    hidden_size: int = 256
    """Width of every hidden layer."""
    num_layers: int = 2
    """Number of hidden layers."""
    normalization: NormalizationName = "layer"
    """What stands between each linear layer and its ReLU: layer norm (PQN's default), RMS norm or nothing."""

    def __post_init__(self):
        require_at_least(
            1, **{"network.encoder.hidden_size": self.hidden_size, "network.encoder.num_layers": self.num_layers}
        )

    def build(self, obs_shape: tuple[int, ...], *, key: Key[Array, ""]) -> MLPEncoder:
        sizes = [math.prod(obs_shape)] + [self.hidden_size] * self.num_layers
        keys = jax.random.split(key, self.num_layers)
        return MLPEncoder(
            layers=[Linear(i, o, key=k) for i, o, k in zip(sizes[:-1], sizes[1:], keys, strict=True)],
            norms=[normalization(self.normalization, size) for size in sizes[1:]],
        )


EncoderConfig = MLPConfig
