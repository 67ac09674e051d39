"""The files of a run: who writes them, who reads them, and their names. Imports no JAX.

A run directory is all that is left of a run; figures, tables and studies read it and nothing else.

    config.json         the complete configuration; `--config` runs it again
    members.json        the population: seed and swept values of every member
    metrics.jsonl       a line per member and log interval
    eval.jsonl          a line per member and evaluation
    summary.json        how the run ended
    learning_curve.png  its figure
    checkpoints/        the whole training state, by environment steps
"""

import contextlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pqn_eqx.errors import ConfigError, UserError

CHECKPOINTS = "checkpoints"
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
    """Writes a run's files. Every line goes to the disk at once, so that a killed run keeps what it had."""

    def __init__(self, path: Path):
        self.path = path
        self.waiting: dict[str, list[str]] = {}
        self.waits = False

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

    def cut(self, members: Sequence[int], logged: int, evaluated: int) -> None:
        """Take back the rows of `members` after these updates: what a resumed run will write again.

        Raises `UserError` where the files cannot be written.
        """
        for file, last in ((METRICS, logged), (EVALUATIONS, evaluated)):
            rows = read_rows(self.path / file)
            kept = [row for row in rows if row["member"] not in members or row["update"] <= last]
            if (self.path / file).exists():
                self._replace(file, "".join(json.dumps(row) + "\n" for row in kept))

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the configuration of a run that goes on, whole or not at all."""
        self._replace(CONFIG, json.dumps(config, indent=2) + "\n")

    def _replace(self, file: str, text: str) -> None:
        temporary = self.path / (file + ".part")
        try:
            temporary.write_text(text)
            temporary.replace(self.path / file)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise UserError(f"{self.path / file} cannot be written: {error.strerror}.") from error

    def append(self, file: str, rows: list[dict[str, Any]]) -> None:
        """Add `rows` to a JSON-lines file; on return they are on the disk.

        Where that fails (a full disk, a folder that is gone) the file keeps whole lines, the rows wait for the next
        call, and a line on stderr says so: a run outlives its files.
        """
        lines = self.waiting.pop(file, []) + [json.dumps(to_json(row)) + "\n" for row in rows]
        try:
            self._append(self.path / file, "".join(lines))
        except OSError as error:
            if not self.waits:
                self.waits = True
                say(
                    f"{self.path / file} cannot be written: {error.strerror}. Its rows are kept and tried again with "
                    f"the next ones; training goes on."
                )
            self.waiting[file] = lines
        else:
            self.waits = any(self.waiting.values())

    def _append(self, path: Path, text: str) -> None:
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise

    def close(self) -> None:
        """Try once more to write what waits, and say what is lost."""
        for file in [file for file, lines in self.waiting.items() if lines]:
            self.append(file, [])
            if lost := self.waiting.get(file):
                say(f"{self.path / file}: the last {len(lost)} rows are lost.")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the summary, whole or not at all. Raises `UserError` where it cannot be."""
        self._replace(SUMMARY, json.dumps(to_json(summary), indent=2) + "\n")


def say(line: str) -> None:
    """Tell the user of something that went wrong and ends nothing."""
    print(line, file=sys.stderr)


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
