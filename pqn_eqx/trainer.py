"""The loop: compiled chunks of updates on the devices, callbacks on the host.

A log interval is a fixed number of updates. It runs as one or more *chunks*: calls of one compiled program that takes
the number of updates as an argument, each about two seconds long, so that a run can be stopped at any time. Metrics
add up on the device over the chunks of an interval: how an interval was cut changes no number. The next chunk is
dispatched before the metrics of the last are read.

Several processes run the same loop. What they must do alike (the length of the next chunk, an early stop) they agree
on, and every array that the host reads is first copied to all devices, so that each process has all of it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, Key, PyTree

from pqn_eqx.callbacks import Arrays, Callback, Evaluated, Interval, Outcome, Plan, Snapshot
from pqn_eqx.envs.base import Environment
from pqn_eqx.episodes import Evaluation, advance_episodes, begin_episodes
from pqn_eqx.errors import DivergenceError
from pqn_eqx.hosts import Agreement, Decision
from pqn_eqx.losses import Loss
from pqn_eqx.metrics import Metrics
from pqn_eqx.population import map_members
from pqn_eqx.sharding import (
    PER_ENV,
    PER_MEMBER,
    PER_MEMBER_AND_ENV,
    REPLICATED,
    STATE_SPEC,
    TrainState,
    abstract,
    distribute,
    everywhere,
    place,
)

CHUNK_SECONDS = 2.0


class Algorithm(Protocol):
    """What the trainer needs of an algorithm: an `eqx.Module` for one member, whose learner has a `network`."""

    @property
    def loss(self) -> Loss: ...

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics that `update` returns."""

    def init(self, index: Int[Array, " N"], key: Key[Array, ""]) -> TrainState: ...

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]: ...


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether every floating-point number of a tree is finite."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))


class Programs:
    """The programs of a run, each on all members and all devices."""

    def __init__(self, eval_env: Environment, eval_epsilon: float, mesh: Mesh):
        def keys(seeds):
            def member(seed):
                return tuple(jax.random.split(jax.random.key(seed)))

            return jax.vmap(member)(seeds)

        def init(algorithms, keys, index):
            return map_members(lambda algorithm, key: algorithm.init(index, key), algorithms, keys)

        def advance(inputs, state):
            algorithms, num_updates, metrics, diverged_at = inputs

            def member(algorithm, metrics, diverged_at, state):
                def update(_, carry):
                    total, diverged_at, state = carry
                    state, metrics = algorithm.update(state)
                    failed = ~(jnp.isfinite(metrics.total["loss"]) & all_finite(state.learner.network))
                    failed &= diverged_at < 0
                    return total + metrics, jnp.where(failed, state.learner.update, diverged_at), state

                return jax.lax.fori_loop(0, num_updates, update, (metrics, diverged_at, state))

            return map_members(member, algorithms, metrics, diverged_at, state)

        def begin(networks, keys, index):
            return map_members(lambda network, key: begin_episodes(eval_env, network, index, key), networks, keys)

        def play(inputs, episodes):
            losses, networks, keys, start, num_steps = inputs

            def member(loss, network, key, episodes):
                return advance_episodes(eval_env, network, loss, eval_epsilon, episodes, key, start, num_steps)

            return map_members(member, losses, networks, keys, episodes)

        def program(function, in_specs, out_specs, **options):
            return eqx.filter_jit(distribute(function, mesh, in_specs, out_specs), **options)

        def fold(keys, number):
            return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)

        self.keys = program(keys, (PER_MEMBER,), PER_MEMBER)
        per_env = (PER_MEMBER, PER_MEMBER, PER_ENV)
        advance_inputs = (PER_MEMBER, REPLICATED, PER_MEMBER, PER_MEMBER)
        play_inputs = (PER_MEMBER, PER_MEMBER, PER_MEMBER, REPLICATED, REPLICATED)
        self.init = program(init, per_env, STATE_SPEC)
        self.fold = program(fold, (PER_MEMBER, REPLICATED), PER_MEMBER)
        self.begin = program(begin, per_env, PER_MEMBER_AND_ENV)
        # The state is donated: a run holds it once.
        self.advance_function = distribute(
            advance, mesh, (advance_inputs, STATE_SPEC), (PER_MEMBER, PER_MEMBER, STATE_SPEC)
        )
        self.advance: Any = eqx.filter_jit(self.advance_function, donate="all-except-first")
        self.everywhere = everywhere(mesh)
        self.play = program(play, (play_inputs, PER_MEMBER_AND_ENV), PER_MEMBER_AND_ENV, donate="all-except-first")


class Pace:
    """How many turns of a loop make about `CHUNK_SECONDS`, learnt from the turns before."""

    def __init__(self, first: int = 1):
        self.turns = first

    def observe(self, turns: int, seconds: float) -> None:
        """`turns` took `seconds`. Growth is bounded, since the first turns may not be like the later ones."""
        wanted = CHUNK_SECONDS * turns / max(seconds, 1e-9)
        self.turns = max(1, min(int(wanted), 4 * turns))


class Chunk(NamedTuple):
    """A dispatched call of `Programs.advance`, whose results may still be in the making."""

    update: int
    num_updates: int
    metrics: Metrics
    diverged_at: Int[Array, " M"]
    dispatched_at: float


class Trainer:
    """Runs a plan. `algorithms` is one algorithm whose leaves lead with the members."""

    def __init__(
        self,
        algorithms: Algorithm,
        plan: Plan,
        eval_env: Environment,
        mesh: Mesh,
        callbacks: Sequence[Callback] = (),
        should_stop: Callable[[], bool] = lambda: False,
    ):
        self.algorithms = place(algorithms, mesh, PER_MEMBER)
        self.plan = plan
        self.mesh = mesh
        self.callbacks = callbacks
        self.should_stop = should_stop
        self.extra_names = eval_env.extra_names
        self.programs = Programs(eval_env, plan.eval_epsilon, mesh)
        seeds = np.asarray([member.seed for member in plan.members], np.int32)
        self.init_keys, self.eval_keys = self.programs.keys(place(seeds, mesh, PER_MEMBER))
        self.env_index = place(jnp.arange(plan.num_envs), mesh, PER_ENV)
        self.eval_index = place(jnp.arange(plan.eval_envs), mesh, PER_ENV)
        self.no_metrics = place(Metrics.zeros(algorithms.metric_names, (plan.num_members,)), mesh, PER_MEMBER)
        self.diverged_at = np.full(plan.num_members, -1)
        self.seconds = {"train": 0.0, "compile": 0.0, "wall": 0.0}
        self.saved_at = 0.0
        self.update_pace, self.eval_pace = Pace(), Pace(first=32)
        self.started = time.perf_counter()
        self.agreement = Agreement(mesh, self._wish)
        self.interval_seconds = 0.0
        self.read_at = 0.0
        self.interval_start = 0

    def run(self, start: Snapshot | None = None) -> Outcome:
        """Train to the end of the plan, or until stopped or diverged; from the beginning, or from `start`.

        Raises `DivergenceError` once no member's loss is finite, after the callbacks have seen all of it.
        """
        self.started = time.perf_counter()
        self._notify("on_start", self.plan)
        self._compile(start)
        self._notify("on_compiled", self.seconds["compile"])
        status = self._train()
        outcome = Outcome(
            status=status,
            update=self.update,
            env_steps=self.plan.env_steps(self.update),
            num_members=self.plan.num_members,
            train_seconds=self.seconds["train"],
            compile_seconds=self.seconds["compile"],
            wall_seconds=self._elapsed(),
            diverged_at=tuple(None if update < 0 else int(update) for update in self.diverged_at),
        )
        self._notify("on_end", outcome)
        if status == "diverged":
            raise DivergenceError(
                f"Training diverged: no member's loss and parameters are finite any more. First not finite at update "
                f"{', '.join(map(str, self.diverged_at))} (by member) of {self.plan.num_updates}. What was logged "
                f"is kept. Lower --learning-rate, --max-grad-norm or --reward-scale, or choose another optimizer."
            )
        return outcome

    def abstract_update(self) -> tuple[Any, Any]:
        """What `Programs.advance_function` is given, as shapes: enough to compile it without a state in memory."""
        self.inputs = self._first_inputs()
        return self._advance_inputs(1), self.abstract_arrays().state

    def abstract_arrays(self) -> Arrays:
        """What a snapshot holds of the devices, as shapes with their places."""
        state = eqx.filter_eval_shape(self.programs.init, self.algorithms, self.init_keys, self.env_index)
        metrics, diverged_at = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self._first_inputs()
        )
        return Arrays(abstract(state, self.mesh, STATE_SPEC), metrics, diverged_at)

    def lower_update(self) -> jax.stages.Lowered:
        """The program of an update, to look at."""
        return jax.jit(self.programs.advance_function, donate_argnums=1).lower(*self.abstract_update())

    def _first_inputs(self) -> tuple[Metrics, Int[Array, " M"]]:
        return self.no_metrics, place(self.diverged_at, self.mesh, PER_MEMBER)

    def _compile(self, start: Snapshot | None) -> None:
        """Build every program, and with them the first state, unless there is one to start from."""
        if start is None:
            self.state = self.programs.init(self.algorithms, self.init_keys, self.env_index)
            self.inputs = self._first_inputs()
            self.update = self.logged = self.evaluated = 0
        else:
            self.state, self.inputs = start.arrays.state, (start.arrays.metrics, start.arrays.diverged_at)
            self.update, self.logged, self.evaluated = start.update, start.logged, start.evaluated
            if self.logged == self.update:
                self.inputs = (self.no_metrics, self.inputs[1])
            self.seconds = dict(start.seconds)
            self.diverged_at = self._read_out(start.arrays.diverged_at)
            self.started -= self.seconds["wall"]
        self.interval_start = self.update
        began = self._elapsed()
        self._advance = self.programs.advance.lower(self._advance_inputs(1), self.state).compile()
        self._compile_play(self.state.learner.network)
        self.read_at = self.saved_at = self._elapsed()
        self.seconds["compile"] += self.read_at - (0.0 if start is None else began)

    def _compile_play(self, networks: PyTree) -> None:
        episodes = self.programs.begin(networks, self.eval_keys, self.eval_index)
        inputs = self._play_inputs(networks, self.eval_keys, 0, 1)
        self._play = self.programs.play.lower(inputs, episodes).compile()

    def _train(self) -> str:
        """How training ended."""
        plan, running = self.plan, None
        if self.evaluated < self.update and self._is_due(plan.eval_interval):
            # The run was stopped in the middle of this evaluation.
            self._evaluate()
        while self.update < plan.num_updates and not self.agreement.decision.stop and not self._all_diverged():
            chunk = self._dispatch(min(self.agreement.decision.num_updates, self._to_interval_end()))
            if running is not None:
                self._read(running)
            running = chunk
            evaluate = self._is_due(plan.eval_interval)
            save = plan.checkpoint_interval > 0 and self._is_due(plan.checkpoint_interval)
            save |= self.agreement.decision.save and self._is_due(plan.log_interval)
            if evaluate or save:
                self._read(running)
                running = None
                if evaluate and not self._all_diverged():
                    self._evaluate()
                if save and not self._all_diverged():
                    self._save()
        if running is not None:
            self._read(running, last=True)
        if self._all_diverged():
            return "diverged"
        if self.update == plan.num_updates:
            return "finished"
        if plan.checkpoint_interval > 0:
            self._save()
        return "interrupted"

    def _is_due(self, interval: int) -> bool:
        """Whether something that is done every `interval` updates, and at the end, is to be done now."""
        return self.update == self.plan.num_updates or (self.update > 0 and self.update % interval == 0)

    def _to_interval_end(self) -> int:
        """Updates to the end of the log interval."""
        log_interval = self.plan.log_interval
        return min(log_interval - self.update % log_interval, self.plan.num_updates - self.update)

    def _save(self) -> None:
        """Tell of a state to keep. All that was measured up to it has been told before."""
        self.saved_at = self.seconds["wall"] = self._elapsed()
        arrays = Arrays(self.state, *self.inputs)
        self._notify("on_checkpoint", Snapshot(arrays, self.update, self.logged, self.evaluated, dict(self.seconds)))

    def _dispatch(self, num_updates: int) -> Chunk:
        """Start the next chunk; does not wait for it."""
        if self.update % self.plan.log_interval == 0:
            self.inputs = (self.no_metrics, self.inputs[1])
        dispatched_at = self._elapsed()
        *outputs, self.state = self._advance(self._advance_inputs(num_updates), self.state)
        self.inputs = tuple(outputs)
        metrics, diverged_at = self.programs.everywhere(self.inputs)
        self.agreement.ask()
        self.update += num_updates
        return Chunk(self.update, num_updates, metrics, diverged_at, dispatched_at)

    def _read(self, chunk: Chunk, last: bool = False) -> None:
        """Wait for a chunk and tell the callbacks of it."""
        means, diverged_at = chunk.metrics.mean(), jax.device_get(chunk.diverged_at)
        self.agreement.hear()
        now = self._elapsed()
        seconds = now - max(self.read_at, chunk.dispatched_at)
        self.read_at = now
        self.seconds["train"] += seconds
        self.interval_seconds += seconds
        self.update_pace.observe(chunk.num_updates, seconds)
        interval = Interval(
            update=chunk.update,
            env_steps=self.plan.env_steps(chunk.update),
            metrics=means,
            steps_per_second=self._rate(chunk.update - self.interval_start, self.interval_seconds),
            wall_seconds=now,
        )
        self._notify("on_progress", interval)
        whole = chunk.update % self.plan.log_interval == 0 or chunk.update == self.plan.num_updates
        if whole or last:
            self._notify("on_interval", interval)
            self.interval_start, self.interval_seconds = chunk.update, 0.0
        if whole:
            self.logged = chunk.update
        for member in np.flatnonzero(diverged_at != self.diverged_at):
            self._notify("on_divergence", self.plan.members[member], int(diverged_at[member]))
        self.diverged_at = diverged_at

    def _evaluate(self) -> None:
        """Evaluate and tell of it; given up when the run is stopped."""
        evaluation = self._play_out(self.state.learner.network, self.update)
        if evaluation is not None:
            self.evaluated = self.update
            now = self._elapsed()
            self._notify("on_evaluation", Evaluated(self.update, self.plan.env_steps(self.update), evaluation, now))
        self.read_at = self._elapsed()

    def evaluate(self, networks: PyTree, update: int) -> Evaluation | None:
        """The evaluation that the run makes of `networks` after `update`; None where it was stopped."""
        self._compile_play(networks)
        return self._play_out(networks, update)

    def _play_out(self, networks: PyTree, update: int) -> Evaluation | None:
        """Play the first episode of every evaluation environment."""
        keys = self.programs.fold(self.eval_keys, self._scalar(update))
        episodes = self.programs.begin(networks, keys, self.eval_index)
        start, finished = 0, False
        while start < self.plan.eval_max_steps and not finished:
            if self.agreement.decision.stop:
                return None
            num_steps = min(self.agreement.decision.num_eval_steps, self.plan.eval_max_steps - start)
            began = self._elapsed()
            episodes = self._play(self._play_inputs(networks, keys, start, num_steps), episodes)
            start += num_steps
            self.agreement.ask()
            finished = bool(np.all(self._read_out(episodes.finished)))
            self.agreement.hear()
            self.eval_pace.observe(num_steps, self._elapsed() - began)
        fields = (episodes.finished, episodes.episode_return, episodes.episode_length, episodes.extras)
        finished, episode_return, episode_length, extras = self._read_out(fields)
        return Evaluation(finished, episode_return, episode_length, extras, self.extra_names)

    def _read_out(self, tree: Any) -> Any:
        """The arrays of all members and environments, on this host."""
        return jax.device_get(self.programs.everywhere(tree))

    def _wish(self) -> Decision:
        """What this process would do next."""
        save = self._elapsed() - self.saved_at >= self.plan.checkpoint_seconds
        return Decision(self.should_stop(), save, self.update_pace.turns, self.eval_pace.turns)

    def _advance_inputs(self, num_updates: int):
        return self.algorithms, self._scalar(num_updates), *self.inputs

    def _play_inputs(self, networks: PyTree, keys, start: int, num_steps: int):
        return self.algorithms.loss, networks, keys, self._scalar(start), self._scalar(num_steps)

    def _scalar(self, number: int) -> Int[Array, ""]:
        return place(jnp.asarray(number), self.mesh, REPLICATED)

    def _all_diverged(self) -> bool:
        return bool(np.all(self.diverged_at >= 0))

    def _rate(self, num_updates: int, seconds: float) -> float:
        return self.plan.env_steps(num_updates) * self.plan.num_members / max(seconds, 1e-9)

    def _elapsed(self) -> float:
        return time.perf_counter() - self.started

    def _notify(self, event: str, *arguments) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)
