"""PQN, the Parallelised Q-Network (arXiv 2407.04811): online Q(λ) in many environments at once, with
no replay buffer and no target network.

One update: act for `num_steps` steps in `num_envs` environments, compute Q(λ) returns of the window, then take
`num_epochs` × `num_minibatches` gradient steps on them. What a minibatch draws from is *sequences*: of one step each
for a feed-forward network, of the whole window of an environment for one with a memory.
"""

import dataclasses
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, PyTree

from pqn_eqx.control_flow import map_with_mean
from pqn_eqx.envs.base import Environment
from pqn_eqx.errors import divisors_near, require, require_at_least, require_positive, require_unit_interval
from pqn_eqx.exploration import EpsilonGreedyConfig, LinearSchedule
from pqn_eqx.losses import Loss, LossConfig
from pqn_eqx.metrics import Metrics, episode_metrics
from pqn_eqx.minibatches import shuffled_minibatches
from pqn_eqx.networks.memory import MemoryState
from pqn_eqx.networks.normalization import split_statistics
from pqn_eqx.networks.q_network import Inputs, QNetwork, QNetworkConfig
from pqn_eqx.optimizers import OptimizerConfig
from pqn_eqx.returns import lambda_returns, successor_values
from pqn_eqx.rollout import Actors, Transition, initial_actors, q_values, rollout
from pqn_eqx.sharding import TrainState, blocks_here, mean_over_envs, share_of_envs


class Learner(eqx.Module):
    """What learns: the same on every device that holds environments of the member."""

    network: QNetwork
    optimizer_state: Any
    key: Key[Array, ""]
    update: Int[Array, ""]
    """Updates taken. Everything that changes over a run is a function of it, so that a resumed run continues."""


class Past(eqx.Module):
    """The `memory_window` W steps before the present window: no more of them than is used. Leaves lead with N, W."""

    memory: MemoryState
    """Before the oldest of the steps; leaves lead with N alone."""
    steps: Transition | Inputs
    """Transitions where the steps are trained on, inputs where they burn in."""


class PQNActors(eqx.Module):
    """The environments, and what learning keeps of their past; every leaf has a leading N."""

    current: Actors
    past: Past | None


class Sequences(eqx.Module):
    """B sequences of L steps to learn from; time comes before B."""

    memory: MemoryState
    """Before the first step, [B ...]."""
    burn_in: Inputs | None
    """What the memory is to go through before the first step, [W, B]."""
    transitions: Transition
    targets: Float[Array, "L B"]
    following: Inputs | None
    """What the network is told after the last step, [B]; none where the targets are given."""

    def take(self, indices: Int[Array, " b"]) -> "Sequences":
        """The sequences of these numbers."""

        def pick(axis: int, tree: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.take(leaf, indices, axis), tree)

        return Sequences(
            pick(0, self.memory),
            pick(1, self.burn_in),
            pick(1, self.transitions),
            pick(1, self.targets),
            pick(0, self.following),
        )


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
    warmup_updates: Float[Array, ""]
    """Updates over which the learning rate rises to what its schedule says."""
    gamma: Float[Array, ""]
    td_lambda: Float[Array, ""]
    reward_scale: Float[Array, ""]
    max_grad_norm: Float[Array, ""]
    num_steps: int = eqx.field(static=True)
    num_minibatches: int = eqx.field(static=True)
    num_epochs: int = eqx.field(static=True)
    num_env_blocks: int = eqx.field(static=True)
    memory_window: int = eqx.field(static=True)
    burns_in: bool = eqx.field(static=True)
    recompute_targets: bool = eqx.field(static=True)
    learns_windows: bool = eqx.field(static=True)
    """Whether a sequence is the window of an environment, not a step of its own."""
    steps_per_update: int = eqx.field(static=True)
    """Environment steps of one update, over all environments on all devices."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What `update` reports."""
        learning = ("loss", "q_mean", "td_error", "grad_norm", "epsilon", "learning_rate", *self.loss.metric_names)
        return (*learning, "episode_return", "episode_length", *self.env.extra_names)

    def init(self, index: Int[Array, " N"], key: Key[Array, ""]) -> TrainState:
        """The state before the first update, with the environments numbered `index` among the member's."""
        network_key, env_key, key = jax.random.split(key, 3)
        env = self.env
        network = self.network.build(env.obs_shape, env.num_actions, self.loss.num_outputs, key=network_key)
        optimizer_state = self.transformation(self.learning_rate.start).init(split_statistics(network)[0])
        learner = Learner(network, optimizer_state, key, jnp.zeros((), int))
        actors = initial_actors(env, network, index, env_key)
        return TrainState(learner, PQNActors(actors, self._no_past(actors)))

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Act, compute returns, learn. The metrics are those of this update, over all environments."""
        learner, past = state.learner, state.actors.past
        key, rollout_key, shuffle_key = jax.random.split(learner.key, 3)
        epsilon = self.epsilon(learner.update.astype(float) * self.steps_per_update)
        warm = jnp.minimum(1, (learner.update + 1) / jnp.maximum(self.warmup_updates, 1))
        learning_rate = self.learning_rate(learner.update) * warm

        memory = state.actors.current.memory
        actors, transitions, episodes, memory_before_kept = rollout(
            self.env,
            learner.network,
            self.loss,
            epsilon,
            state.actors.current,
            rollout_key,
            self.num_steps,
            remember_at=self.num_steps - self.memory_window if self.memory_window else None,
        )
        sequences = self.sequences(learner.network, memory, past, transitions, actors)
        network, optimizer_state, learning = self.learn(learner, sequences, learning_rate, shuffle_key)
        observations = transitions.inputs.obs.reshape(-1, *self.env.obs_shape)
        network = network.observe(observations, mean_over_envs, self.steps_per_update)

        metrics = Metrics.of(epsilon=(epsilon, 1), learning_rate=(learning_rate, 1), **learning)
        # Every device has taken the same steps, each on its share: together they count once.
        metrics = metrics.weighed(share_of_envs()).join(episode_metrics(episodes, self.env.extra_names)).over_devices()
        learner = Learner(network, optimizer_state, key, learner.update + 1)
        return TrainState(learner, PQNActors(actors, self._past(memory_before_kept, transitions))), metrics

    def sequences(
        self, network: QNetwork, memory: MemoryState, past: Past | None, transitions: Transition, actors: Actors
    ) -> Sequences:
        """What there is to learn from: the window [T, N] with its targets, and the past before it.

        `memory` is that at the start of the window, `actors` are those after it.
        """
        burn_in = None
        if past is not None:
            memory, steps = past.memory, _time_first(past.steps)
            if self.burns_in:
                burn_in = steps
            else:
                transitions = jax.tree.map(lambda *parts: jnp.concatenate(parts), steps, transitions)
        last_q, _ = q_values(network, self.loss, actors.memory, actors.inputs)
        targets = self.targets(transitions, jnp.max(last_q, axis=-1))
        if self.learns_windows:
            return Sequences(memory, burn_in, transitions, targets, actors.inputs)
        # Each step is a sequence of its own; nothing follows it, since its target is known.
        transitions, targets = jax.tree.map(lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:]), (transitions, targets))
        return Sequences((), None, transitions, targets, None)

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

    def learn(self, learner: Learner, sequences: Sequences, learning_rate: Float[Array, ""], key: Key[Array, ""]):
        """All gradient steps of an update: epochs of minibatches of sequences, shuffled by index within blocks."""
        transformation = self.transformation(learning_rate)
        blocks = blocks_here(self.num_env_blocks)
        num_sequences = sequences.targets.shape[1]
        sequences_per_env = 1 if self.learns_windows else self.num_steps

        def gradient_step(carry, indices):
            network, optimizer_state = carry
            parameters, statistics = split_statistics(network)
            grads, (statistics, metrics) = jax.grad(self.minibatch_loss, has_aux=True)(
                parameters, statistics, sequences.take(indices)
            )
            grads = mean_over_envs(grads)
            updates, optimizer_state = transformation.update(grads, optimizer_state, parameters)
            metrics |= {"grad_norm": optax.global_norm(grads)}
            return (eqx.combine(optax.apply_updates(parameters, updates), statistics), optimizer_state), metrics

        def epoch(carry, key):
            minibatches = shuffled_minibatches(key, blocks, num_sequences, sequences_per_env, self.num_minibatches)
            return jax.lax.scan(gradient_step, carry, minibatches)

        carry = (learner.network, learner.optimizer_state)
        (network, optimizer_state), metrics = jax.lax.scan(epoch, carry, jax.random.split(key, self.num_epochs))
        num_gradient_steps = self.num_epochs * self.num_minibatches
        return network, optimizer_state, {k: (jnp.sum(v), num_gradient_steps) for k, v in metrics.items()}

    def minibatch_loss(self, parameters: QNetwork, statistics: QNetwork, batch: Sequences):
        """The mean loss of the chosen actions' values against their targets; the moved statistics, and metrics.

        Invalid transitions cost nothing. The mean is over all L x B, so that the mean over devices is that of the
        whole.
        """
        network = eqx.combine(parameters, statistics)
        transitions, targets, inputs = batch.transitions, batch.targets, batch.transitions.inputs
        memory = self._burnt_in(network, batch)
        if self.recompute_targets:
            inputs = jax.tree.map(lambda now, then: jnp.concatenate([now, then[None]]), inputs, batch.following)
        outputs, _, network = _unroll(network, memory, inputs)
        if self.recompute_targets:
            values = jax.lax.stop_gradient(jnp.max(self.loss.value(outputs), axis=-1))
            transitions = eqx.tree_at(lambda t: t.value, transitions, values[:-1])
            outputs, targets = outputs[:-1], self.targets(transitions, values[-1])

        def one(outputs, action, target):
            chosen = outputs[action]
            return self.loss.loss(chosen, target), self.loss.value(chosen)

        losses, q = jax.vmap(jax.vmap(one))(outputs, transitions.action, targets)
        loss = jnp.mean(jnp.where(transitions.valid, losses, 0))
        metrics = {"loss": loss, "q_mean": jnp.mean(q), "td_error": jnp.mean(jnp.abs(q - targets))}
        metrics |= {name: jnp.mean(value) for name, value in self.loss.metrics(targets).items()}
        return loss, (split_statistics(network)[1], metrics)

    def _burnt_in(self, network: QNetwork, batch: Sequences) -> MemoryState:
        """The memory before the first step, as the network of now has it; no gradient flows into the burn-in."""
        if batch.burn_in is None:
            return batch.memory
        _, memory, _ = _unroll(network, batch.memory, batch.burn_in)
        return jax.lax.stop_gradient(memory)

    def _past(self, memory: MemoryState, transitions: Transition) -> Past | None:
        """What the next update will need of this window [T, N], and the memory before it."""
        if not self.memory_window:
            return None
        kept = jax.tree.map(lambda leaf: leaf[self.num_steps - self.memory_window :], transitions)
        return Past(memory, _time_first(kept.inputs if self.burns_in else kept))

    def _no_past(self, actors: Actors) -> Past | None:
        """The past before the first update: steps that cost nothing, and that the first episode's start hides."""
        if not self.memory_window:
            return None
        number, no = jnp.zeros(actors.index.shape), jnp.zeros(actors.index.shape, bool)
        blank = Transition(actors.inputs, actors.index, number, no, no, no, number, number)
        steps = jax.tree.map(
            lambda leaf: jnp.repeat(jnp.zeros_like(leaf)[:, None], self.memory_window, axis=1),
            blank.inputs if self.burns_in else blank,
        )
        return Past(actors.memory, steps)

    def transformation(self, learning_rate: Float[Array, ""]) -> optax.GradientTransformation:
        """Clipping by the *global* norm, the optimiser, then a step of `learning_rate` downhill."""
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            self.optimizer.build(),
            optax.scale_by_learning_rate(learning_rate),
        )


def _time_first(tree: PyTree) -> PyTree:
    """[N, W] as [W, N], and the other way round."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)


def _unroll(network: QNetwork, memory: MemoryState, inputs: Inputs):
    """Outputs [L, B, A, K], the memory after them, and the network with its batch statistics moved."""

    def unroll(mean, memory, inputs):
        return network.unroll(memory, inputs, mean)

    return map_with_mean(unroll, mean_over_envs, in_axes=(0, 1), out_axes=(1, 0, None))(memory, inputs)


@dataclasses.dataclass(frozen=True)
class PQNConfig:
    """PQN's own numbers. The defaults are purejaxql's for CartPole."""

    num_envs: int = 32
    """Environments stepped in parallel, for each member of the population."""
    num_steps: int = 64
    """Steps in each environment per update; the window of the Q(λ) returns."""
    num_minibatches: int = 16
    """Minibatches per epoch; must divide num_envs x num_steps, or num_envs where the network has a memory."""
    num_epochs: int = 4
    """Passes over each window of experience."""
    gamma: float = 0.99
    """Discount per step."""
    td_lambda: float = 0.95
    """λ of the Q(λ) returns: 0 bootstraps after every step, 1 at the end of the window alone."""
    num_env_blocks: int | None = None
    """Blocks of neighbouring environments that are shuffled, and share new worlds, among themselves: what makes results
    independent of the number of devices, which must divide it. Default: the largest power of 2 up to 64 that fits and
    leaves 16 environments in a block."""
    learning_rate: float = 1e-4
    """Step size of the optimiser at the first update."""
    anneal_learning_rate: bool = True
    """Let the learning rate fall linearly to 0 over the run."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises linearly from near 0 to its schedule."""
    max_grad_norm: float = 10.0
    """Gradients of a larger global norm are scaled down to it."""
    reward_scale: float = 0.1
    """Factor on the rewards the agent learns from. Reported returns are always the raw ones."""
    memory_window: int = 0
    """Steps of the past put before each window, for a network with a memory; at most num_steps."""
    memory_window_use: Literal["burn-in", "train"] = "burn-in"
    """What the past steps are for: to bring the memory up to date without a gradient, or to be trained on again."""
    recompute_targets: bool = False
    """Compute the targets anew from each minibatch's own values (purejaxql's way for recurrent networks) instead of
    once per update from the values seen while acting. Minibatches are then over environments."""

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
        require_at_least(0, warmup_updates=self.warmup_updates)
        require(
            self.steps_per_update % self.num_minibatches == 0,
            f"num_minibatches must divide num_envs x num_steps: {self.num_minibatches} does not divide "
            f"{self.num_envs} x {self.num_steps} = {self.steps_per_update}. Divisors nearby: "
            f"{divisors_near(self.steps_per_update, self.num_minibatches)}.",
        )
        if self.num_env_blocks is not None:
            require(
                self.num_env_blocks >= 1 and self.num_envs % self.num_env_blocks == 0,
                f"num_env_blocks must divide num_envs: {self.num_env_blocks} does not divide {self.num_envs}. Divisors "
                f"nearby: {divisors_near(self.num_envs, self.num_env_blocks)}.",
            )
        require(
            0 <= self.memory_window <= self.num_steps,
            f"memory_window must lie in [0, num_steps], got {self.memory_window} with num_steps {self.num_steps}.",
        )

    def check(self, network: QNetworkConfig) -> None:
        """Raise `ConfigError` where these numbers and the network do not go together."""
        require(
            network.is_recurrent or not self.memory_window,
            f"memory_window {self.memory_window} needs a network with a memory; choose one, such as "
            f"network.memory:gru, or set --memory-window 0.",
        )
        require(
            not self._learns_windows(network) or self.num_envs % self.num_minibatches == 0,
            f"num_minibatches must divide num_envs where whole sequences are learnt from (a network with a memory, or "
            f"recompute_targets): {self.num_minibatches} does not divide {self.num_envs}. Divisors nearby: "
            f"{divisors_near(self.num_envs, self.num_minibatches)}.",
        )
        if self.num_env_blocks is not None:
            sequences = self._sequences(network) // self.num_env_blocks
            require(
                sequences % self.num_minibatches == 0,
                f"num_minibatches must divide the sequences of each of the num_env_blocks: {self.num_minibatches} does "
                f"not divide {self._sequences(network)} / {self.num_env_blocks} = {sequences}. Lower --num-env-blocks, "
                f"or choose --num-minibatches out of {divisors_near(sequences, self.num_minibatches)}.",
            )

    def blocks(self, network: QNetworkConfig) -> int:
        """The number of blocks of environments: that given, or the default."""
        if self.num_env_blocks is not None:
            return self.num_env_blocks
        return next(
            (
                blocks
                for blocks in (64, 32, 16, 8, 4, 2)
                if self.num_envs % blocks == 0
                and self.num_envs >= 16 * blocks
                and self._sequences(network) // blocks % self.num_minibatches == 0
            ),
            1,
        )

    def _learns_windows(self, network: QNetworkConfig) -> bool:
        return network.is_recurrent or self.recompute_targets

    def _sequences(self, network: QNetworkConfig) -> int:
        """Sequences of an update, of which minibatches are made."""
        return self.num_envs if self._learns_windows(network) else self.steps_per_update

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
        self.check(network)
        num_updates = total_timesteps // self.steps_per_update
        final_learning_rate = 0.0 if self.anneal_learning_rate else self.learning_rate
        return PQN(
            env=env,
            network=network,
            optimizer=optimizer,
            loss=loss.build(),
            epsilon=exploration.build(total_timesteps),
            learning_rate=LinearSchedule(self.learning_rate, final_learning_rate, num_updates),
            warmup_updates=jnp.asarray(float(self.warmup_updates)),
            gamma=jnp.asarray(self.gamma),
            td_lambda=jnp.asarray(self.td_lambda),
            reward_scale=jnp.asarray(self.reward_scale),
            max_grad_norm=jnp.asarray(self.max_grad_norm),
            num_steps=self.num_steps,
            num_minibatches=self.num_minibatches,
            num_epochs=self.num_epochs,
            num_env_blocks=self.blocks(network),
            memory_window=self.memory_window,
            burns_in=self.memory_window_use == "burn-in",
            recompute_targets=self.recompute_targets,
            learns_windows=self._learns_windows(network),
            steps_per_update=self.steps_per_update,
        )
