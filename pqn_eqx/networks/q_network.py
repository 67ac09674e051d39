"""The Q-network: encoder ► memory ► head, for one environment. Callers `vmap` it over environments."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, Key, Shaped

from pqn_eqx.networks.encoders import EncoderConfig, MLPConfig, MLPEncoder
from pqn_eqx.networks.heads import HeadConfig, LinearHead, LinearHeadConfig
from pqn_eqx.networks.memory import MemoryConfig, NoMemory, NoMemoryConfig

Memory = Any
"""Whatever a network carries between steps; an empty tuple for a feed-forward one."""


class QNetwork(eqx.Module):
    """Observations to the outputs [A, K] of every action; a loss reads K outputs as one value."""

    encoder: MLPEncoder
    memory: NoMemory
    head: LinearHead

    def initial_memory(self) -> Memory:
        """The memory at the start of an episode."""
        return self.memory.initial()

    def step(
        self, memory: Memory, obs: Shaped[Array, "..."], reset: Bool[Array, ""]
    ) -> tuple[Float[Array, "A K"], Memory]:
        """One step of one environment.

        `reset` says that `obs` is the first of an episode: the memory is emptied *before* it is read.
        """
        features, memory = self.memory.step(memory, self.encoder(obs), reset)
        return self.head(features), memory


@dataclasses.dataclass(frozen=True)
class QNetworkConfig:
    """The Q-network: encoder ► memory ► head."""

    encoder: EncoderConfig = MLPConfig()
    """What turns an observation into features."""
    memory: MemoryConfig = NoMemoryConfig()
    """What is carried from step to step within an episode."""
    head: HeadConfig = LinearHeadConfig()
    """What turns features into action values."""

    def build(self, obs_shape: tuple[int, ...], num_actions: int, num_outputs: int, *, key: Key[Array, ""]) -> QNetwork:
        encoder_key, memory_key, head_key = jax.random.split(key, 3)
        encoder = self.encoder.build(obs_shape, key=encoder_key)
        memory = self.memory.build(encoder.num_features, key=memory_key)
        head = self.head.build(memory.num_features, num_actions, num_outputs, key=head_key)
        return QNetwork(encoder, memory, head)
