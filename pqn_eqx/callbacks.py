"""What a run tells the host, and the interface of those who listen. Nothing here is compiled."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int, PyTree

from pqn_eqx.episodes import Evaluation
from pqn_eqx.metrics import Metrics
from pqn_eqx.population import Member


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of a run, fixed before it starts. Intervals are in updates."""

    members: tuple[Member, ...]
    """Those trained here: the whole population, or a group of it."""
    population: int
    """Members of the whole population."""
    num_envs: int
    num_updates: int
    steps_per_update: int
    log_interval: int
    eval_interval: int
    """A multiple of `log_interval`."""
    checkpoint_interval: int
    """A multiple of `log_interval`; 0 for none."""
    checkpoint_seconds: float
    """Seconds after which a further checkpoint is due; infinite for never."""
    eval_envs: int
    eval_max_steps: int
    eval_epsilon: float
    notes: tuple[str, ...] = ()
    """What there is to say about the run before it starts, a line each."""

    @property
    def num_members(self) -> int:
        return len(self.members)

    def env_steps(self, update: int) -> int:
        """Environment steps of one member after `update` updates: a Python integer, which cannot overflow."""
        return update * self.steps_per_update


@dataclasses.dataclass(frozen=True)
class Interval:
    """What the updates of a log interval measured, so far: means [M] by name."""

    update: int
    env_steps: int
    """Environment steps of each member since the start."""
    metrics: dict[str, np.ndarray]
    steps_per_second: float
    """Environment steps of all members per second of training, in this interval."""
    wall_seconds: float
    """Since the run began, compilation included."""

    def rows(self) -> list[dict[str, Any]]:
        """A row per member."""
        shared = {
            "update": self.update,
            "env_steps": self.env_steps,
            "steps_per_second": self.steps_per_second,
            "wall_seconds": self.wall_seconds,
        }
        num_members = len(next(iter(self.metrics.values())))
        return [{name: values[m] for name, values in self.metrics.items()} | shared for m in range(num_members)]


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """An evaluation and when it was made."""

    update: int
    env_steps: int
    evaluation: Evaluation
    wall_seconds: float

    def rows(self) -> list[dict[str, Any]]:
        """A row per member."""
        shared = {"update": self.update, "env_steps": self.env_steps, "wall_seconds": self.wall_seconds}
        return [row | shared for row in self.evaluation.rows()]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str
    """finished, interrupted or diverged."""
    update: int
    env_steps: int
    """Of each member."""
    num_members: int
    train_seconds: float
    """Compilation and evaluation are not counted."""
    compile_seconds: float
    wall_seconds: float
    diverged_at: tuple[int | None, ...] = ()
    """For each member, the update at which it ceased to be finite."""

    @property
    def steps_per_second(self) -> float:
        """Environment steps of all members per second of training."""
        return self.env_steps * self.num_members / max(self.train_seconds, 1e-9)


class Arrays(NamedTuple):
    """What of a run lives on the devices."""

    state: PyTree
    metrics: Metrics
    """Sums of the log interval under way."""
    diverged_at: Int[Array, " M"]


class Snapshot(NamedTuple):
    """A run between two chunks: enough to go on as if it had never stopped."""

    arrays: Arrays
    update: int
    logged: int
    """The last update that ended a log interval; rows of a later one are of an interval cut short."""
    evaluated: int
    """The last update that was evaluated."""
    seconds: dict[str, float]
    """Time spent so far, by what on."""


class Callback:
    """A listener on the host; subclasses take the events they need."""

    def on_start(self, plan: Plan) -> None:
        """Before anything is compiled."""

    def on_compiled(self, seconds: float) -> None:
        """Once all programs are compiled."""

    def on_progress(self, interval: Interval) -> None:
        """After every chunk, with the log interval so far."""

    def on_interval(self, interval: Interval) -> None:
        """After every log interval; a stop may cut the last one short."""

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """After every evaluation."""

    def on_checkpoint(self, snapshot: Snapshot) -> None:
        """When a checkpoint is due: after the rows of its update, on every process."""

    def on_divergence(self, member: Member, update: int) -> None:
        """When a member is found to be no longer finite, which it became at `update`."""

    def on_end(self, outcome: Outcome) -> None:
        """However the run ended, once its programs were compiled."""

    def close(self) -> None:
        """After `on_end`, and after a failure too."""
