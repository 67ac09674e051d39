"""What studies share: run each arm as a population into a folder of its own, then read the folders and report.

A study is a list of arms: for each task, the same runs but for what is studied, the first of them the baseline.
Reports are made from files alone, so that they can be made again without training.

    <output>/raw/<task>-<arm>/   run directories
    <output>/table.md            interquartile mean and 95 % bootstrap interval of the last evaluation, over seeds
    <output>/scores.json         the same scores, seed by seed
    <output>/figure.png          evaluation return by environment steps
    <output>/verdict.md          what the numbers say
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from experiments.statistics import RESAMPLES, Estimate, difference, estimate
from pqn_eqx.cache import enable_compilation_cache
from pqn_eqx.config import TrainConfig
from pqn_eqx.errors import UserError
from pqn_eqx.plot import curves
from pqn_eqx.run_directory import CONFIG, EVALUATIONS, SUMMARY, read_rows
from pqn_eqx.serialization import load_config
from pqn_eqx.train import train

matplotlib.use("Agg")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One population of a study."""

    task: str
    name: str
    config: TrainConfig

    def directory(self, output: Path) -> Path:
        return output / "raw" / f"{self.task}-{self.name}"


def smoke(config: TrainConfig) -> TrainConfig:
    """`config` made so short that only its working can be seen: a few updates, a few short episodes."""
    return dataclasses.replace(
        config,
        total_timesteps=3 * config.algorithm.steps_per_update,
        num_seeds=2,
        log_interval=None,
        eval=dataclasses.replace(config.eval, num_envs=4, max_steps=600, interval=None),
    )


def conduct(question: str, arms: Sequence[Arm], output: Path) -> int:
    """Run the arms and report on them; the exit status."""
    enable_compilation_cache()
    try:
        run(arms, output)
        report(question, arms, output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(arms: Iterable[Arm], output: Path) -> None:
    """Train every arm that has not been trained yet.

    Raises `UserError` where a folder holds another configuration's run, or one that did not finish.
    """
    for arm in arms:
        directory = arm.directory(output)
        wanted = dataclasses.replace(arm.config, name=f"{arm.task}-{arm.name}", run_dir=directory)
        if not (directory / CONFIG).exists():
            train(wanted)
            continue
        if dataclasses.replace(load_config(directory / CONFIG), run_dir=directory) != wanted:
            raise UserError(f"{directory} holds a run of another configuration: remove it, or give another --output.")
        if not (directory / SUMMARY).exists():
            raise UserError(f"{directory} holds a run that did not finish: remove it to run it again.")
        print(f"{directory} is there already.")


def scores(arm: Arm, output: Path) -> np.ndarray:
    """The return of every seed [M] in the last evaluation."""
    _, values = evaluation_curve(arm, output)
    return values[:, -1]


def evaluation_curve(arm: Arm, output: Path) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps [T] and evaluation returns [M, T]."""
    return curves(read_rows(arm.directory(output) / EVALUATIONS), "episode_return")


def tasks(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """The arms of every task, in order."""
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        found.setdefault(arm.task, []).append(arm)
    return found


def report(question: str, arms: Sequence[Arm], output: Path) -> None:
    """Write table, scores, figure and verdict from the arms' run directories."""
    table = [
        f"# {question}\n",
        "Return of the last evaluation: interquartile mean over seeds and its 95 % bootstrap interval "
        f"({RESAMPLES:,} resamples).\n",
        "| task | arm | return | seeds | steps |",
        "|---|---|---|---|---|",
    ]
    verdict, every_score = [f"# {question}\n"], {}
    for task, group in tasks(arms).items():
        by_arm = {arm.name: scores(arm, output) for arm in group}
        every_score[task] = {name: values.tolist() for name, values in by_arm.items()}
        for arm in group:
            values, steps = by_arm[arm.name], evaluation_curve(arm, output)[0][-1]
            table.append(f"| {task} | {arm.name} | {estimate(values)} | {len(values)} | {steps:,} |")
        baseline = group[0].name
        verdict.append(f"## {task}\n")
        if len(group) == 1:
            verdict.append(f"- **{baseline}**: {estimate(by_arm[baseline])}; seeds: {len(by_arm[baseline])}.")
        verdict += [_sentence(name, by_arm[name], baseline, by_arm[baseline]) for name in list(by_arm)[1:]]
        verdict.append("")
    (output / "table.md").write_text("\n".join(table) + "\n")
    (output / "scores.json").write_text(json.dumps(every_score, indent=2) + "\n")
    (output / "verdict.md").write_text("\n".join(verdict))
    figure(arms, output)
    print("\n".join(table), f"\nFigure, scores and verdict: {output}")


def _sentence(name: str, values: np.ndarray, baseline_name: str, baseline: np.ndarray) -> str:
    """What can be said of an arm against the baseline; a difference counts where its interval excludes zero."""
    gap = difference(values, baseline)
    if gap.low > 0:
        said = "is better than"
    elif gap.high < 0:
        said = "is worse than"
    else:
        said = "cannot be told from"
    return (
        f"- **{name}** ({estimate(values)}, {len(values)} seeds) {said} {baseline_name} ({estimate(baseline)}): "
        f"difference {gap}."
    )


def figure(arms: Sequence[Arm], output: Path) -> None:
    """A panel per task: the evaluation return of every arm by environment steps, with its interval over seeds."""
    from matplotlib import pyplot as plt

    groups = tasks(arms)
    drawing, panels = plt.subplots(1, len(groups), figsize=(5 * len(groups), 4), layout="constrained", squeeze=False)
    for axes, (task, group) in zip(panels[0], groups.items(), strict=True):
        for number, arm in enumerate(group):
            steps, values = evaluation_curve(arm, output)
            points: list[Estimate] = [estimate(column) for column in values.T]
            axes.plot(steps, [p.value for p in points], "o-", color=f"C{number}", markersize=3, label=arm.name)
            axes.fill_between(
                steps, [p.low for p in points], [p.high for p in points], color=f"C{number}", alpha=0.2, linewidth=0
            )
        axes.set(title=task, xlabel="environment steps", ylabel="evaluation return (interquartile mean, 95 %)")
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
        axes.grid(alpha=0.3)
        axes.legend()
    drawing.savefig(output / "figure.png", dpi=120)
    plt.close(drawing)
