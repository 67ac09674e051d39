"""The command: ``python -m pqn_eqx.train [PRESET | --config FILE] [flags]``."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from pqn_eqx.cache import enable_compilation_cache
from pqn_eqx.callbacks import Callback, Outcome
from pqn_eqx.command_line import parse
from pqn_eqx.config import TrainConfig
from pqn_eqx.errors import UserError
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


def train(config: TrainConfig) -> Outcome:
    """Run `config` to its end and leave its run directory. Raises `UserError` for what a user can mend."""
    path = config.run_dir or default_run_directory(config.name)
    check_unused(path)
    enable_compilation_cache()
    with stop_on_interrupt() as should_stop:
        callbacks: list[Callback] = []
        trainer = config.build(callbacks, should_stop)
        directory = RunDirectory.create(path, config_to_dict(config))
        console = ConsoleLogger(config.name)
        callbacks += [console, JsonLinesLogger(directory), SummaryLogger(directory)]
        try:
            outcome = trainer.run()
        finally:
            console.close()
            print(f"Run directory: {path}")
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 for a finished or interrupted run, 1 for one that failed, 2 for a wrong request."""
    try:
        train(parse(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output left (`--help | head`): nothing can be told to it, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
