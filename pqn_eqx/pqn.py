"""PQN, the Parallelised Q-Network (arXiv 2407.04811): online Q(λ) in many environments at once, with
no replay buffer and no target network.

One update: act for `num_steps` steps in `num_envs` environments, compute Q(λ) returns of the window, then take
`num_epochs` × `num_minibatches` gradient steps on them.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from pqn_eqx.envs.base import Environment
from pqn_eqx.errors import require, require_at_least, require_positive, require_unit_interval
from pqn_eqx.exploration import EpsilonGreedyConfig, LinearSchedule
from pqn_eqx.losses import Loss, LossConfig
from pqn_eqx.metrics import Metrics, episode_metrics
from pqn_eqx.networks.q_network import QNetwork, QNetworkConfig
from pqn_eqx.optimizers import OptimizerConfig
from pqn_eqx.returns import lambda_returns, successor_values
from pqn_eqx.rollout import Transition, initial_actors, q_values, rollout
from pqn_eqx.sharding import TrainState, mean_over_envs


class Learner(eqx.Module):
    """What learns: the same on every device that holds environments of the member."""

    network: QNetwork
    optimizer_state: Any
    key: Key[Array, ""]
    update: Int[Array, ""]
    """Updates taken. Everything that changes over a run is a function of it, so that a resumed run continues."""


class PQN(eqx.Module):
    """The algorithm of one member. Its numbers are leaves, so that a population is this object with a leading M."""

    env: Environment = eqx.field(static=True)
    network: QNetworkConfig = eqx.field(static=True)
    optimizer: OptimizerConfig = eqx.field(static=True)
    loss: Loss
    epsilon: LinearSchedule
    """Over environment steps."""
    learning_rate: LinearSchedule
    """Over updates."""
    gamma: Float[Array, ""]
    td_lambda: Float[Array, ""]
    reward_scale: Float[Array, ""]
    max_grad_norm: Float[Array, ""]
    num_steps: int = eqx.field(static=True)
    num_minibatches: int = eqx.field(static=True)
    num_epochs: int = eqx.field(static=True)
    steps_per_update: int = eqx.field(static=True)
    """Environment steps of one update, over all environments on all devices."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What `update` reports."""
        learning = ("loss", "q_mean", "td_error", "grad_norm", "epsilon", "learning_rate")
        return (*learning, "episode_return", "episode_length", *self.env.extra_names)

    def init(self, index: Int[Array, " N"], key: Key[Array, ""]) -> TrainState:
        """The state before the first update, with the environments numbered `index` among the member's."""
        network_key, env_key, key = jax.random.split(key, 3)
        env = self.env
        network = self.network.build(env.obs_shape, env.num_actions, self.loss.num_outputs, key=network_key)
        learner = Learner(network, self.transformation(self.learning_rate.start).init(network), key, jnp.zeros((), int))
        return TrainState(learner, initial_actors(env, network, index, env_key))

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Act, compute returns, learn. The metrics are those of this update, over all environments."""
        learner, actors = state.learner, state.actors
        key, rollout_key, shuffle_key = jax.random.split(learner.key, 3)
        epsilon = self.epsilon(learner.update.astype(float) * self.steps_per_update)
        learning_rate = self.learning_rate(learner.update)

        actors, transitions, episodes = rollout(
            self.env, learner.network, self.loss, epsilon, actors, rollout_key, self.num_steps
        )
        last_q, _ = q_values(learner.network, self.loss, actors.memory, actors.obs, actors.reset)
        targets = self.targets(transitions, jnp.max(last_q, axis=-1))
        network, optimizer_state, learning = self.learn(learner, transitions, targets, learning_rate, shuffle_key)

        metrics = Metrics.of(epsilon=(epsilon, 1), learning_rate=(learning_rate, 1), **learning)
        metrics = metrics.join(episode_metrics(episodes, self.env.extra_names)).over_devices()
        return TrainState(Learner(network, optimizer_state, key, learner.update + 1), actors), metrics

    def targets(self, transitions: Transition, last_value: Float[Array, " N"]) -> Float[Array, "T N"]:
        """Q(λ) returns of the window, in scaled rewards; `last_value` is that of the observation after it."""
        next_value = successor_values(transitions.value, last_value, transitions.final_value, transitions.truncated)
        return lambda_returns(
            transitions.reward * self.reward_scale,
            transitions.terminated,
            transitions.truncated,
            next_value,
            self.gamma,
            self.td_lambda,
        )

    def learn(self, learner, transitions, targets, learning_rate, key):
        """All gradient steps of an update: epochs of minibatches, shuffled by index over time and environments."""
        batch = jax.tree.map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[2:]),
            (transitions.obs, transitions.action, transitions.valid, targets),
        )
        transformation = self.transformation(learning_rate)

        def gradient_step(carry, indices):
            network, optimizer_state = carry
            minibatch = jax.tree.map(lambda leaf: leaf[indices], batch)
            grads, metrics = jax.grad(self.minibatch_loss, has_aux=True)(network, *minibatch)
            grads = mean_over_envs(grads)
            updates, optimizer_state = transformation.update(grads, optimizer_state, network)
            metrics |= {"grad_norm": optax.global_norm(grads)}
            return (optax.apply_updates(network, updates), optimizer_state), metrics

        def epoch(carry, key):
            order = jax.random.permutation(key, targets.size).reshape(self.num_minibatches, -1)
            return jax.lax.scan(gradient_step, carry, order)

        carry = (learner.network, learner.optimizer_state)
        (network, optimizer_state), metrics = jax.lax.scan(epoch, carry, jax.random.split(key, self.num_epochs))
        num_gradient_steps = self.num_epochs * self.num_minibatches
        return network, optimizer_state, {k: (jnp.sum(v), num_gradient_steps) for k, v in metrics.items()}

    def minibatch_loss(self, network: QNetwork, obs, action, valid, target):
        """The mean loss of the chosen actions' values against their targets [B], and metrics of the same minibatch.

        Invalid transitions cost nothing. The mean is over all B, so that the mean over devices is that of the whole.
        """

        def one(obs, action, target):
            outputs, _ = network.step(network.initial_memory(), obs, jnp.zeros((), bool))
            chosen = outputs[action]
            return self.loss.loss(chosen, target), self.loss.value(chosen)

        losses, q = jax.vmap(one)(obs, action, target)
        loss = jnp.mean(jnp.where(valid, losses, 0))
        return loss, {"loss": loss, "q_mean": jnp.mean(q), "td_error": jnp.mean(jnp.abs(q - target))}

    def transformation(self, learning_rate: Float[Array, ""]) -> optax.GradientTransformation:
        """Clipping by the *global* norm, the optimiser, then a step of `learning_rate` downhill."""
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            self.optimizer.build(),
            optax.scale_by_learning_rate(learning_rate),
        )


@dataclasses.dataclass(frozen=True)
class PQNConfig:
    """PQN's own numbers. The defaults are purejaxql's for CartPole."""

    num_envs: int = 32
    """Environments stepped in parallel, for each member of the population."""
    num_steps: int = 64
    """Steps in each environment per update; the window of the Q(λ) returns."""
    num_minibatches: int = 16
    """Minibatches per epoch; must divide num_envs x num_steps."""
    num_epochs: int = 4
    """Passes over each window of experience."""
    gamma: float = 0.99
    """Discount per step."""
    td_lambda: float = 0.95
    """λ of the Q(λ) returns: 0 bootstraps after every step, 1 at the end of the window alone."""
    learning_rate: float = 1e-4
    """Step size of the optimiser at the first update."""
    anneal_learning_rate: bool = True
    """Let the learning rate fall linearly to 0 over the run."""
    max_grad_norm: float = 10.0
    """Gradients of a larger global norm are scaled down to it."""
    reward_scale: float = 0.1
    """Factor on the rewards the agent learns from. Reported returns are always the raw ones."""

    def __post_init__(self):
        require_at_least(
            1,
            num_envs=self.num_envs,
            num_steps=self.num_steps,
            num_minibatches=self.num_minibatches,
            num_epochs=self.num_epochs,
        )
        require_unit_interval(gamma=self.gamma, td_lambda=self.td_lambda)
        require_positive(
            learning_rate=self.learning_rate, max_grad_norm=self.max_grad_norm, reward_scale=self.reward_scale
        )
        require(
            self.steps_per_update % self.num_minibatches == 0,
            f"num_minibatches must divide num_envs x num_steps: {self.num_minibatches} does not divide "
            f"{self.num_envs} x {self.num_steps} = {self.steps_per_update}. Divisors nearby: "
            f"{', '.join(map(str, _divisors_near(self.steps_per_update, self.num_minibatches)))}.",
        )

    @property
    def steps_per_update(self) -> int:
        """Environment steps of one update."""
        return self.num_envs * self.num_steps

    def build(
        self,
        env: Environment,
        network: QNetworkConfig,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        exploration: EpsilonGreedyConfig,
        total_timesteps: int,
    ) -> PQN:
        """The algorithm for a run of `total_timesteps` environment steps, on what it is composed of."""
        num_updates = total_timesteps // self.steps_per_update
        final_learning_rate = 0.0 if self.anneal_learning_rate else self.learning_rate
        return PQN(
            env=env,
            network=network,
            optimizer=optimizer,
            loss=loss.build(),
            epsilon=exploration.build(total_timesteps),
            learning_rate=LinearSchedule(self.learning_rate, final_learning_rate, num_updates),
            gamma=jnp.asarray(self.gamma),
            td_lambda=jnp.asarray(self.td_lambda),
            reward_scale=jnp.asarray(self.reward_scale),
            max_grad_norm=jnp.asarray(self.max_grad_norm),
            num_steps=self.num_steps,
            num_minibatches=self.num_minibatches,
            num_epochs=self.num_epochs,
            steps_per_update=self.steps_per_update,
        )


def _divisors_near(number: int, target: int) -> list[int]:
    divisors = [d for d in range(1, number + 1) if number % d == 0] if number <= 10**7 else [1]
    return sorted(sorted(divisors, key=lambda d: abs(d - target))[:3])
