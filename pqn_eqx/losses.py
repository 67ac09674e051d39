"""How a value is represented and regressed. The algorithm and the acting code never ask which loss it is.

A loss states how many numbers stand for one value (`num_outputs`, the K of the network's [A, K] output), how they are
read as a value, and what it costs when they miss a target.
"""

import abc
import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pqn_eqx.config_groups import group_member
from pqn_eqx.errors import require, require_at_least, require_positive


class Loss(eqx.Module):
    """A representation of values by K outputs and the cost of missing a scalar target."""

    metric_names: ClassVar[tuple[str, ...]] = ()
    """What `metrics` reports."""

    @property
    @abc.abstractmethod
    def num_outputs(self) -> int:
        """How many numbers stand for one value: K."""

    @abc.abstractmethod
    def value(self, outputs: Float[Array, "*batch K"]) -> Float[Array, "*batch"]:
        """The value that K outputs stand for."""

    @abc.abstractmethod
    def loss(self, outputs: Float[Array, " K"], target: Float[Array, ""]) -> Float[Array, ""]:
        """The cost of `outputs` for one scalar `target`; gradients flow into `outputs` alone."""

    def metrics(self, target: Float[Array, "*batch"]) -> dict[str, Float[Array, "*batch"]]:
        """What the loss has to tell of each target."""
        return {}


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


class HLGauss(Loss):
    """Cross-entropy against a histogram of a Gaussian around the target (arXiv 2403.03950, section 3.1; 1806.04613).

    K bins of equal width w on [v_min, v_max]; the outputs are logits over them, and the value is the expectation of
    the bins' centres. A target y stands for the masses that a normal distribution of mean y and deviation
    σ = `sigma_ratio` · w puts into the bins,

        p_i ∝ erf((e_{i+1} - y) / (√2 σ)) - erf((e_i - y) / (√2 σ)),   e_i = v_min + i w,

    divided by their sum: a normal distribution cut off at the ends of the support, as in the paper's appendix A, for
    targets outside it too. (From three deviations outside on, where float32 could no longer divide, a target counts
    as three deviations outside: 96 % and more of it lie in the end bin then, at the default ratio.) `target_outside`
    tells the share of targets outside the support: where it is not small, widen it or scale the rewards.

    The expectation of the masses is y to within w/π · exp(-2 (π · sigma_ratio)²), 5e-6 bin widths at the default
    ratio, if y is five deviations from the ends; nearer to them the cut pulls it inwards, by at most 0.8 σ + w/2.
    """

    num_bins: int = eqx.field(static=True)
    v_min: Float[Array, ""]
    v_max: Float[Array, ""]
    sigma_ratio: Float[Array, ""]
    metric_names = ("target_outside",)

    @property
    def num_outputs(self) -> int:
        return self.num_bins

    @property
    def bin_width(self) -> Float[Array, ""]:
        return (self.v_max - self.v_min) / self.num_bins

    def value(self, outputs):
        centres = self.v_min + (jnp.arange(self.num_bins) + 0.5) * self.bin_width
        return jnp.sum(jax.nn.softmax(outputs, axis=-1) * centres, axis=-1)

    def mass(self, target: Float[Array, "*batch"]) -> Float[Array, "*batch K"]:
        """The probability mass of each bin for a target."""
        # In units of the bin width, from the lower end.
        edges = jnp.arange(self.num_bins + 1)
        reach = 3 * self.sigma_ratio
        target = jnp.clip((target - self.v_min) / self.bin_width, -reach, self.num_bins + reach)
        cdf = jax.scipy.special.erf((edges - target[..., None]) / (jnp.sqrt(2.0) * self.sigma_ratio))
        return (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])

    def loss(self, outputs, target):
        mass = jax.lax.stop_gradient(self.mass(target))
        return -jnp.sum(mass * jax.nn.log_softmax(outputs))

    def metrics(self, target):
        return {"target_outside": ((target < self.v_min) | (target > self.v_max)).astype(float)}


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


@group_member("hl-gauss")
@dataclasses.dataclass(frozen=True)
class HLGaussConfig:
    """Cross-entropy over bins, against a Gaussian around the target."""

    v_min: float = -10.0
    """Lower end of the support, in scaled rewards: the least return that is to be told apart."""
    v_max: float = 10.0
    """Upper end of the support, in scaled rewards."""
    num_bins: int = 51
    """Bins of equal width on the support; each action has as many outputs."""
    sigma_ratio: float = 0.75
    """Standard deviation of the Gaussian, in bin widths."""

    def __post_init__(self):
        require(
            -float("inf") < self.v_min < self.v_max < float("inf"),
            f"loss.v_min must be less than loss.v_max, and both finite, got {self.v_min} and {self.v_max}.",
        )
        require_at_least(2, **{"loss.num_bins": self.num_bins})
        require_positive(**{"loss.sigma_ratio": self.sigma_ratio})

    def build(self) -> HLGauss:
        v_min, v_max, sigma_ratio = (jnp.asarray(float(x)) for x in (self.v_min, self.v_max, self.sigma_ratio))
        return HLGauss(num_bins=self.num_bins, v_min=v_min, v_max=v_max, sigma_ratio=sigma_ratio)


LossConfig = MSEConfig | HuberConfig | HLGaussConfig
