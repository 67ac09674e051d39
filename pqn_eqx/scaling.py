"""Rules that carry hyperparameters from the number of environments they were found at to another one."""

import dataclasses
import math
from typing import Literal

from pqn_eqx.config_groups import group_member
from pqn_eqx.errors import require, require_at_least
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.pqn import PQNConfig


@group_member("none")
@dataclasses.dataclass(frozen=True)
class NoScalingConfig:
    """Every number as it is given."""

    def apply(
        self, algorithm: PQNConfig, exploration: EpsilonGreedyConfig
    ) -> tuple[PQNConfig, EpsilonGreedyConfig, list[str]]:
        """The numbers to train with, and what there is to say of them."""
        return algorithm, exploration, []


@group_member("rules")
@dataclasses.dataclass(frozen=True)
class ScalingRulesConfig:
    """Hyperparameters are meant for reference_num_envs environments and carried to num_envs."""

    reference_num_envs: int
    """Environments at which the hyperparameters were found."""
    hold: Literal["minibatch-size", "num-minibatches"] = "minibatch-size"
    """What stays as it is at the reference: the steps in a minibatch, so that there are more minibatches, or the number
    of minibatches, so that they are larger."""
    learning_rate_power: float = 0.5
    """p: the learning rate is multiplied by (minibatch size / minibatch size at the reference)^p. 0 keeps it, 0.5 is
    the square-root rule, 1 the linear one. Where the minibatch size is held the factor is 1."""
    updates_per_batch: int | None = None
    """Gradient steps on each window, a multiple of the minibatches; default: num_epochs passes, as ever."""
    epsilon_schedule: Literal["steps", "updates"] = "steps"
    """What the decay of ε is counted in: environment steps, or updates, of which the decay then takes as many as at the
    reference, and so more steps."""
    warmup_updates: int | None = None
    """Updates over which the learning rate rises to its value; default: the algorithm's."""

    def __post_init__(self):
        require_at_least(1, **{"scaling.reference_num_envs": self.reference_num_envs})
        require(
            math.isfinite(self.learning_rate_power),
            f"scaling.learning_rate_power must be finite, got {self.learning_rate_power}.",
        )
        for name in ("updates_per_batch", "warmup_updates"):
            if (value := getattr(self, name)) is not None:
                require_at_least(0 if name == "warmup_updates" else 1, **{f"scaling.{name}": value})

    def apply(
        self, algorithm: PQNConfig, exploration: EpsilonGreedyConfig
    ) -> tuple[PQNConfig, EpsilonGreedyConfig, list[str]]:
        """The numbers to train with, and a line on each of them. Raises `ConfigError` where they are no whole ones."""
        factor = algorithm.num_envs / self.reference_num_envs
        num_minibatches = self._num_minibatches(algorithm)
        batch = algorithm.steps_per_update / num_minibatches
        reference_batch = self.reference_num_envs * algorithm.num_steps / algorithm.num_minibatches
        num_epochs = self._num_epochs(algorithm, num_minibatches)
        scaled = dataclasses.replace(
            algorithm,
            num_minibatches=num_minibatches,
            num_epochs=num_epochs,
            learning_rate=algorithm.learning_rate * (batch / reference_batch) ** self.learning_rate_power,
            warmup_updates=algorithm.warmup_updates if self.warmup_updates is None else self.warmup_updates,
        )
        if self.epsilon_schedule == "updates":
            exploration = dataclasses.replace(exploration, decay_fraction=exploration.decay_fraction * factor)
        lines = [
            f"Scaling from {self.reference_num_envs:,} to {algorithm.num_envs:,} environments (x {factor:g}):",
            f"  minibatches: {num_minibatches:,} of {batch:,g} steps ({self.hold} held; "
            f"{algorithm.num_minibatches:,} of {reference_batch:,g} at the reference)",
            f"  learning rate: {scaled.learning_rate:g} = {algorithm.learning_rate:g} x ({batch:g} / "
            f"{reference_batch:g})^{self.learning_rate_power:g}, after a warm-up of {scaled.warmup_updates:,} updates",
            f"  gradient steps per update: {num_epochs * num_minibatches:,} ({num_epochs} epochs)",
            f"  ε falls over {exploration.decay_fraction:g} of the run's steps (counted in {self.epsilon_schedule})",
        ]
        return scaled, exploration, lines

    def _num_minibatches(self, algorithm: PQNConfig) -> int:
        if self.hold == "num-minibatches":
            return algorithm.num_minibatches
        wanted = algorithm.num_minibatches * algorithm.num_envs
        require(
            wanted % self.reference_num_envs == 0,
            f"scaling: num_minibatches x num_envs / reference_num_envs must be a whole number to hold the minibatch "
            f"size, got {algorithm.num_minibatches} x {algorithm.num_envs} / {self.reference_num_envs}. Choose "
            f"--num-envs as a multiple of the reference, or --scaling.hold num-minibatches.",
        )
        return wanted // self.reference_num_envs

    def _num_epochs(self, algorithm: PQNConfig, num_minibatches: int) -> int:
        if self.updates_per_batch is None:
            return algorithm.num_epochs
        num_epochs = max(1, self.updates_per_batch // num_minibatches)
        require(
            self.updates_per_batch % num_minibatches == 0,
            f"scaling.updates_per_batch must be a multiple of the minibatches of an epoch: {self.updates_per_batch} is "
            f"none of {num_minibatches}. Nearby: {num_epochs * num_minibatches}.",
        )
        return num_epochs


ScalingConfig = NoScalingConfig | ScalingRulesConfig
