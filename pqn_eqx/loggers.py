"""Listeners that show a run and write its files."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pqn_eqx import __version__
from pqn_eqx.callbacks import Callback, Evaluated, Interval, Outcome, Plan
from pqn_eqx.errors import UserError
from pqn_eqx.population import Member
from pqn_eqx.run_directory import EVALUATIONS, METRICS, RunDirectory, read_rows, say


class JsonLinesLogger(Callback):
    """Writes a line per member and log interval, and per member and evaluation."""

    def __init__(self, directory: RunDirectory):
        self.directory = directory

    def on_start(self, plan: Plan) -> None:
        self.members = plan.members

    def on_interval(self, interval: Interval) -> None:
        self._append(METRICS, interval.rows())

    def on_evaluation(self, evaluated: Evaluated) -> None:
        self._append(EVALUATIONS, evaluated.rows())

    def close(self) -> None:
        self.directory.close()

    def _append(self, file: str, rows: list[dict[str, Any]]) -> None:
        names = [{"member": member.number, "seed": member.seed} for member in self.members]
        self.directory.append(file, [name | row for name, row in zip(names, rows, strict=True)])


class SummaryLogger(Callback):
    """Writes the summary whenever a group of the population ends, and its figure: of all groups so far."""

    def __init__(self, directory: RunDirectory):
        self.directory = directory
        self.outcomes: list[Outcome] = []
        self.seeds: list[int] = []
        self.last_rows: list[dict[str, Any] | None] = []

    def on_start(self, plan: Plan) -> None:
        self.seeds += [member.seed for member in plan.members]
        # A resumed run may have been evaluated before.
        rows = {row["member"]: row for row in read_rows(self.directory.path / EVALUATIONS)}
        self.group_rows = [rows.get(member.number) for member in plan.members]

    def on_evaluation(self, evaluated: Evaluated) -> None:
        self.group_rows = list(evaluated.rows())

    def on_end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.last_rows += self.group_rows
        steps = sum(outcome.env_steps * outcome.num_members for outcome in self.outcomes)
        seconds = sum(outcome.train_seconds for outcome in self.outcomes)
        diverged = [update for outcome in self.outcomes for update in outcome.diverged_at]
        self._try(
            self.directory.write_summary,
            {
                "status": self._status(),
                "eval_return": self._eval_return(),
                "seeds": self.seeds,
                "diverged_at": diverged,
                "update": outcome.update,
                "env_steps": outcome.env_steps,
                "steps_per_second": steps / max(seconds, 1e-9),
                "compile_seconds": sum(outcome.compile_seconds for outcome in self.outcomes),
                "wall_seconds": sum(outcome.wall_seconds for outcome in self.outcomes),
                "versions": versions(),
                "git_commit": git_commit(),
            },
        )
        # matplotlib takes a second to import: not before it is needed.
        from pqn_eqx.plot import learning_curve

        self._try(learning_curve, self.directory.path)

    def _try(self, function: Callable[..., Any], *arguments: Any) -> None:
        """A file that cannot be written at the end of a run loses that file alone."""
        try:
            function(*arguments)
        except (OSError, UserError) as error:
            say(f"{error} It is lost.")

    def _status(self) -> str:
        """A population has diverged where every group has; otherwise it ended as its last group that did not."""
        return next((o.status for o in reversed(self.outcomes) if o.status != "diverged"), "diverged")

    def _eval_return(self) -> dict[str, Any]:
        rows = [row for row in self.last_rows if row is not None]
        if not rows:
            return {"mean": None, "per_member": None, "env_steps": None, "unfinished": None}
        known = [row["episode_return"] for row in rows if row["episode_return"] is not None]
        return {
            "mean": float(np.mean(known)) if known else None,
            "per_member": [row and row["episode_return"] for row in self.last_rows],
            "env_steps": rows[-1]["env_steps"],
            "unfinished": [row and row["unfinished"] for row in self.last_rows],
        }


class ConsoleLogger(Callback):
    """A progress bar; where the output is no terminal, a plain line now and then."""

    LINE_SECONDS = 10.0

    def __init__(self, title: str, console: Console | None = None):
        self.console = console or Console()
        self.title = title
        self.mean_return: float | None = None
        self.last_line = 0.0
        self.progress: Progress | None = None

    def on_start(self, plan: Plan) -> None:
        self.plan = plan
        self.mean_return, self.last_line = None, 0.0
        for note in plan.notes:
            self._say(note)
        members = f"{plan.num_members} members, " if plan.num_members > 1 else ""
        if plan.num_members < plan.population:
            first, last = plan.members[0].number, plan.members[-1].number
            members = f"member {first}" if first == last else f"members {first} to {last}"
            members += f" of {plan.population}, "
        self._say(
            f"{self.title}: {members}{plan.num_updates:,} updates of {plan.steps_per_update:,} environment steps; "
            f"logging every {plan.env_steps(plan.log_interval):,}, evaluating every "
            f"{plan.env_steps(plan.eval_interval):,}."
        )
        self._say("Compiling ...")

    def on_compiled(self, seconds: float) -> None:
        self._say(f"Compiled in {seconds:.0f} s.")
        if self.console.is_terminal:
            self.progress = Progress(
                TextColumn(self.title),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]:>11,.0f} steps/s"),
                TextColumn("return {task.fields[mean_return]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
            )
            self.task = self.progress.add_task("", total=self.plan.num_updates, rate=0, mean_return="-")
            self.progress.start()

    def on_progress(self, interval: Interval) -> None:
        returns = interval.metrics["episode_return"]
        if np.isfinite(returns).any():
            self.mean_return = float(np.nanmean(returns))
        if self.progress is not None:
            self.progress.update(
                self.task,
                completed=interval.update,
                rate=interval.steps_per_second,
                mean_return=self._mean_return(),
            )
        elif interval.wall_seconds - self.last_line >= self.LINE_SECONDS:
            self.last_line = interval.wall_seconds
            self._say(
                f"{interval.update / self.plan.num_updates:4.0%}  {interval.env_steps:>13,} steps  "
                f"{interval.steps_per_second:>11,.0f} steps/s  return {self._mean_return()}"
            )

    def on_evaluation(self, evaluated: Evaluated) -> None:
        evaluation = evaluated.evaluation
        known = [row["episode_return"] for row in evaluation.rows() if row["episode_return"] is not None]
        returns = f"{np.mean(known):.2f}" if known else "unknown"
        finished = int(evaluation.finished.sum())
        line = f"{evaluated.env_steps:,} steps: evaluation return {returns} over {finished} episodes"
        if unfinished := evaluation.finished.size - finished:
            line += f"; {unfinished} did not end within {self.plan.eval_max_steps:,} steps and are left out"
        self._say(line)

    def on_divergence(self, member: Member, update: int) -> None:
        self._say(
            f"Member {member.number} (seed {member.seed}) is no longer finite, since update {update}."
            + (" The others go on." if self.plan.num_members > 1 else "")
        )

    def on_end(self, outcome: Outcome) -> None:
        self.close()
        self._say(
            f"{outcome.status.capitalize()} after {outcome.env_steps:,} environment steps and "
            f"{outcome.wall_seconds:.0f} s ({outcome.steps_per_second:,.0f} steps/s)."
        )

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def _mean_return(self) -> str:
        return "-" if self.mean_return is None else f"{self.mean_return:.1f}"

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)


def versions() -> dict[str, str]:
    """The versions that numbers may depend on."""
    found = {"pqn_eqx": __version__, "python": sys.version.split()[0]}
    for package in ("jax", "jaxlib", "equinox", "optax", "gymnax", "craftax", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of this source tree, with ``-dirty`` where it has changes; None where it is no checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()
