"""The command: ``python -m pqn_eqx.train [PRESET | --config FILE | --resume RUN_DIR] [flags]``."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pqn_eqx.cache import enable_compilation_cache
from pqn_eqx.callbacks import Callback, Outcome, Snapshot
from pqn_eqx.checkpoint import Checkpointer, Checkpoints, group_folder
from pqn_eqx.command_line import parse_request
from pqn_eqx.config import TrainConfig
from pqn_eqx.errors import DivergenceError, UserError
from pqn_eqx.hosts import from_first, leave, on_first, writes_files
from pqn_eqx.loggers import ConsoleLogger, JsonLinesLogger, SummaryLogger, git_commit, versions
from pqn_eqx.population import Member
from pqn_eqx.run_directory import RunDirectory, check_unused, default_run_directory
from pqn_eqx.serialization import config_to_dict

REQUEUE = 75
"""Exit status of a run that was told to make room (SIGTERM, SIGUSR1) and can be resumed: EX_TEMPFAIL of sysexits.h."""


class Stop:
    """Whether a signal asked for an end, and which."""

    signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status of a run that was ended; without a signal here, another process asked for it."""
        return REQUEUE if self.signal in (signal.SIGTERM, signal.SIGUSR1) else 0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Ctrl-C, SIGTERM and SIGUSR1 ask for a stop at the end of the chunk; a second one leaves at once."""
    stop = Stop()

    def ask(number, frame):
        stop.signal = number
        for each, handler in previous.items():
            signal.signal(each, handler)
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        print(f"\nStopping at the end of this chunk; {name} again leaves at once.", file=sys.stderr)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    previous = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Run:
    """A run in its directory: who listens to it, and the groups of its population one after the other."""

    def __init__(self, config: TrainConfig, resume: bool, stop: Stop):
        self.config, self.resume, self.stop = config, resume, stop
        # Every process must know the folder that the first one chose.
        self.path = Path(from_first(str(config.run_dir or default_run_directory(config.name))))
        self.listeners: list[Callback] = []

    def train(self) -> list[Outcome]:
        """How each group ended. Raises `UserError` for what a user can mend, and where every group diverged."""
        if not self.resume:
            on_first(lambda: check_unused(self.path))
        outcomes: list[Outcome] = []
        diverged: DivergenceError | None = None
        try:
            for number, group in enumerate(self.config.groups):
                try:
                    outcomes.append(self._train_group(number, group))
                except DivergenceError as error:
                    diverged = error
                    if writes_files() and len(self.config.groups) > 1:
                        print(error, file=sys.stderr)
                if outcomes and outcomes[-1].status == "interrupted":
                    break
        finally:
            for callback in self.listeners:
                callback.close()
            if self.listeners:
                print(f"Run directory: {self.path}")
        if diverged is not None and not outcomes:
            raise diverged
        return outcomes

    def _train_group(self, number: int, group: Sequence[Member]) -> Outcome:
        """Train a group of the population, from its last checkpoint where it is resumed."""
        callbacks: list[Callback] = []
        # What cannot be built is refused before anything is written.
        trainer = self.config.build(callbacks, self.stop, group)
        if number == 0:
            on_first(self._open)
        callbacks += self.listeners
        folder = group_folder(self.path, number, len(self.config.groups))
        if trainer.plan.checkpoint_interval == 0 and not (self.resume and folder.exists()):
            self._cut(group, None)
            return trainer.run()
        checkpoints = Checkpoints(folder, keep=self.config.checkpoint.keep)
        try:
            start = checkpoints.latest(trainer.abstract_arrays()) if self.resume else None
            self._cut(group, start)
            # Last, so that what led to a checkpoint is in the files before it.
            callbacks.append(Checkpointer(checkpoints, self._about(group)))
            return trainer.run(start)
        except DivergenceError as error:
            last = [f"The last checkpoint, from before, is {folder / str(step)}." for step in checkpoints.steps()[-1:]]
            raise DivergenceError(" ".join([str(error), *last])) from error
        finally:
            checkpoints.close()

    def _open(self) -> None:
        """The run directory, and those who fill it and show the run. The figure is made before it is uploaded."""
        config = self.config
        wandb = config.wandb.build(self.path, lambda member: config_to_dict(config.of_member(member)))
        if self.resume:
            directory = RunDirectory(self.path)
            directory.write_config(config_to_dict(config))
        else:
            rows = [member.row() for member in config.members]
            directory = RunDirectory.create(self.path, config_to_dict(config), rows)
        self.listeners += [ConsoleLogger(config.name), JsonLinesLogger(directory), SummaryLogger(directory), *wandb]

    def _cut(self, group: Sequence[Member], start: Snapshot | None) -> None:
        """Take back the rows that a resumed group will write again."""
        if self.resume:
            logged, evaluated = (0, 0) if start is None else (start.logged, start.evaluated)
            numbers = [member.number for member in group]
            on_first(lambda: RunDirectory(self.path).cut(numbers, logged, evaluated))

    def _about(self, group: Sequence[Member]) -> dict[str, Any]:
        """What stands beside the arrays of every checkpoint."""
        return {
            "config": config_to_dict(self.config),
            "members": [member.row() for member in group],
            "versions": versions(),
            "git_commit": git_commit(),
        }


def train(config: TrainConfig, resume: bool = False) -> int:
    """Run `config` to its end and leave its run directory; or go on with the run there is. The exit status.

    Raises `UserError` for what a user can mend, `DivergenceError` where every group diverged.
    """
    config.hosts.connect()
    enable_compilation_cache()
    with stop_on_signals() as stop:
        outcomes = Run(config, resume, stop).train()
    return stop.status if outcomes[-1].status == "interrupted" else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 for a finished run or Ctrl-C, 1 for a failure, 2 for a wrong request, 75 to be resumed."""
    try:
        return train(*parse_request(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2 if isinstance(error, ValueError) else 1
        leave(status)
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output left (`--help | head`): nothing can be told to it, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        leave(1)
        raise


if __name__ == "__main__":
    sys.exit(main())
