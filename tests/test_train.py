"""The command from end to end: its files, its messages and its exit status.

All runs have the same tiny shapes, so that with the persistent cache one program is compiled for a single member and
one for two.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import pqn_eqx
from pqn_eqx import train as train_module
from pqn_eqx.errors import DivergenceError, UserError
from pqn_eqx.run_directory import read_rows
from pqn_eqx.serialization import load_config
from pqn_eqx.train import main, stop_on_signals

SHAPES = [
    "--num-envs=4",
    "--num-steps=8",
    "--num-minibatches=2",
    "--num-epochs=1",
    "--network.encoder.hidden-size=16",
    "--eval.num-envs=4",
    "--eval.max-steps=20",
]
TINY = [*SHAPES, "--total-timesteps", "320"]
"""Ten updates of 32 steps, each of them logged and evaluated."""

TIMES = ("steps_per_second", "wall_seconds")

FILES = {"checkpoints", "config.json", "members.json", "metrics.jsonl", "eval.jsonl"} | {
    "summary.json",
    "learning_curve.png",
}


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a command left: its exit status and what it printed."""

    status: int
    out: str
    err: str


def command(*argv: str | Path, main=main) -> Finished:
    """Run a command, by default the training, in this process, as the shell would."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(argument) for argument in argv])
        except SystemExit as stop:
            status = stop.code
    return Finished(status, out.getvalue(), err.getvalue())


def untimed(path: Path) -> list[dict]:
    """The rows of a file without what the clock says."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in read_rows(path)]


def by_member(path: Path, member: int) -> list[dict]:
    return [row for row in read_rows(path) if row["member"] == member]


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> tuple[Path, Finished]:
    """A run of one member with seed 3."""
    path = tmp_path_factory.mktemp("train") / "single"
    return path, command(*TINY, "--seed", "3", "--run-dir", path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Finished]:
    """The same with two members."""
    path = tmp_path_factory.mktemp("train") / "pair"
    return path, command(*TINY, "--seed", "3", "--num-seeds", "2", "--run-dir", path)


def test_a_run_leaves_its_files(single):
    """Red where a run fails, lacks a file or leaves one that nobody knows."""
    path, finished = single
    assert finished.status == 0, finished.err
    assert {file.name for file in path.iterdir()} == FILES
    with Image.open(path / "learning_curve.png") as image:
        image.load()
        assert image.size == (960, 600)


def test_a_run_tells_where_its_files_are(single):
    """Red where the user must look for the run's folder, or a run that went well writes to stderr."""
    path, finished = single
    lines = finished.out.splitlines()
    assert lines[-1] == f"Run directory: {path}"
    assert lines[0].startswith("Devices: 1 cpu device")
    assert lines[1].startswith("cartpole: 10 updates of 32 environment steps")
    assert lines[-2].startswith("Finished after 320 environment steps")
    assert finished.err == ""


def test_metrics_of_a_run(single):
    """Red where a field that figures and tables read is missing, or a line is written twice or never."""
    rows = read_rows(single[0] / "metrics.jsonl")
    assert [row["update"] for row in rows] == list(range(1, 11))
    assert [row["env_steps"] for row in rows] == [32 * update for update in range(1, 11)]
    for row in rows:
        assert set(row) == {
            "member",
            "seed",
            "update",
            "env_steps",
            "episode_return",
            "episode_length",
            "loss",
            "q_mean",
            "td_error",
            "epsilon",
            "learning_rate",
            "grad_norm",
            "steps_per_second",
            "wall_seconds",
        }
        assert (row["member"], row["seed"]) == (0, 3)
        for name in ("loss", "q_mean", "td_error", "grad_norm"):
            assert isinstance(row[name], float)
            assert np.isfinite(row[name])
        assert row["steps_per_second"] > 0
    assert (np.diff([row["wall_seconds"] for row in rows]) > 0).all()


def test_metrics_of_a_run_have_known_values(single):
    """Red where the schedules run over the wrong length, or episodes are not those of CartPole (return = length)."""
    rows = read_rows(single[0] / "metrics.jsonl")
    # From 1 to 0.2 over a fifth of 320 steps, and from 1e-4 to 0 over ten updates.
    np.testing.assert_allclose([row["epsilon"] for row in rows], [1.0, 0.6] + 8 * [0.2], rtol=1e-6)
    np.testing.assert_allclose([row["learning_rate"] for row in rows], 1e-4 * (1 - np.arange(10) / 10), rtol=1e-5)
    ended = [row for row in rows if row["episode_return"] is not None]
    assert ended
    for row in ended:
        assert row["episode_return"] == row["episode_length"] >= 8


def test_evaluations_of_a_run(single):
    """Red where an evaluation is missing, above all the last one, or goes beyond its limit."""
    rows = read_rows(single[0] / "eval.jsonl")
    assert [row["env_steps"] for row in rows] == [32 * update for update in range(1, 11)]
    for row in rows:
        assert (row["member"], row["seed"]) == (0, 3)
        assert row["episodes"] + row["unfinished"] == 4
        if row["episodes"]:
            assert 8 <= row["episode_return"] == row["episode_length"] <= 20


def test_summary_of_a_run(single):
    """Red where a field that tables read is missing, or the summary is not that of the last evaluation."""
    path, _ = single
    summary = json.loads((path / "summary.json").read_text())
    last = read_rows(path / "eval.jsonl")[-1]
    assert summary["status"] == "finished"
    assert summary["eval_return"] == {
        "mean": last["episode_return"],
        "per_member": [last["episode_return"]],
        "env_steps": 320,
        "unfinished": [last["unfinished"]],
    }
    assert (summary["env_steps"], summary["update"], summary["seeds"]) == (320, 10, [3])
    assert summary["steps_per_second"] > 0
    assert 0 < summary["compile_seconds"] < summary["wall_seconds"]
    assert {"pqn_eqx", "jax", "equinox", "gymnax", "python"} <= set(summary["versions"])
    assert summary["git_commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", summary["git_commit"])


def test_configuration_of_a_run_gives_its_numbers_again(single, tmp_path):
    """Red where config.json is not complete, or a number depends on something that is not in it."""
    path, _ = single
    config = load_config(path / "config.json")
    assert (config.seed, config.total_timesteps, config.algorithm.num_envs, config.run_dir) == (3, 320, 4, path)
    again = tmp_path / "again"
    finished = command("--config", path / "config.json", "--run-dir", again)
    assert finished.status == 0, finished.err
    assert untimed(again / "metrics.jsonl") == untimed(path / "metrics.jsonl")
    assert untimed(again / "eval.jsonl") == untimed(path / "eval.jsonl")
    assert load_config(again / "config.json") == dataclasses.replace(config, run_dir=again)


def test_members_are_runs_with_the_seeds_that_follow(single, pair):
    """Red where a member of a population is not the run that its seed gives alone, or members are alike."""
    path, finished = pair
    assert finished.status == 0, finished.err
    rows = read_rows(path / "metrics.jsonl")
    assert [(row["member"], row["seed"], row["update"]) for row in rows] == [
        (member, 3 + member, update) for update in range(1, 11) for member in range(2)
    ]
    first, second = by_member(path / "metrics.jsonl", 0)[0], by_member(path / "metrics.jsonl", 1)[0]
    alone = read_rows(single[0] / "metrics.jsonl")[0]
    for name in ("loss", "q_mean", "td_error", "grad_norm"):
        np.testing.assert_allclose(first[name], alone[name], rtol=1e-5)
        assert abs(second[name] - alone[name]) > 1e-3 * abs(alone[name])


def test_summary_of_a_population(pair):
    """Red where the summary tells of one member alone, or counts the steps of all as those of one."""
    path, _ = pair
    summary = json.loads((path / "summary.json").read_text())
    last = read_rows(path / "eval.jsonl")[-2:]
    returns = [row["episode_return"] for row in last]
    assert [row["seed"] for row in last] == summary["seeds"] == [3, 4]
    assert summary["eval_return"]["per_member"] == returns
    assert summary["eval_return"]["mean"] == pytest.approx(np.mean([value for value in returns if value is not None]))
    assert summary["env_steps"] == 320
    assert {file.name for file in path.iterdir()} == FILES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--learning-rate", "1e30", "--no-anneal-learning-rate"], "--learning-rate"),
        (["--reward-scale", "1e30"], "--reward-scale"),
    ],
)
def test_divergence_ends_a_run_and_keeps_what_it_had(arguments, words, tmp_path):
    """Red where a run goes on without a finite loss, ends as if all were well, or loses its files."""
    path = tmp_path / "run"
    finished = command(*TINY, "--seed", "3", *arguments, "--run-dir", path)
    assert finished.status == 1
    assert finished.err.startswith("error: Training diverged")
    assert re.search(r"update \d+", finished.err)
    assert words in finished.err
    assert "Traceback" not in finished.err
    assert f"Run directory: {path}" in finished.out
    summary = json.loads((path / "summary.json").read_text())
    assert summary["status"] == "diverged"
    rows = read_rows(path / "metrics.jsonl")
    assert rows[-1]["loss"] is None
    assert rows[-1]["update"] == summary["update"] < 10


def refused(path: Path, *argv: str | Path) -> str:
    """The message of a command that must fail with a short text and make no folder at `path`."""
    finished = command(*argv)
    assert finished.status == 2, finished
    assert not path.exists()
    assert "Traceback" not in finished.err
    # The package's own messages are a line; tyro's come in a box.
    lines = finished.err.splitlines()
    assert 0 < len(lines) <= (1 if finished.err.startswith("error: ") else 40)
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", finished.err).split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["cartpol"], ["error: There is no preset 'cartpol'", "Did you mean cartpole?", "acrobot"]),
        (["--env.name", "CartPol-v1"], ["env.name", "'CartPol-v1'", "Did you mean CartPole-v1?"]),
        (["--num-envs", "0"], ["num_envs must be at least 1, got 0"]),
        (["--num-minibatches", "5"], ["5 does not divide 4 x 8 = 32", "Divisors nearby: 2, 4, 8"]),
        (["--learning-rate", "-0.1"], ["learning_rate must be a finite number above 0, got -0.1"]),
        (["--learning-rate", "nan"], ["learning_rate must be a finite number above 0, got nan"]),
        (["--total-timesteps", "31"], ["total_timesteps", "31 is less than num_envs x num_steps = 4 x 8 = 32"]),
        (["--seed", "-1"], ["seed must lie in"]),
        (["--eval.num-envs", "0"], ["eval.num_envs must be at least 1, got 0"]),
        (["--env.params", "gravitee", "9"], ["env.params", "'gravitee'", "Did you mean gravity?"]),
        (
            ["--env.params", "max_steps_in_episode", "9.5"],
            ["env.params", "max_steps_in_episode is of type int, got 9.5"],
        ),
        (["--env.options", "size", "9"], ["env.options", "CartPole-v1", "size"]),
        (["--learning-rat", "1"], ["--learning-rat"]),
        (["loss:hubber"], ["loss:hubber", "loss:huber"]),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value, list) and value[0].startswith("-") else None,
)
def test_a_wrong_request_is_answered_in_a_line(argv, words, tmp_path):
    """Red where a wrong request starts a run, leaves a folder, or is answered with a traceback."""
    path = tmp_path / "run"
    preset = [argv[0]] if not argv[0].startswith("-") and ":" not in argv[0] else []
    text = refused(path, *preset, *TINY, *argv[len(preset) :], "--run-dir", path)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "but a list"),
        ('{"sede": 1}', "sede"),
        ('{"seed": 2.5}', "config.seed"),
        (None, "cannot be read"),
    ],
)
def test_a_broken_configuration_is_answered_in_a_line(content, words, tmp_path):
    """Red where a file that does not fit starts the default run, or its name is not in the message."""
    file = tmp_path / "edited.json"
    if content is not None:
        file.write_text(content)
    text = refused(tmp_path / "run", "--config", file, "--run-dir", tmp_path / "run")
    assert text.startswith(f"error: --config: {file}")
    assert words in text


def test_a_missing_environment_package_names_what_to_install(monkeypatch, tmp_path):
    """Red where Craftax is asked for without its package and the user gets an ImportError."""
    for name in ("craftax", "craftax.craftax_env"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "run"
    text = refused(path, *TINY, "env:craftax", "--run-dir", path)
    assert text == "error: env: the package craftax is not installed. Install it with: pip install 'pqn-eqx[craftax]'"


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_run_is_not_overwritten(single):
    """Red where a second run in the same folder takes the place of the first, or adds to its lines."""
    path, _ = single
    before = contents(path)
    finished = command(*TINY, "--run-dir", path)
    assert finished.status != 0
    assert "holds a run already" in finished.err
    assert finished.err.count("\n") == 1
    assert contents(path) == before


@pytest.mark.parametrize("below", [False, True], ids=["a file", "below a file"])
def test_a_folder_that_cannot_be_made_is_answered_in_a_line(below, tmp_path):
    """Red where a place that nobody can write to, root included, ends in a traceback."""
    file = tmp_path / "file"
    file.write_text("mine")
    finished = command(*TINY, "--run-dir", file / "run" if below else file)
    assert finished.status != 0
    assert finished.err.startswith(f"error: run_dir: {file}")
    assert finished.err.count("\n") == 1
    assert file.read_text() == "mine"


def test_the_default_folder_lies_below_runs(monkeypatch, tmp_path):
    """Red where a run without --run-dir is not kept, or goes elsewhere than the help says."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def build(config, callbacks, should_stop, group):
        seen.append(config)
        raise UserError("stop here")

    monkeypatch.setattr(train_module, "check_unused", seen.append)
    monkeypatch.setattr(train_module.TrainConfig, "build", build)
    assert command("acrobot").status == 1
    assert re.fullmatch(r"runs/acrobot-\d{8}-\d{6}-[0-9a-f]{6}", str(seen[0]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status"), [(UserError("so"), 1), (DivergenceError("so"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_status_tells_failures_apart(monkeypatch, error, status):
    """Red where a script cannot tell a failed run from a stopped one."""

    def train(config, resume):
        raise error

    monkeypatch.setattr(train_module, "train", train)
    finished = command()
    assert finished.status == status
    assert finished.err == ("" if status == 130 else "error: so\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    """Red where any exception is shown as a user's mistake: nobody could find the bug."""

    def train(config, resume):
        raise ZeroDivisionError

    monkeypatch.setattr(train_module, "train", train)
    with pytest.raises(ZeroDivisionError):
        command()


@pytest.fixture
def interruptible():
    """A process that Ctrl-C ends: a shell starts background jobs, and so perhaps these tests, deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_interrupt_asks_and_the_second_leaves(interruptible, capsys):
    """Red where Ctrl-C loses the run, cannot end one that hangs, or stays bent after the run."""
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals() as should_stop:
        assert not should_stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert should_stop()
        assert "Ctrl-C again" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ZeroDivisionError), stop_on_signals():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_run_is_whole(tmp_path):
    """Red where Ctrl-C does not end a run soon, ends it as a failure, or leaves no summary and figure."""
    path = tmp_path / "run"
    arguments = [*SHAPES, "--total-timesteps", "1000000000", "--log-interval", "6400", "--run-dir", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "pqn_eqx.train", *arguments],
        cwd=Path(pqn_eqx.__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        while not read_rows(path / "metrics.jsonl"):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no line was logged"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "Stopping at the end of this chunk" in err
    assert "Traceback" not in err
    assert f"Run directory: {path}" in out
    summary = json.loads((path / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    rows = read_rows(path / "metrics.jsonl")
    assert 0 < summary["update"] == rows[-1]["update"] < 10**9 // 32
    with Image.open(path / "learning_curve.png") as image:
        image.load()
