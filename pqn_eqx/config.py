"""The configuration of a run: the one file that puts every choice together."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
from tyro.conf import arg

from pqn_eqx.callbacks import Callback, Plan
from pqn_eqx.envs.craftax import CraftaxConfig
from pqn_eqx.envs.gymnax import GymnaxConfig
from pqn_eqx.envs.resets import FullResetConfig
from pqn_eqx.errors import require, require_at_least
from pqn_eqx.evaluate import EvaluationConfig
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.losses import LossConfig, MSEConfig
from pqn_eqx.networks.q_network import QNetworkConfig
from pqn_eqx.optimizers import OptimizerConfig, RAdamConfig
from pqn_eqx.population import stack_members
from pqn_eqx.pqn import PQNConfig
from pqn_eqx.sharding import make_mesh
from pqn_eqx.trainer import Trainer

EnvConfig = GymnaxConfig | CraftaxConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    total_timesteps: int = 500_000
    """Environment steps of the whole run, for each member; rounded down to whole updates."""
    seed: int = 0
    """Seed of the first member; the others take the seeds that follow."""
    num_seeds: int = 1
    """Members of the population: runs that differ in their seed, trained together in one program."""
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
    eval: EvaluationConfig = EvaluationConfig()
    """Evaluation by whole episodes."""
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
        self.algorithm.check(self.network)
        if self.log_interval is not None:
            require_at_least(1, log_interval=self.log_interval)

    def plan(self, time_limit: int) -> Plan:
        """The sizes of the run, intervals rounded to whole updates; `time_limit` is the environment's, in steps."""
        steps = self.algorithm.steps_per_update
        num_updates = self.total_timesteps // steps
        log = num_updates // 100 if self.log_interval is None else round(self.log_interval / steps)
        log = min(max(1, log), num_updates)
        evaluate = num_updates / 10 if self.eval.interval is None else self.eval.interval / steps
        return Plan(
            seeds=tuple(range(self.seed, self.seed + self.num_seeds)),
            num_envs=self.algorithm.num_envs,
            num_updates=num_updates,
            steps_per_update=steps,
            log_interval=log,
            eval_interval=max(1, round(evaluate / log)) * log,
            eval_envs=self.eval.num_envs,
            eval_max_steps=self.eval.max_steps or time_limit,
            eval_epsilon=self.eval.epsilon,
        )

    def build(self, callbacks: Sequence[Callback] = (), should_stop: Callable[[], bool] = lambda: False) -> Trainer:
        """The trainer of this run, on one device. Raises `ConfigError` for an environment that is not there."""
        env = self.env.build(self.algorithm.num_envs)
        eval_env = dataclasses.replace(self.env, reset=FullResetConfig()).build(self.eval.num_envs)
        algorithm = self.algorithm.build(
            env, self.network, self.loss, self.optimizer, self.exploration, self.total_timesteps
        )
        # A network that cannot read the observations is refused here, before anything compiles.
        jax.eval_shape(algorithm.init, jnp.arange(1), jax.random.key(0))
        return Trainer(
            algorithms=stack_members([algorithm] * self.num_seeds),
            plan=self.plan(env.time_limit),
            eval_env=eval_env,
            mesh=make_mesh(jax.devices()[:1]),
            callbacks=callbacks,
            should_stop=should_stop,
        )
