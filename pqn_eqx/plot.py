"""Figures from run directories. Imports no JAX and reads only files."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from pqn_eqx.run_directory import EVALUATIONS, FIGURE, METRICS, read_rows

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
