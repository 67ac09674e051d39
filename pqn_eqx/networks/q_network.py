"""The Q-network: encoder ► memory ► head, for one environment. Callers `vmap` it over environments."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Shaped

from pqn_eqx.control_flow import map_with_mean
from pqn_eqx.networks.convolutions import HadamaxCNNConfig, ImpalaCNNConfig, MinAtarCNNConfig, NatureCNNConfig
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.heads import DuelingHead, DuelingHeadConfig, LinearHead, LinearHeadConfig
from pqn_eqx.networks.layers import BatchMean, Sequential, as_float, learn_through
from pqn_eqx.networks.memory import Memory, MemoryState, NoMemoryConfig
from pqn_eqx.networks.normalization import (
    BatchRenorm,
    InputNormalizationName,
    NoNorm,
    RunningNorm,
    input_normalization,
)
from pqn_eqx.networks.recurrent import GRUConfig, LSTMConfig, MinGRUConfig
from pqn_eqx.networks.symbolic import TileEncoderConfig
from pqn_eqx.networks.transformer import TransformerConfig

EncoderConfig = MLPConfig | MinAtarCNNConfig | NatureCNNConfig | ImpalaCNNConfig | HadamaxCNNConfig | TileEncoderConfig
MemoryConfig = NoMemoryConfig | GRUConfig | LSTMConfig | MinGRUConfig | TransformerConfig
HeadConfig = LinearHeadConfig | DuelingHeadConfig


class Inputs(eqx.Module):
    """What a network is told at one step of one environment."""

    obs: Shaped[Array, "..."]
    last_action: Int[Array, ""]
    """The action that led to `obs`; not read at the first observation of an episode."""
    last_reward: Float[Array, ""]
    """The raw reward that came with `obs`; not read at the first observation of an episode."""
    reset: Bool[Array, ""]
    """Whether `obs` is the first of an episode: the memory is emptied *before* it is read."""


class QNetwork(eqx.Module):
    """Observations to the outputs [A, K] of every action; a loss reads K outputs as one value."""

    input_norm: RunningNorm | BatchRenorm | NoNorm
    encoder: Sequential
    memory: Memory
    head: LinearHead | DuelingHead
    num_actions: int = eqx.field(static=True)
    add_last_action: bool = eqx.field(static=True)
    add_last_reward: bool = eqx.field(static=True)

    def initial_memory(self) -> MemoryState:
        """The memory at the start of an episode."""
        return self.memory.initial()

    def step(self, memory: MemoryState, inputs: Inputs) -> tuple[Float[Array, "A K"], MemoryState]:
        """One step of one environment."""
        features = self.encoder(self.input_norm(as_float(inputs.obs)) if self._normalizes else inputs.obs)
        features, memory = self.memory.step(memory, self._with_last(features, inputs), inputs.reset)
        return self.head(features), memory

    def unroll(
        self, memory: MemoryState, inputs: Inputs, mean: BatchMean
    ) -> tuple[Float[Array, "T A K"], MemoryState, "QNetwork"]:
        """T steps of one environment as learning sees them: outputs, memory, and the network with its statistics moved.

        Equal to repeated `step`, but that batch normalisations normalise by the batch: `mean` is the mean over all
        that the callers `vmap`, and all devices.
        """

        def encode(mean, inputs):
            x, input_norm = inputs.obs, self.input_norm
            if self._normalizes:
                x, input_norm = learn_through(input_norm, as_float(x), mean)
            x, encoder = self.encoder.learn(x, mean)
            return self._with_last(x, inputs), (input_norm, encoder)

        if inputs.reset.shape[0] == 1:
            # One step is no batch: XLA would keep an axis of length 1 in every product, which makes learning with
            # small networks half as fast on CPU.
            features, moved = encode(mean, jax.tree.map(lambda leaf: leaf[0], inputs))
            features, memory = self.memory.step(memory, features, inputs.reset[0])
            outputs = self.head(features)[None]
        else:
            features, moved = map_with_mean(encode, mean, out_axes=(0, None))(inputs)
            features, memory = self.memory.unroll(memory, features, inputs.reset)
            outputs = jax.vmap(self.head)(features)
        return outputs, memory, eqx.tree_at(lambda net: (net.input_norm, net.encoder), self, moved)

    def observe(
        self, obs: Shaped[Array, "B ..."], mean_over_devices: Callable[[PyTree], PyTree], num_observations: int
    ) -> "QNetwork":
        """With running input statistics moved by a batch, this device's share of `num_observations`."""
        if not isinstance(self.input_norm, RunningNorm):
            return self
        norm = self.input_norm.observe(as_float(obs), mean_over_devices, num_observations)
        return eqx.tree_at(lambda net: net.input_norm, self, norm)

    @property
    def _normalizes(self) -> bool:
        return not isinstance(self.input_norm, NoNorm)

    def _with_last(self, features: Float[Array, " F"], inputs: Inputs) -> Float[Array, " F_and_last"]:
        parts = [features]
        if self.add_last_action:
            parts.append(jax.nn.one_hot(inputs.last_action, self.num_actions, dtype=features.dtype))
        if self.add_last_reward:
            parts.append(inputs.last_reward[None].astype(features.dtype))
        known = [parts[0], *(jnp.where(inputs.reset, 0, part) for part in parts[1:])]
        return jnp.concatenate(known) if len(known) > 1 else features


@dataclasses.dataclass(frozen=True)
class QNetworkConfig:
    """The Q-network: encoder ► memory ► head."""

    encoder: EncoderConfig = MLPConfig()
    """What turns an observation into features."""
    memory: MemoryConfig = NoMemoryConfig()
    """What is carried from step to step within an episode."""
    head: HeadConfig = LinearHeadConfig()
    """What turns features into action values."""
    input_normalization: InputNormalizationName = "none"
    """Normalisation of the observation: by the moments of all so far, by batch renormalisation, or none."""
    add_last_action: bool = False
    """Give the memory the action before the observation, as a one-hot vector beside the encoder's features."""
    add_last_reward: bool = False
    """Give the memory the raw reward that came with the observation."""

    @property
    def is_recurrent(self) -> bool:
        """Whether anything is carried from step to step, so that learning needs whole sequences."""
        return not isinstance(self.memory, NoMemoryConfig)

    def build(self, obs_shape: tuple[int, ...], num_actions: int, num_outputs: int, *, key: Key[Array, ""]) -> QNetwork:
        """Raises `ConfigError` where the encoder cannot read observations of `obs_shape`."""
        encoder_key, memory_key, head_key = jax.random.split(key, 3)
        encoder = self.encoder.build(obs_shape, key=encoder_key)
        (num_features,) = jax.eval_shape(encoder, jax.ShapeDtypeStruct(obs_shape, jnp.result_type(float))).shape
        num_features += num_actions * self.add_last_action + self.add_last_reward
        memory = self.memory.build(num_features, key=memory_key)
        features, reset = jax.ShapeDtypeStruct((num_features,), jnp.result_type(float)), jax.ShapeDtypeStruct((), bool)
        remembered, _ = jax.eval_shape(memory.step, memory.initial(), features, reset)
        head = self.head.build(remembered.shape[0], num_actions, num_outputs, key=head_key)
        return QNetwork(
            input_norm=input_normalization(self.input_normalization, obs_shape),
            encoder=encoder,
            memory=memory,
            head=head,
            num_actions=num_actions,
            add_last_action=self.add_last_action,
            add_last_reward=self.add_last_reward,
        )
