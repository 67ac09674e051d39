"""Figures from run directories. Imports no JAX and reads only files.

The command ``python -m pqn_eqx.plot RUN_DIR...`` draws the learning curves of several runs together.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import tyro

from pqn_eqx.errors import ConfigError, UserError
from pqn_eqx.run_directory import CONFIG, EVALUATIONS, FIGURE, MEMBERS, METRICS, read_rows

matplotlib.use("Agg")


def curves(rows: list[dict[str, Any]], field: str) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps [T] and `field` [M, T] of every member, NaN where a row has none."""
    steps = sorted({row["env_steps"] for row in rows})
    members = sorted({row["member"] for row in rows})
    values = np.full((len(members), len(steps)), np.nan)
    column, line = {s: i for i, s in enumerate(steps)}, {m: i for i, m in enumerate(members)}
    for row in rows:
        if row.get(field) is not None:
            values[line[row["member"]], column[row["env_steps"]]] = row[field]
    return np.asarray(steps), values


def mean_and_interval(values: np.ndarray, resamples: int = 1000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over members of [M, T] and its 95 % percentile bootstrap interval, each [T]; NaN where no member has one."""
    rng = np.random.default_rng(0)
    draws = rng.integers(values.shape[0], size=(resamples, values.shape[0]))
    mean = _nanmean(values, axis=0)
    low, high = np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    known = np.isfinite(mean)
    resampled = _nanmean(values[draws][..., known], axis=1)
    low[known], high[known] = np.nanquantile(resampled, [0.025, 0.975], axis=0)
    return mean, low, high


def _nanmean(values: np.ndarray, axis: int) -> np.ndarray:
    known = np.isfinite(values)
    count = known.sum(axis)
    return np.where(count > 0, np.where(known, values, 0).sum(axis) / np.maximum(count, 1), np.nan)


def learning_curve(run_directory: Path) -> Path | None:
    """Draw ``learning_curve.png``: training and evaluation return of every member, mean and 95 % interval.

    Returns its path, or None where the run logged no episode and there is nothing to draw.
    """
    from matplotlib import pyplot as plt

    training = read_rows(run_directory / METRICS)
    evaluations = read_rows(run_directory / EVALUATIONS)
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    drawn = False
    for rows, label, colour, style in (
        (training, "training (exploring)", "tab:blue", "-"),
        (evaluations, "evaluation (whole episodes)", "tab:orange", "o-"),
    ):
        steps, values = curves(rows, "episode_return")
        known = np.isfinite(values).any(axis=0) if values.size else np.zeros(0, bool)
        if not known.any():
            continue
        drawn = True
        steps, values = steps[known], values[:, known]
        mean, low, high = mean_and_interval(values)
        members = values.shape[0]
        if members > 1:
            axes.plot(steps, values.T, color=colour, alpha=0.25, linewidth=0.8)
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
            label += f": mean of {members} members, 95 % interval"
        axes.plot(steps, mean, style, color=colour, markersize=4, label=label)
    if not drawn:
        plt.close(figure)
        return None
    axes.set(xlabel="environment steps (per member)", ylabel="episode return", title=run_directory.resolve().name)
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    path = run_directory / FIGURE
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


@dataclasses.dataclass(frozen=True)
class Options:
    """Draw learning curves of several runs together, as .png and .svg."""

    run_directories: tyro.conf.Positional[tuple[Path, ...]]
    """The runs."""
    by: str | None = None
    """What tells the curves apart: a swept option (learning_rate) or any field of the configuration (loss.type,
    algorithm.num_envs); the members alike in it are drawn as one curve. Default: every run is a curve."""
    x: Literal["steps", "wall"] = "steps"
    """The horizontal axis: environment steps of each member, or seconds since the run began."""
    field: str = "episode_return"
    """The vertical axis: a field of the rows."""
    source: Literal["evaluation", "training"] = "evaluation"
    """Which rows: those of whole episodes, or those of training."""
    output: Path = Path("curves")
    """Where to write, without the ending."""


def setting(run_directory: Path, member: int, by: str | None) -> str:
    """What a member is called in the legend: its value of the field `by`, or its run's name.

    Raises `ConfigError` where neither the members nor the configuration have such a field.
    """
    if by is None:
        return run_directory.resolve().name
    members = {row["member"]: row for row in json.loads((run_directory / MEMBERS).read_text())}
    if by in members[member]:
        return f"{by} {members[member][by]:g}"
    value = json.loads((run_directory / CONFIG).read_text())
    for name in by.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ConfigError(f"--by {by}: {run_directory} has no such field in {MEMBERS} or {CONFIG}.")
        value = value[name]
    return f"{by} {value}"


def together(options: Options) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The curves by label: where [T] and values [M, T] of the members of that label.

    Raises `ConfigError` where a directory is no run or lacks the field.
    """
    lines: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for directory in options.run_directories:
        if not (directory / CONFIG).exists():
            raise ConfigError(f"{directory} is no run directory: it has no {CONFIG}.")
        rows = read_rows(directory / (EVALUATIONS if options.source == "evaluation" else METRICS))
        for member in sorted({row["member"] for row in rows}):
            own = [row for row in rows if row["member"] == member and row.get(options.field) is not None]
            if own:
                where = np.asarray([row["env_steps" if options.x == "steps" else "wall_seconds"] for row in own])
                line = (where, np.asarray([row[options.field] for row in own], float))
                lines.setdefault(setting(directory, member, options.by), []).append(line)
    if not lines:
        raise ConfigError(f"No row of these runs has a {options.field}.")
    return {label: on_one_axis(members) for label, members in lines.items()}


def on_one_axis(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Lines of several members at the places of all of them: interpolated within each line, unknown outside."""
    where = np.unique(np.concatenate([places for places, _ in lines]))
    values = [np.interp(where, places, line, left=np.nan, right=np.nan) for places, line in lines]
    return where, np.stack(values)


def draw(options: Options) -> list[Path]:
    """The files of the figure. Raises `UserError` where they cannot be made."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for number, (label, (where, values)) in enumerate(sorted(together(options).items())):
        mean, low, high = mean_and_interval(values)
        members = f" ({len(values)} members)" if len(values) > 1 else ""
        axes.plot(where, mean, "o-", color=f"C{number % 10}", markersize=3, label=label + members)
        if len(values) > 1:
            axes.fill_between(where, low, high, color=f"C{number % 10}", alpha=0.2, linewidth=0)
    along = "environment steps (per member)" if options.x == "steps" else "seconds since the run began"
    title = f"{options.source}: mean over members, 95 % bootstrap interval"
    axes.set(xlabel=along, ylabel=options.field.replace("_", " "), title=title)
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    files = [options.output.with_name(options.output.name + ending) for ending in (".png", ".svg")]
    try:
        for file in files:
            figure.savefig(file, dpi=120)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}. Give another --output.") from error
    finally:
        plt.close(figure)
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for a failure, 2 for a wrong request."""
    options = tyro.cli(Options, prog="python -m pqn_eqx.plot", args=argv)
    try:
        files = draw(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"Wrote {' and '.join(map(str, files))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
