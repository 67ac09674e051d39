"""The configuration of a run, and its presets: the one file that knows every choice."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import jax
from tyro.conf import arg

from pqn_eqx.callbacks import Callback, Plan
from pqn_eqx.envs.craftax import CraftaxConfig
from pqn_eqx.envs.gymnax import GymnaxConfig
from pqn_eqx.envs.resets import FullResetConfig
from pqn_eqx.errors import require, require_at_least
from pqn_eqx.evaluate import EvaluationConfig
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.losses import LossConfig, MSEConfig
from pqn_eqx.networks.encoders import MLPConfig
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
        if self.log_interval is not None:
            require_at_least(1, log_interval=self.log_interval)

    @property
    def plan(self) -> Plan:
        """The sizes of the run, intervals rounded to whole updates."""
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
            eval_max_steps=self.eval.max_steps or 0,
            eval_epsilon=self.eval.epsilon,
        )

    def build(self, callbacks: Sequence[Callback] = (), should_stop: Callable[[], bool] = lambda: False) -> Trainer:
        """The trainer of this run, on one device. Raises `ConfigError` for an environment that is not there."""
        env = self.env.build(self.algorithm.num_envs)
        eval_env = dataclasses.replace(self.env, reset=FullResetConfig()).build(self.eval.num_envs)
        algorithm = self.algorithm.build(
            env, self.network, self.loss, self.optimizer, self.exploration, self.total_timesteps
        )
        plan = dataclasses.replace(self.plan, eval_max_steps=self.eval.max_steps or env.time_limit)
        return Trainer(
            algorithms=stack_members([algorithm] * self.num_seeds),
            plan=plan,
            eval_env=eval_env,
            mesh=make_mesh(jax.devices()[:1]),
            callbacks=callbacks,
            should_stop=should_stop,
        )


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named starting point: what it is for, and its configuration."""

    summary: str
    config: TrainConfig


PRESETS: dict[str, Preset] = {
    "cartpole": Preset(
        "CartPole-v1 to its top score in half a million steps: about a minute on two cores. The default.",
        TrainConfig(),
    ),
    "acrobot": Preset(
        "Acrobot-v1 in half a million steps.",
        TrainConfig(
            name="acrobot",
            env=GymnaxConfig("Acrobot-v1"),
            algorithm=PQNConfig(learning_rate=5e-4),
            exploration=EpsilonGreedyConfig(finish=0.05),
        ),
    ),
    "craftax-classic": Preset(
        "Craftax-Classic from symbols, tuned for a million steps.",
        TrainConfig(
            name="craftax-classic",
            total_timesteps=1_000_000,
            env=CraftaxConfig("Craftax-Classic-Symbolic-v1"),
            network=QNetworkConfig(MLPConfig(hidden_size=512)),
            algorithm=PQNConfig(
                num_envs=128,
                num_steps=32,
                num_epochs=2,
                num_minibatches=16,
                learning_rate=5e-4,
                td_lambda=0.65,
                reward_scale=1.0,
            ),
            exploration=EpsilonGreedyConfig(start=1.0, finish=0.05, decay_fraction=0.2),
        ),
    ),
    "craftax": Preset(
        "Craftax from symbols, feed-forward, for a billion steps on an accelerator.",
        TrainConfig(
            name="craftax",
            total_timesteps=1_000_000_000,
            env=CraftaxConfig("Craftax-Symbolic-v1"),
            network=QNetworkConfig(MLPConfig(hidden_size=1024, num_layers=4)),
            algorithm=PQNConfig(
                num_envs=1024,
                num_steps=1,
                num_epochs=1,
                num_minibatches=1,
                td_lambda=0.0,
                max_grad_norm=1.0,
                reward_scale=1.0,
            ),
            exploration=EpsilonGreedyConfig(start=0.1, finish=0.005, decay_fraction=0.2),
            eval=EvaluationConfig(max_steps=10_000),
        ),
    ),
}
