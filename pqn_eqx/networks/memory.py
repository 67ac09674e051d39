"""Memories: what a network carries from one step of an episode to the next, between encoder and head."""

import abc
import dataclasses
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, Key

from pqn_eqx.config_groups import group_member

MemoryState = Any
"""What one environment carries: a pytree of arrays, empty for a feed-forward network."""


class Memory(eqx.Module):
    """A memory for one environment; callers `vmap` over environments.

    `reset` says that the features belong to the first observation of an episode: the memory is emptied *before* they
    are read, so that nothing crosses from one episode into the next. `unroll` equals repeated `step`.
    """

    @abc.abstractmethod
    def initial(self) -> MemoryState:
        """The memory at the start of an episode."""

    @abc.abstractmethod
    def step(
        self, state: MemoryState, features: Float[Array, " F"], reset: Bool[Array, ""]
    ) -> tuple[Float[Array, " out"], MemoryState]:
        """What the memory makes of one observation's features, and the next state."""

    @abc.abstractmethod
    def unroll(
        self, state: MemoryState, features: Float[Array, "T F"], reset: Bool[Array, " T"]
    ) -> tuple[Float[Array, "T out"], MemoryState]:
        """`step` for T steps in turn."""


class NoMemory(Memory):
    """The memory of a feed-forward network: empty, so that one algorithm serves both kinds."""

    def initial(self):
        return ()

    def step(self, state, features, reset):
        return features, state

    def unroll(self, state, features, reset):
        return features, state


class Stack(Memory):
    """Memories one above the other: each reads what the one below returns."""

    layers: tuple[Memory, ...]

    def initial(self):
        return tuple(layer.initial() for layer in self.layers)

    def step(self, state, features, reset):
        return self._through("step", state, features, reset)

    def unroll(self, state, features, reset):
        return self._through("unroll", state, features, reset)

    def _through(self, method, state, features, reset):
        states = []
        for layer, layer_state in zip(self.layers, state, strict=True):
            features, layer_state = getattr(layer, method)(layer_state, features, reset)
            states.append(layer_state)
        return features, tuple(states)


def stack(build, num_layers: int, num_features: int, hidden_size: int, key: Key[Array, ""]) -> Memory:
    """`num_layers` memories made by `build(num_inputs, hidden_size, key=...)`, one above the other."""
    sizes = [num_features] + [hidden_size] * (num_layers - 1)
    keys = jax.random.split(key, num_layers)
    layers = tuple(build(size, hidden_size, key=key) for size, key in zip(sizes, keys, strict=True))
    return layers[0] if num_layers == 1 else Stack(layers)


@group_member("none")
@dataclasses.dataclass(frozen=True)
class NoMemoryConfig:
    """No memory: each observation is judged alone."""

    def build(self, num_features: int, *, key: Key[Array, ""]) -> NoMemory:
        return NoMemory()
