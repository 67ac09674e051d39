"""The command: ``python -m pqn_eqx.train [PRESET | --config FILE | --resume RUN_DIR] [flags]``."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pqn_eqx.cache import enable_compilation_cache
from pqn_eqx.callbacks import Callback, Outcome
from pqn_eqx.checkpoint import Checkpointer, Checkpoints, group_folder
from pqn_eqx.command_line import parse_request
from pqn_eqx.config import TrainConfig
from pqn_eqx.errors import DivergenceError, UserError
from pqn_eqx.hosts import leave, on_first, writes_files
from pqn_eqx.loggers import ConsoleLogger, JsonLinesLogger, SummaryLogger, git_commit, versions
from pqn_eqx.population import Member
from pqn_eqx.run_directory import RunDirectory, check_unused, default_run_directory
from pqn_eqx.serialization import config_to_dict
from pqn_eqx.trainer import Trainer

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


def train(config: TrainConfig, resume: bool = False) -> int:
    """Run `config` to its end and leave its run directory; or go on with the run there is. The exit status.

    Raises `UserError` for what a user can mend, `DivergenceError` where every group diverged.
    """
    config.hosts.connect()
    enable_compilation_cache()
    path = config.run_dir or default_run_directory(config.name)
    if not resume:
        on_first(lambda: check_unused(path))
    shared: list[Callback] = []
    outcomes: list[Outcome] = []
    errors: list[DivergenceError] = []
    with stop_on_signals() as stop:
        try:
            for number, group in enumerate(config.groups):
                callbacks: list[Callback] = []
                trainer = config.build(callbacks, stop, group)
                if number == 0:
                    on_first(lambda: shared.extend(listeners(config, path, resume)))
                try:
                    outcomes.append(run_group(config, path, number, group, trainer, [*shared], callbacks, resume))
                except DivergenceError as error:
                    errors.append(error)
                    if len(config.groups) > 1 and writes_files():
                        print(error, file=sys.stderr)
                if outcomes and outcomes[-1].status == "interrupted":
                    break
        finally:
            for callback in shared:
                callback.close()
            if shared:
                print(f"Run directory: {path}")
    if errors and not outcomes:
        raise errors[-1]
    return stop.status if outcomes[-1].status == "interrupted" else 0


def run_group(
    config: TrainConfig,
    path: Path,
    number: int,
    group: Sequence[Member],
    trainer: Trainer,
    shared: list[Callback],
    callbacks: list[Callback],
    resume: bool,
) -> Outcome:
    """Train a group of the population, from its last checkpoint where it is resumed."""
    callbacks += shared
    folder = group_folder(path, number, len(config.groups))
    start = None
    if trainer.plan.checkpoint_interval > 0 or (resume and folder.exists()):
        checkpoints = Checkpoints(folder, keep=config.checkpoint.keep)
        about = {
            "config": config_to_dict(config),
            "members": [member.row() for member in group],
            "versions": versions(),
            "git_commit": git_commit(),
        }
        # Last, so that what led to a checkpoint is in the files before it.
        callbacks.append(checkpointer := Checkpointer(checkpoints, about))
        start = checkpoints.latest(trainer.abstract_arrays()) if resume else None
    if resume:
        logged, evaluated = (0, 0) if start is None else (start.logged, start.evaluated)
        on_first(lambda: RunDirectory(path).cut([member.number for member in group], logged, evaluated))
    try:
        return trainer.run(start)
    finally:
        if callbacks and isinstance(callbacks[-1], Checkpointer):
            checkpointer.close()


def listeners(config: TrainConfig, path: Path, resume: bool) -> list[Callback]:
    """The run directory, and those who fill it and show the run. The figure is made before it is uploaded."""
    wandb = config.wandb.build(path, lambda member: config_to_dict(config.of_member(member)))
    if resume:
        directory = RunDirectory(path)
        directory.write_config(config_to_dict(config))
    else:
        directory = RunDirectory.create(path, config_to_dict(config), [member.row() for member in config.members])
    return [ConsoleLogger(config.name), JsonLinesLogger(directory), SummaryLogger(directory), *wandb]


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
