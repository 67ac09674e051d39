"""The command ``python -m pqn_eqx.export RUN_DIR FILE.safetensors``: a policy's parameters, to be used elsewhere."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from pqn_eqx.errors import ConfigError, UserError
from pqn_eqx.policy import export_policy, load_policy

PROGRAM = "python -m pqn_eqx.export"


@dataclasses.dataclass(frozen=True)
class Options:
    """Write a policy's parameters as safetensors, and a description beside them; `import_policy` reads both."""

    run_directory: tyro.conf.Positional[Path]
    """The run."""
    file: tyro.conf.Positional[Path]
    """Where to write; the description has the same name with .json."""
    step: str = "last"
    """Which checkpoint: last, best, or its environment steps."""
    member: int = 0
    """Which member of the population."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for a failure, 2 for a wrong request."""
    options = tyro.cli(Options, prog=PROGRAM, args=argv)
    try:
        export_policy(load_policy(options.run_directory, options.step, options.member), options.file)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"Wrote {options.file} and {options.file.with_suffix('.json')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
