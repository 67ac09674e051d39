"""Weights & Biases: every member of a population is a run of its own, all of them in one group."""

import dataclasses
import functools
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pqn_eqx.callbacks import Callback, Evaluated, Interval, Outcome, Plan
from pqn_eqx.packages import import_or_explain
from pqn_eqx.population import Member
from pqn_eqx.run_directory import FIGURE, to_json

RUN_ID = "wandb_id"
"""File in the run directory: the start of its W&B runs' ids, so that a run can be taken up again."""


@dataclasses.dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases: one run per member, in one group. Needs the extra: pip install 'pqn-eqx[wandb]'."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """Where runs go: nowhere, to files in the run directory (`wandb sync` uploads them), or to the server."""
    project: str = "pqn_eqx"
    """Project of the runs."""
    entity: str | None = None
    """User or team that owns the project; default: the account's own."""
    group: str | None = None
    """Group of the members' runs; default: the name of the run directory."""
    tags: tuple[str, ...] = ()
    """Tags of every run."""

    def build(self, directory: Path, config_of: Callable[[Member], dict[str, Any]]) -> list[Callback]:
        """The logger, or none where it is disabled. `config_of` gives a member's own configuration.

        Raises `ConfigError` where wandb is not installed.
        """
        if self.mode == "disabled":
            return []
        return [WandbLogger(self, import_or_explain("wandb", extra="wandb", field="wandb"), directory, config_of)]


def never_fatal(event):
    """An event of `WandbLogger` whose failure ends the logging, with a line on stderr, and never the training."""

    @functools.wraps(event)
    def guarded(self, *arguments):
        if self.broken:
            return
        try:
            event(self, *arguments)
        except Exception as error:
            self.broken = True
            _say(f"W&B stopped: {error}. Training goes on, and its files are in {self.directory}.")

    return guarded


class WandbLogger(Callback):
    """Logs at the log interval, by environment steps. No network and no account: it goes on offline and says so."""

    def __init__(self, config: WandbConfig, wandb: Any, directory: Path, config_of: Callable[[Member], dict[str, Any]]):
        self.config, self.wandb, self.directory, self.config_of = config, wandb, directory, config_of
        self.mode: str = config.mode
        self.broken = False

    @never_fatal
    def on_start(self, plan: Plan) -> None:
        if self.mode == "online" and not self._has_account():
            self._go_offline("no account is set up here (wandb login)")
        self.runs = [self._open(member) for member in plan.members]
        self.last: Sequence[dict[str, Any]] = [{} for _ in self.runs]

    @never_fatal
    def on_interval(self, interval: Interval) -> None:
        self._log(interval.rows(), "")

    @never_fatal
    def on_evaluation(self, evaluated: Evaluated) -> None:
        self.last = evaluated.rows()
        self._log(self.last, "eval/")

    @never_fatal
    def on_end(self, outcome: Outcome) -> None:
        figure = self.directory / FIGURE
        for run, row in zip(self.runs, self.last, strict=True):
            if figure.exists():
                run.log({"learning_curve": self.wandb.Image(str(figure))}, step=outcome.env_steps)
            run.summary.update(
                {
                    "status": outcome.status,
                    "eval_return": row.get("episode_return"),
                    "env_steps": outcome.env_steps,
                    "steps_per_second_of_all": outcome.steps_per_second,
                    "wall_seconds": outcome.wall_seconds,
                }
            )
            run.finish(exit_code=1 if outcome.status == "diverged" else 0)
        if self.mode == "offline":
            _say(f"W&B: to upload, wandb sync {self.directory / 'wandb' / 'offline-run-*'}")

    def _log(self, rows: Sequence[dict[str, Any]], prefix: str) -> None:
        for run, row in zip(self.runs, rows, strict=True):
            known = {f"{prefix}{name}": value for name, value in to_json(row).items() if value is not None}
            run.log(known, step=row["env_steps"])

    def _open(self, member: Member) -> Any:
        try:
            return self._init(member)
        except Exception as error:
            if self.mode == "offline":
                raise
            self._go_offline(str(error))
            return self._init(member)

    def _init(self, member: Member) -> Any:
        return self.wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            group=self.config.group or self.directory.resolve().name,
            name=f"{self.directory.resolve().name}-{member.number}",
            id=f"{self._run_id()}-{member.number}",
            tags=self.config.tags,
            config=self.config_of(member) | member.row(),
            dir=str(self.directory),
            mode=self.mode,
            resume="allow" if self.mode == "online" else None,
            # Many runs in one process; by default a second one would end the first.
            reinit="create_new",
            settings=self.wandb.Settings(
                silent=True, console="off", init_timeout=60, x_disable_stats=member.number > 0
            ),
        )

    def _has_account(self) -> bool:
        return bool(os.environ.get("WANDB_API_KEY")) or self.wandb.login(prompt=False)

    def _go_offline(self, why: str) -> None:
        self.mode = "offline"
        _say(f"W&B goes on offline: {why}. Upload later: wandb sync {self.directory / 'wandb' / 'offline-run-*'}")

    def _run_id(self) -> str:
        file = self.directory / RUN_ID
        if not file.exists():
            file.write_text(secrets.token_hex(4) + "\n")
        return file.read_text().strip()


def _say(line: str) -> None:
    print(line, file=sys.stderr)
