"""Runs that are killed, and go on as if they had never been.

Real processes, killed for good (SIGKILL) at moments of their own choosing or of ours; the run that `--resume` ends is
compared with one that nothing happened to.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pqn_eqx
from pqn_eqx.run_directory import read_rows

SMALL = [
    "--num-envs=16",
    "--num-steps=8",
    "--num-minibatches=2",
    "--num-epochs=1",
    "--num-env-blocks=4",
    "--network.encoder.hidden-size=16",
    "--eval.num-envs=4",
    "--eval.max-steps=20",
    "--total-timesteps=5120",
    "--log-interval=256",
    "--eval.interval=1024",
    "--checkpoint.interval=512",
]
"""Forty updates; a row every 2, an evaluation every 8, a checkpoint every 4."""

CONFIGURATIONS = {
    "feed-forward": ([], {}),
    "recurrent": (
        [
            "network.memory:gru",
            "--network.memory.hidden-size=8",
            "--network.input-normalization=running",
            "--memory-window=2",
        ],
        {},
    ),
    "population": (["--sweep.learning-rate", "1e-4", "1e-3", "--num-seeds=2"], {}),
    "groups": (["--num-seeds=2", "--members-per-group=1"], {}),
    "devices": (["--mesh.env=4"], {"devices": 4}),
    "fewer devices": ([], {"devices": 4, "resumed": 1, "x64": True}),
}

DIE = """
import os, signal, sys
from pqn_eqx import checkpoint, train

moment, number, *argv = sys.argv[1:]
save, calls = checkpoint.Checkpoints.save, []

def dying(self, *arguments):
    calls.append(self)
    last = len(calls) == int(number)
    if last and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, *arguments)
    if last and moment == "during":
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint.Checkpoints.save = dying
sys.exit(train.main(argv))
"""
"""A training that kills itself at its checkpoint of a number: once its rows are written, or while it is."""


def start(*argv: str, devices: int = 1, x64: bool = False, die: tuple[str, int] | None = None) -> subprocess.Popen:
    program = ["-m", "pqn_eqx.train"] if die is None else ["-c", DIE, die[0], str(die[1])]
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return subprocess.Popen(
        [sys.executable, *program, *argv],
        cwd=Path(pqn_eqx.__file__).parent.parent,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": str(int(x64))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, status: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


def kill_at_random(process: subprocess.Popen, path: Path, rng: random.Random, rows: int) -> None:
    """Kill a run soon after it wrote a random number of rows."""
    wanted = rng.randrange(rows)
    while process.poll() is None and len(read_rows(path / "metrics.jsonl")) < wanted:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.1))
    process.kill()
    process.communicate()


def last_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of the last checkpoint of every group."""
    import orbax.checkpoint as ocp

    found = {}
    for folder in sorted({file.parent.parent for file in (path / "checkpoints").rglob("about")}):
        last = max(int(step.name) for step in folder.iterdir())
        for item in ("network", "training", "actors", "measures"):
            with ocp.StandardCheckpointer() as reader:
                tree = reader.restore((folder / str(last) / item).resolve())
            found |= {f"{folder.name}/{last}/{item}/{name}": np.asarray(leaf) for name, leaf in tree.items()}
    return found


def untimed(path: Path) -> list[dict]:
    times = ("steps_per_second", "wall_seconds")
    return [{name: value for name, value in row.items() if name not in times} for row in read_rows(path)]


def assert_same_run(path: Path, expected: Path, exactly: bool = True) -> None:
    for name in ("metrics.jsonl", "eval.jsonl"):
        rows, others = untimed(path / name), untimed(expected / name)
        if exactly:
            assert rows == others
        assert [row["update"] for row in rows] == [row["update"] for row in others]
        for row, other in zip(rows, others, strict=True):
            assert row.keys() == other.keys()
            np.testing.assert_allclose(*([np.nan if v is None else v for v in r.values()] for r in (row, other)), 1e-9)
    found, wanted = last_arrays(path), last_arrays(expected)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        if exactly:
            assert found[name].tobytes() == array.tobytes(), name
        else:
            np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-10, err_msg=name)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (path, expected)]
    for field in ("status", "seeds", "update", "env_steps", "diverged_at"):
        assert summaries[0][field] == summaries[1][field]
    assert not list(path.rglob("*tmp*"))


UNINTERRUPTED: dict[str, Path] = {}


def uninterrupted(name: str, factory) -> Path:
    """The run of a configuration that nothing happens to; made once."""
    if name not in UNINTERRUPTED:
        arguments, environment = CONFIGURATIONS[name]
        path = factory.mktemp("uninterrupted") / "run"
        finish(
            start(
                *SMALL,
                *arguments,
                f"--run-dir={path}",
                devices=environment.get("devices", 1),
                x64=environment.get("x64", False),
            )
        )
        UNINTERRUPTED[name] = path
    return UNINTERRUPTED[name]


def killed_and_resumed(name: str, path: Path, moment: str, number: int) -> None:
    arguments, environment = CONFIGURATIONS[name]
    devices, x64 = environment.get("devices", 1), environment.get("x64", False)
    argv = [*SMALL, *arguments, f"--run-dir={path}"]
    if moment == "at random":
        process = start(*argv, devices=devices, x64=x64)
        kill_at_random(process, path, random.Random(number), rows=20)
    else:
        finish(start(*argv, devices=devices, x64=x64, die=(moment, number)), status=-signal.SIGKILL)
    # Killed before it began: there is nothing to go on with, so it starts anew.
    again = ["--resume", str(path)] if (path / "config.json").exists() else argv
    finish(start(*again, devices=environment.get("resumed", devices), x64=x64))


@pytest.mark.parametrize(
    ("name", "moment", "number"),
    [
        ("feed-forward", "during", 4),
        ("recurrent", "before", 5),
        ("population", "at random", 3),
        ("groups", "before", 13),
        ("devices", "during", 6),
        ("fewer devices", "before", 3),
    ],
)
def test_a_killed_run_ends_as_if_it_had_not_been(name, moment, number, tmp_path, tmp_path_factory):
    """Bitwise, and on fewer devices in float64 to 1e-9. Red if any part of the state, a row or a schedule were lost,
    doubled or begun anew."""
    path = tmp_path / "run"
    killed_and_resumed(name, path, moment, number)
    assert_same_run(path, uninterrupted(name, tmp_path_factory), exactly=name != "fewer devices")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_runs_killed_at_random_moments(name, number, tmp_path, tmp_path_factory):
    path = tmp_path / "run"
    killed_and_resumed(name, path, "at random", number)
    assert_same_run(path, uninterrupted(name, tmp_path_factory), exactly=name != "fewer devices")


def test_a_run_told_to_make_room_can_be_resumed(tmp_path):
    """SIGTERM in the middle of a log interval: saved, status 75, and resumed without a row too many or too few.

    Red if the interval cut short stood in the files, or its sums were lost.
    """
    path, whole = tmp_path / "run", tmp_path / "whole"
    # Intervals of 4000 updates, which no chunk fills at once.
    argv = [*SMALL, "--total-timesteps=1024000", "--log-interval=512000", "--eval.interval=512000"]
    argv += ["--checkpoint.interval=1024000"]
    process = start(*argv, f"--run-dir={path}")
    while not (line := process.stdout.readline()).startswith("Compiled"):
        assert line, process.communicate()
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    output = finish(process, status=75)
    assert "SIGTERM again leaves at once" in output
    assert json.loads((path / "summary.json").read_text())["status"] == "interrupted"
    finish(start("--resume", str(path)))
    finish(start(*argv, f"--run-dir={whole}"))
    assert_same_run(path, whole)
