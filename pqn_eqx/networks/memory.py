"""Memories: what a network carries from one step of an episode to the next, between encoder and head."""

import dataclasses

import equinox as eqx
from jaxtyping import Array, Bool, Float, Key


class NoMemory(eqx.Module):
    """The memory of a feed-forward network: empty, so that one algorithm serves both kinds."""

    num_features: int = eqx.field(static=True)

    def initial(self) -> tuple[()]:
        """The memory at the start of an episode."""
        return ()

    def step(
        self, memory: tuple[()], features: Float[Array, " features"], reset: Bool[Array, ""]
    ) -> tuple[Float[Array, " features"], tuple[()]]:
        """Features with what the memory adds, and the next memory. `reset` empties the memory before the step."""
        return features, memory


@dataclasses.dataclass(frozen=True)
class NoMemoryConfig:
    """No memory: each observation is judged alone."""

    def build(self, num_features: int, *, key: Key[Array, ""]) -> NoMemory:
        return NoMemory(num_features)


MemoryConfig = NoMemoryConfig
