"""The files of a run: who writes them, who reads them, and their names. Imports no JAX.

A run directory is all that is left of a run; figures, tables and studies read it and nothing else.

    config.json         the complete configuration; `--config` runs it again
    members.json        the population: seed and swept values of every member
    metrics.jsonl       a line per member and log interval
    eval.jsonl          a line per member and evaluation
    summary.json        how the run ended
    learning_curve.png  its figure
"""

import json
import math
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pqn_eqx.errors import ConfigError, UserError

CONFIG, MEMBERS, METRICS, EVALUATIONS, SUMMARY, FIGURE = (
    "config.json",
    "members.json",
    "metrics.jsonl",
    "eval.jsonl",
    "summary.json",
    "learning_curve.png",
)


def default_run_directory(name: str) -> Path:
    """``runs/<name>-<time>-<id>``, below the working directory."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def check_unused(path: Path) -> None:
    """Raise `ConfigError` where `path` holds a run already, or is no folder."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run_dir: {path} is a file; give a folder that holds no run yet.")
    if any((path / name).exists() for name in (CONFIG, MEMBERS, METRICS, EVALUATIONS, SUMMARY)):
        raise ConfigError(f"run_dir: {path} holds a run already; give another folder, or remove this one.")


class RunDirectory:
    """Writes a run's files. Every line is flushed, so that a killed run keeps what it had."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, path: Path, config: dict[str, Any], members: Sequence[dict[str, Any]] = ()) -> "RunDirectory":
        """A new run directory with its configuration and member table.

        Raises `UserError` where one cannot be made at `path`.
        """
        check_unused(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            (path / MEMBERS).write_text(json.dumps(list(members), indent=2) + "\n")
        except OSError as error:
            raise UserError(f"run_dir: {path} cannot be written: {error.strerror}. Give another --run-dir.") from error
        return cls(path)

    def append(self, file: str, rows: list[dict[str, Any]]) -> None:
        """Add `rows` to a JSON-lines file."""
        with (self.path / file).open("a") as stream:
            stream.writelines(json.dumps(to_json(row)) + "\n" for row in rows)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the summary, whole or not at all."""
        temporary = self.path / (SUMMARY + ".part")
        temporary.write_text(json.dumps(to_json(summary), indent=2) + "\n")
        temporary.replace(self.path / SUMMARY)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; none where there is no file. A last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def to_json(value: Any) -> Any:
    """`value` in JSON's types: numbers that are not finite become null, numpy's become Python's."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
