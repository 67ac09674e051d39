"""The command: ``python -m pqn_eqx.train [PRESET | --config FILE] [flags]``."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pqn_eqx.cache import enable_compilation_cache
from pqn_eqx.callbacks import Callback, Outcome
from pqn_eqx.command_line import parse
from pqn_eqx.config import TrainConfig
from pqn_eqx.errors import DivergenceError, UserError
from pqn_eqx.hosts import leave, on_first
from pqn_eqx.loggers import ConsoleLogger, JsonLinesLogger, SummaryLogger
from pqn_eqx.run_directory import RunDirectory, check_unused, default_run_directory
from pqn_eqx.serialization import config_to_dict


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks for a stop at the end of the chunk; the second one leaves at once."""
    asked = False

    def ask(signum, frame):
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, previous)
        print("\nStopping at the end of this chunk; Ctrl-C again leaves at once.", file=sys.stderr)

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)


def train(config: TrainConfig) -> list[Outcome]:
    """Run `config` to its end and leave its run directory; how each group of the population ended.

    Raises `UserError` for what a user can mend, `DivergenceError` where every group diverged.
    """
    config.hosts.connect()
    enable_compilation_cache()
    path = config.run_dir or default_run_directory(config.name)
    on_first(lambda: check_unused(path))
    callbacks: list[Callback] = []
    outcomes: list[Outcome] = []
    errors: list[DivergenceError] = []
    with stop_on_interrupt() as should_stop:
        try:
            for number, group in enumerate(config.groups):
                trainer = config.build(callbacks, should_stop, group)
                if number == 0:
                    on_first(lambda: callbacks.extend(listeners(config, path)))
                try:
                    outcomes.append(trainer.run())
                except DivergenceError as error:
                    errors.append(error)
                    if len(config.groups) > 1:
                        print(error, file=sys.stderr)
                if outcomes and outcomes[-1].status == "interrupted":
                    break
        finally:
            for callback in callbacks:
                callback.close()
            if callbacks:
                print(f"Run directory: {path}")
    if errors and not outcomes:
        raise errors[-1]
    return outcomes


def listeners(config: TrainConfig, path: Path) -> list[Callback]:
    """A new run directory, and those who fill it and show the run. The figure is made before it is uploaded."""
    wandb = config.wandb.build(path, lambda member: config_to_dict(config.of_member(member)))
    directory = RunDirectory.create(path, config_to_dict(config), [member.row() for member in config.members])
    return [
        ConsoleLogger(config.name),
        JsonLinesLogger(directory),
        SummaryLogger(directory),
        *wandb,
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 for a finished or interrupted run, 1 for one that failed, 2 for a wrong request."""
    try:
        train(parse(sys.argv[1:] if argv is None else argv))
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
