"""What a run tells the host, and the interface of those who listen. Nothing here is compiled."""

import dataclasses

import numpy as np

from pqn_eqx.evaluate import Evaluation


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of a run, fixed before it starts. Intervals are in updates."""

    seeds: tuple[int, ...]
    num_envs: int
    num_updates: int
    steps_per_update: int
    log_interval: int
    eval_interval: int
    """A multiple of `log_interval`."""
    eval_envs: int
    eval_max_steps: int
    eval_epsilon: float

    @property
    def num_members(self) -> int:
        return len(self.seeds)

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


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """An evaluation and when it was made."""

    update: int
    env_steps: int
    evaluation: Evaluation
    wall_seconds: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str
    """finished, interrupted or diverged."""
    update: int
    env_steps: int
    steps_per_second: float
    """Environment steps of all members per second of training; compilation and evaluation are not counted."""
    compile_seconds: float
    wall_seconds: float


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
