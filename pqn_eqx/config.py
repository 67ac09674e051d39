"""The configuration of a run: the one file that puts every choice together."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
from tyro.conf import arg

from pqn_eqx.callbacks import Callback, Plan
from pqn_eqx.checkpoint import CheckpointConfig
from pqn_eqx.envs.base import Environment
from pqn_eqx.envs.craftax import CraftaxConfig
from pqn_eqx.envs.gymnax import GymnaxConfig
from pqn_eqx.envs.resets import FullResetConfig
from pqn_eqx.episodes import EvaluationConfig
from pqn_eqx.errors import require, require_at_least
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.hosts import HostsConfig
from pqn_eqx.losses import LossConfig, MSEConfig
from pqn_eqx.networks.q_network import QNetworkConfig
from pqn_eqx.optimizers import OptimizerConfig, RAdamConfig
from pqn_eqx.population import Member, stack_members
from pqn_eqx.pqn import PQN, PQNConfig
from pqn_eqx.scaling import NoScalingConfig, ScalingConfig
from pqn_eqx.sharding import MeshConfig, describe
from pqn_eqx.sweep import SweepConfig, members, settings, with_values
from pqn_eqx.trainer import Trainer
from pqn_eqx.wandb_logger import WandbConfig

EnvConfig = GymnaxConfig | CraftaxConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    total_timesteps: int = 500_000
    """Environment steps of the whole run, for each member; rounded down to whole updates."""
    seed: int = 0
    """Seed of the first member; the others take the seeds that follow."""
    num_seeds: int = 1
    """Seeds of every setting. All members of the population, settings x seeds, train together in one program."""
    sweep: SweepConfig = SweepConfig()
    """Hyperparameters that differ between members."""
    sweep_zip: bool = False
    """Take the first values of all swept options together, then the second ones, instead of every combination."""
    sweep_samples: int = 0
    """Settings to draw at random between the two values of every swept option, log-uniformly; 0 draws none."""
    members_per_group: int | None = None
    """Members trained at once; the rest of the population follows in further groups. For populations that do not fit
    in memory; default: all of them. Changes no member's results."""
    algorithm: Annotated[PQNConfig, arg(name="")] = PQNConfig()
    """PQN."""
    exploration: EpsilonGreedyConfig = EpsilonGreedyConfig()
    """The behaviour policy."""
    env: EnvConfig = GymnaxConfig()
    """The environment."""
    network: QNetworkConfig = QNetworkConfig()
    """The Q-network."""
    loss: LossConfig = MSEConfig()
    """How values are regressed."""
    optimizer: OptimizerConfig = RAdamConfig()
    """How gradients become steps."""
    scaling: ScalingConfig = NoScalingConfig()
    """Rules that carry the hyperparameters to another number of environments."""
    mesh: MeshConfig = MeshConfig()
    """Which devices hold what."""
    hosts: HostsConfig = HostsConfig()
    """Several processes as one run."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    eval: EvaluationConfig = EvaluationConfig()
    """Evaluation by whole episodes."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    log_interval: int | None = None
    """Environment steps between log lines, rounded to whole updates; default: 1 % of the run, at least an update."""
    name: str = "cartpole"
    """Name of the run: the start of its default folder."""
    run_dir: Path | None = None
    """Folder for the run's files, which must hold no run yet; default: runs/NAME-TIME-ID."""

    def __post_init__(self):
        require_at_least(1, num_seeds=self.num_seeds)
        require(
            self.seed >= 0 and self.seed + self.num_seeds <= 2**31,
            f"seed must lie in [0, 2^31 - num_seeds], got {self.seed}.",
        )
        require(
            self.total_timesteps >= self.algorithm.steps_per_update,
            f"total_timesteps must allow at least one update: {self.total_timesteps:,} is less than num_envs x "
            f"num_steps = {self.algorithm.num_envs} x {self.algorithm.num_steps} = "
            f"{self.algorithm.steps_per_update:,}. Raise it, or lower --num-envs or --num-steps.",
        )
        require_at_least(0, sweep_samples=self.sweep_samples)
        if self.members_per_group is not None:
            require_at_least(1, members_per_group=self.members_per_group)
        self.scaling.apply(self.algorithm, self.exploration)[0].check(self.network)
        for member in self.members[:: self.num_seeds]:
            if member.values:  # each setting on its own, as strictly as a run of its own
                self.of_member(member)
        if self.log_interval is not None:
            require_at_least(1, log_interval=self.log_interval)

    @property
    def members(self) -> tuple[Member, ...]:
        """The whole population. Raises `ConfigError` where the sweep's values do not fit each other."""
        swept = settings(self.sweep, self.sweep_zip, self.sweep_samples, self.seed)
        return members(swept, range(self.seed, self.seed + self.num_seeds))

    @property
    def groups(self) -> list[tuple[Member, ...]]:
        """The population in the groups that are trained one after the other."""
        everyone = self.members
        size = self.members_per_group or len(everyone)
        return [everyone[start : start + size] for start in range(0, len(everyone), size)]

    def of_member(self, member: Member) -> "TrainConfig":
        """The run of one member alone: its values in their places, and no sweep.

        Raises `ConfigError` where a value is refused by the field it is for.
        """
        alone = dataclasses.replace(self, seed=member.seed, num_seeds=1, **_ALONE)
        return with_values(alone, member.values)

    @property
    def scaled(self) -> "TrainConfig":
        """With the scaling rules applied: the numbers that are trained with."""
        algorithm, exploration, _ = self.scaling.apply(self.algorithm, self.exploration)
        return dataclasses.replace(self, algorithm=algorithm, exploration=exploration, scaling=NoScalingConfig())

    def plan(self, time_limit: int, group: Sequence[Member] | None = None, notes: Sequence[str] = ()) -> Plan:
        """The sizes of the run of a group, by default of all members; intervals are rounded to whole updates.

        `time_limit` is the environment's, in steps.
        """
        steps = self.algorithm.steps_per_update
        num_updates = self.total_timesteps // steps
        log = num_updates // 100 if self.log_interval is None else round(self.log_interval / steps)
        log = min(max(1, log), num_updates)
        evaluate = num_updates / 10 if self.eval.interval is None else self.eval.interval / steps
        evaluate = max(1, round(evaluate / log)) * log
        return Plan(
            members=tuple(group or self.members),
            population=len(self.members),
            num_envs=self.algorithm.num_envs,
            num_updates=num_updates,
            steps_per_update=steps,
            log_interval=log,
            eval_interval=evaluate,
            checkpoint_interval=self._checkpoint_interval(num_updates, log, evaluate),
            checkpoint_seconds=60 * (self.checkpoint.minutes or math.inf),
            eval_envs=self.eval.num_envs,
            eval_max_steps=self.eval.max_steps or time_limit,
            eval_epsilon=self.eval.epsilon,
            notes=tuple(notes),
        )

    def _checkpoint_interval(self, num_updates: int, log_interval: int, eval_interval: int) -> int:
        """Updates between checkpoints: none (0), at the end alone (num_updates), or a multiple of the log interval."""
        if self.checkpoint.interval is None:
            return eval_interval if self.checkpoint.minutes is None else num_updates
        if self.checkpoint.interval == 0:
            return 0
        wanted = self.checkpoint.interval / self.algorithm.steps_per_update
        return max(1, round(wanted / log_interval)) * log_interval

    def build(
        self,
        callbacks: Sequence[Callback] = (),
        should_stop: Callable[[], bool] = lambda: False,
        group: Sequence[Member] | None = None,
    ) -> Trainer:
        """The trainer of a group of the population, by default of all of it.

        Raises `ConfigError` for an environment that is not there, or a mesh that cannot be.
        """
        group = group or self.members
        blocks = self.scaled.algorithm.blocks(self.network)
        env = self.env.build(self.algorithm.num_envs // blocks)
        eval_env = dataclasses.replace(self.env, reset=FullResetConfig()).build(self.eval.num_envs)
        algorithms = [self.of_member(member).scaled._build_algorithm(env) for member in group]
        # A network that cannot read the observations is refused here, before anything compiles.
        jax.eval_shape(algorithms[0].init, jnp.arange(1), jax.random.key(0))
        mesh = self.mesh.build(len(group), blocks, self.eval.num_envs)
        _, _, scaling_notes = self.scaling.apply(self.algorithm, self.exploration)
        return Trainer(
            algorithms=stack_members(algorithms),
            plan=self.plan(env.time_limit, group, [f"Devices: {describe(mesh)}.", *scaling_notes]),
            eval_env=eval_env,
            mesh=mesh,
            callbacks=callbacks,
            should_stop=should_stop,
        )

    def _build_algorithm(self, env: Environment) -> PQN:
        return self.algorithm.build(
            env, self.network, self.loss, self.optimizer, self.exploration, self.total_timesteps
        )


_ALONE = {"sweep": SweepConfig(), "sweep_zip": False, "sweep_samples": 0, "members_per_group": None}
"""What makes a run one of a single setting."""
