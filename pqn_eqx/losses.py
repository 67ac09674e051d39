"""How a value is represented and regressed. The algorithm and the acting code never ask which loss it is.

A loss states how many numbers stand for one value (`num_outputs`, the K of the network's [A, K] output), how they are
read as a value, and what it costs when they miss a target.
"""

import abc
import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from pqn_eqx.config_groups import group_member
from pqn_eqx.errors import require_positive


class Loss(eqx.Module):
    """A representation of values by K outputs and the cost of missing a scalar target."""

    num_outputs: eqx.AbstractClassVar[int]

    @abc.abstractmethod
    def value(self, outputs: Float[Array, "*batch K"]) -> Float[Array, "*batch"]:
        """The value that K outputs stand for."""

    @abc.abstractmethod
    def loss(self, outputs: Float[Array, " K"], target: Float[Array, ""]) -> Float[Array, ""]:
        """The cost of `outputs` for one scalar `target`; gradients flow into `outputs` alone."""


class MSE(Loss):
    """Half the squared error, ½ (q - target)²: the factor that makes its gradient the TD error (PQN, purejaxql)."""

    num_outputs = 1

    def value(self, outputs):
        return outputs[..., 0]

    def loss(self, outputs, target):
        return 0.5 * jnp.square(self.value(outputs) - target)


class Huber(Loss):
    """Quadratic within `delta` of the target and linear beyond (Huber 1964; DQN clips its TD error this way).

    ½ e² where |e| <= δ, else δ (|e| - ½ δ), with e = q - target: equal to `MSE` near the target, slope δ far away.
    """

    num_outputs = 1
    delta: Float[Array, ""]

    def value(self, outputs):
        return outputs[..., 0]

    def loss(self, outputs, target):
        error = jnp.abs(self.value(outputs) - target)
        quadratic = jnp.minimum(error, self.delta)
        return 0.5 * quadratic**2 + self.delta * (error - quadratic)


@group_member("mse")
@dataclasses.dataclass(frozen=True)
class MSEConfig:
    """Half the squared TD error."""

    def build(self) -> MSE:
        return MSE()


@group_member("huber")
@dataclasses.dataclass(frozen=True)
class HuberConfig:
    """Squared TD error within delta, absolute beyond."""

    delta: float = 1.0
    """TD error, in units of the (scaled) reward, at which the loss turns from quadratic to linear."""

    def __post_init__(self):
        require_positive(**{"loss.delta": self.delta})

    def build(self) -> Huber:
        return Huber(jnp.asarray(self.delta))


LossConfig = MSEConfig | HuberConfig
