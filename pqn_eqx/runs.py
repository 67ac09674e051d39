"""The command ``python -m pqn_eqx.runs [FOLDER]``: the run directories below a folder, and how they stand."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from pqn_eqx.run_directory import CONFIG, METRICS, SUMMARY, read_rows

PROGRAM = "python -m pqn_eqx.runs"
QUIET_SECONDS = 600.0
"""A run without a summary whose files have not changed for so long is taken for stopped."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory at a glance."""

    path: Path
    state: str
    """finished, interrupted or diverged by its summary; without one, running or stopped."""
    name: str
    members: int
    env_steps: int
    total_timesteps: int
    episode_return: float | None
    """Mean over members: of the last evaluation, or while it runs of the last rows."""
    changed: float
    """When a file last changed, in seconds since the epoch."""


def read_run(path: Path) -> Run:
    """The state of the run in `path`. Raises `OSError` or `ValueError` for files that are no run's."""
    config = json.loads((path / CONFIG).read_text())
    rows = read_rows(path / METRICS)
    last = [row for row in rows if row["env_steps"] == rows[-1]["env_steps"]]
    files = [path / name for name in (CONFIG, METRICS, SUMMARY) if (path / name).exists()]
    changed = max(file.stat().st_mtime for file in files)
    returns = [row["episode_return"] for row in last if row.get("episode_return") is not None]
    mean = sum(returns) / len(returns) if returns else None
    summary = path / SUMMARY
    # A run that was taken up again is under way, whatever its old summary says.
    current = summary.exists() and summary.stat().st_mtime >= changed - 1
    if current:
        told = json.loads(summary.read_text())
        state, mean = told["status"], told["eval_return"]["mean"]
    else:
        state = "running" if time.time() - changed < QUIET_SECONDS else "stopped"
    return Run(
        path=path,
        state=state,
        name=config["name"],
        members=len({row["member"] for row in rows}),
        env_steps=last[-1]["env_steps"] if last else 0,
        total_timesteps=config["total_timesteps"],
        episode_return=mean,
        changed=changed,
    )


def find_runs(folder: Path) -> list[Run]:
    """The runs at or below `folder`, the last changed first."""
    found = []
    for file in folder.rglob(CONFIG):
        try:
            found.append(read_run(file.parent))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda run: -run.changed)


def table(runs: list[Run], folder: Path) -> Table:
    """The runs for people, by their places below `folder`."""
    drawn = Table()
    for name in ("run", "state", "preset", "members", "steps", "return"):
        drawn.add_column(name, justify="left" if name in ("run", "state", "preset") else "right", overflow="fold")
    for run in runs:
        share = run.env_steps / max(run.total_timesteps, 1)
        score = "-" if run.episode_return is None else f"{run.episode_return:.2f}"
        drawn.add_row(str(run.path), run.state, run.name, str(run.members), f"{run.env_steps:,} ({share:.0%})", score)
    return drawn


@dataclasses.dataclass(frozen=True)
class Options:
    """List run directories with state, preset, steps and return."""

    folder: tyro.conf.Positional[Path] = Path("runs")
    """Where to look, at any depth."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 where there is nothing."""
    options = tyro.cli(Options, prog=PROGRAM, args=argv)
    runs = find_runs(options.folder)
    if not runs:
        print(f"error: there is no run at or below {options.folder}.", file=sys.stderr)
        return 1
    Console().print(table(runs, options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
