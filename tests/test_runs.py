"""The list of runs: their state by their files."""

import json
import os
import time

import pytest

from pqn_eqx.run_directory import RunDirectory
from pqn_eqx.runs import find_runs, main
from tests.test_train import command

CONFIG = {"name": "acrobot", "total_timesteps": 1000}


def make(path, status=None, env_steps=500, age=0.0):
    directory = RunDirectory.create(path, CONFIG)
    rows = [{"member": m, "env_steps": steps, "episode_return": 10.0 * m} for steps in (100, env_steps) for m in (1, 2)]
    directory.append("metrics.jsonl", rows)
    if status is not None:
        directory.write_summary({"status": status, "eval_return": {"mean": 99.0}})
    for file in path.iterdir():
        os.utime(file, (time.time() - age,) * 2)
    return path


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "a" / "whole", "finished", env_steps=1000, age=50)
    make(tmp_path / "cut", "diverged", age=100)
    make(tmp_path / "now", age=10)
    make(tmp_path / "dead", age=10_000)
    make(tmp_path / "again", "interrupted", age=200)
    os.utime(tmp_path / "again" / "metrics.jsonl")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("[]")
    return tmp_path


def test_states(folder):
    """Red if a run that is under way passes for stopped, or a stopped one for running."""
    found = {run.path.name: run for run in find_runs(folder)}
    assert {name: run.state for name, run in found.items()} == {
        "whole": "finished",
        "cut": "diverged",
        "now": "running",
        "dead": "stopped",
        "again": "running",
    }
    assert (found["whole"].env_steps, found["whole"].episode_return, found["whole"].members) == (1000, 99.0, 2)
    # Without a summary, the mean of the last rows.
    assert (found["now"].env_steps, found["now"].episode_return) == (500, 15.0)
    assert found["now"].total_timesteps == 1000


def test_the_last_changed_comes_first(folder):
    assert [run.path.name for run in find_runs(folder)] == ["again", "now", "whole", "cut", "dead"]


def test_table(folder):
    finished = command(folder, main=main)
    assert finished.status == 0
    assert "a/whole" in finished.out
    assert "1,000 (100%)" in finished.out
    assert "acrobot" in finished.out


def test_nothing_is_said(tmp_path):
    finished = command(tmp_path, main=main)
    assert finished.status == 1
    assert finished.err == f"error: there is no run at or below {tmp_path}.\n"


def test_a_run_that_has_only_begun(tmp_path):
    RunDirectory.create(tmp_path / "new", CONFIG)
    (run,) = find_runs(tmp_path)
    assert (run.env_steps, run.episode_return, run.members, run.state) == (0, None, 0, "running")
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == CONFIG
