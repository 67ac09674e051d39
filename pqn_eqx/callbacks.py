"""What a run tells the host, and the interface of those who listen. Nothing here is compiled."""

import dataclasses
from typing import Any

import numpy as np

from pqn_eqx.evaluate import Evaluation
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

    @property
    def steps_per_second(self) -> float:
        """Environment steps of all members per second of training."""
        return self.env_steps * self.num_members / max(self.train_seconds, 1e-9)


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

    def on_end(self, outcome: Outcome) -> None:
        """However the run ended, once its programs were compiled."""

    def close(self) -> None:
        """After `on_end`, and after a failure too."""
