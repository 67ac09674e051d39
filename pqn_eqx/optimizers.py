"""Optimisers: gradient transformations without a learning rate, which belongs to the algorithm and its schedule."""

import dataclasses

import optax

from pqn_eqx.config_groups import group_member
from pqn_eqx.errors import require, require_positive


def _require_decay(**fields: float) -> None:
    for name, value in fields.items():
        require(0 <= value < 1, f"optimizer.{name} must lie in [0, 1), got {value}.")


@dataclasses.dataclass(frozen=True)
class _MomentsConfig:
    """What the members of Adam's family share."""

    b1: float = 0.9
    """Decay of the running mean of the gradients."""
    b2: float = 0.999
    """Decay of the running mean of the squared gradients."""
    eps: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self):
        _require_decay(b1=self.b1, b2=self.b2)
        require_positive(**{"optimizer.eps": self.eps})


@group_member("radam")
@dataclasses.dataclass(frozen=True)
class RAdamConfig(_MomentsConfig):
    """Rectified Adam (arXiv 1908.03265), the optimiser of the PQN paper."""

    def build(self) -> optax.GradientTransformation:
        return optax.scale_by_radam(self.b1, self.b2, self.eps)


@group_member("adam")
@dataclasses.dataclass(frozen=True)
class AdamConfig(_MomentsConfig):
    """Adam (arXiv 1412.6980)."""

    def build(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2, self.eps)


@group_member("sgd")
@dataclasses.dataclass(frozen=True)
class SGDConfig:
    """Stochastic gradient descent, with momentum if wanted."""

    momentum: float = 0.0
    """Decay of the sum of past gradients; 0 is plain gradient descent."""

    def __post_init__(self):
        _require_decay(momentum=self.momentum)

    def build(self) -> optax.GradientTransformation:
        return optax.trace(self.momentum) if self.momentum else optax.identity()


OptimizerConfig = RAdamConfig | AdamConfig | SGDConfig
