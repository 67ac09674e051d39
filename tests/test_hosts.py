"""Several processes as one run: the same numbers, one agreement, and an end when one of them dies.

Real processes on this machine, each with emulated devices of its own, that find each other on 127.0.0.1.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pqn_eqx
from pqn_eqx import hosts
from pqn_eqx.errors import ConfigError, UserError
from pqn_eqx.hosts import Agreement, Decision, HostsConfig
from pqn_eqx.run_directory import read_rows
from pqn_eqx.sharding import make_mesh

SMALL = [
    "--num-envs=16",
    "--num-steps=8",
    "--num-minibatches=2",
    "--num-epochs=1",
    "--num-env-blocks=4",
    "--network.encoder.hidden-size=16",
    "--network.input-normalization=running",
    "--eval.num-envs=4",
    "--eval.max-steps=20",
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(num_processes: int, devices_each: int, *arguments: str, **environment: str) -> list[subprocess.Popen]:
    """The processes of one run; with more than one, each is told of the others."""
    port = free_port()
    flags = f"--xla_force_host_platform_device_count={devices_each} --xla_backend_optimization_level=0"
    processes = []
    for number in range(num_processes):
        together = [
            f"--hosts.coordinator=127.0.0.1:{port}",
            f"--hosts.num-processes={num_processes}",
            f"--hosts.process-id={number}",
        ]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "pqn_eqx.train", *SMALL, *arguments, *(together if num_processes > 1 else [])],
                cwd=Path(pqn_eqx.__file__).parent.parent,
                env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen]):
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def outputs(processes: list[subprocess.Popen], timeout: float) -> list[str]:
    return [process.communicate(timeout=timeout)[0] for process in processes]


def wait_for_lines(path: Path, processes: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 240
    while not read_rows(path / "metrics.jsonl"):
        assert all(process.poll() is None for process in processes), outputs(processes, 10)
        assert time.monotonic() < deadline, "no line was logged"
        time.sleep(0.1)


def test_two_processes_of_two_devices_are_one_of_four(tmp_path):
    """In float64, a population of two on two devices each: every number of every member to 1e-10, and one set of files.

    Red if processes drew other random numbers, reduced over their own devices alone, or wrote each other's lines.
    """
    arguments = ["--total-timesteps=1280", "--num-seeds=2", "--mesh.member=2", "--mesh.env=2"]
    together, alone = tmp_path / "together", tmp_path / "alone"
    with ended(start(2, 2, *arguments, f"--run-dir={together}", JAX_ENABLE_X64="1")) as processes:
        first, second = outputs(processes, 300)
        assert [process.returncode for process in processes] == [0, 0], (first, second)
    assert "4 cpu devices: 2 along members x 2 along environments" in first
    # What is left is the transport's own.
    assert [line for line in second.splitlines() if not line.startswith("[Gloo]")] == []
    with ended(start(1, 4, *arguments, f"--run-dir={alone}", JAX_ENABLE_X64="1")) as processes:
        (output,) = outputs(processes, 300)
        assert processes[0].returncode == 0, output
    for name in ("metrics.jsonl", "eval.jsonl"):
        rows, expected = read_rows(together / name), read_rows(alone / name)
        assert len(rows) == len(expected) == 20
        for row, other in zip(rows, expected, strict=True):
            assert row.keys() == other.keys()
            for field in row.keys() - {"steps_per_second", "wall_seconds"}:
                if other[field] is None:
                    assert row[field] is None
                else:
                    np.testing.assert_allclose(row[field], other[field], rtol=1e-10, err_msg=field)
    assert {file.name for file in together.iterdir()} == {file.name for file in alone.iterdir()}


def test_all_stop_when_one_is_asked_to(tmp_path):
    """Red if the process that is interrupted left the others waiting, or only the first could be."""
    path = tmp_path / "run"
    arguments = ["--total-timesteps=1000000000", "--log-interval=12800", f"--run-dir={path}"]
    with ended(start(2, 1, *arguments)) as processes:
        wait_for_lines(path, processes)
        processes[1].send_signal(signal.SIGINT)
        texts = outputs(processes, 60)
        assert [process.returncode for process in processes] == [0, 0], texts
    summary = json.loads((path / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["update"] == read_rows(path / "metrics.jsonl")[-1]["update"]


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_when_a_process_dies_the_others_end(tmp_path, victim):
    """Within a minute, with what was logged still there to read. Red if they waited for the dead one for ever."""
    path = tmp_path / "run"
    arguments = ["--total-timesteps=1000000000", "--log-interval=12800", f"--run-dir={path}"]
    with ended(start(2, 1, *arguments, "--hosts.heartbeat-timeout=10")) as processes:
        wait_for_lines(path, processes)
        processes[victim].kill()
        died = time.monotonic()
        processes[1 - victim].communicate(timeout=60)
        assert time.monotonic() - died < 60
        assert processes[1 - victim].returncode != 0
    rows = read_rows(path / "metrics.jsonl")
    assert [row["env_steps"] for row in rows] == [12800 * (i + 1) for i in range(len(rows))]
    assert json.loads((path / "config.json").read_text())["name"] == "cartpole"


def test_a_refusal_on_the_first_process_ends_all(tmp_path):
    """Red if the others waited for a process that has left: here for a folder that holds a run."""
    (tmp_path / "config.json").write_text("{}")
    with ended(start(2, 1, "--total-timesteps=1280", f"--run-dir={tmp_path}")) as processes:
        first, _ = outputs(processes, 60)
        assert all(process.returncode != 0 for process in processes)
    assert "holds a run already" in first
    assert "Traceback" not in first


def test_without_others_nothing_is_connected(monkeypatch):
    """Red if every run on a laptop, or a SLURM job of one process, opened a port."""
    monkeypatch.setattr(hosts.jax.distributed, "initialize", lambda *_, **__: pytest.fail("connected"))
    HostsConfig().connect()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    HostsConfig().connect()


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_launchers_are_noticed(monkeypatch, variable):
    """Red if each process under srun or mpirun trained a run of its own."""
    seen = []
    monkeypatch.setenv(variable, "4")
    monkeypatch.setattr(hosts.jax.distributed, "initialize", lambda *a, **k: seen.append((a, k)))
    HostsConfig(heartbeat_timeout=20).connect()
    assert seen == [((None, None, None), {"heartbeat_timeout_seconds": 20})]

    def fail(*_, **__):
        raise RuntimeError("no way")

    monkeypatch.setattr(hosts.jax.distributed, "initialize", fail)
    with pytest.raises(UserError, match=rf"{variable} is set, but .* no way.*--hosts.coordinator"):
        HostsConfig().connect()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coordinator": "a:1"}, "belong together"),
        (
            {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
            r"process_id must lie in .0, num_processes., got 2",
        ),
        ({"coordinator": "a:1", "num_processes": 0, "process_id": 0}, "num_processes must be at least 1"),
        ({"heartbeat_timeout": 1}, "heartbeat_timeout must be at least 5"),
    ],
)
def test_refuses_what_cannot_work(fields, message):
    with pytest.raises(ConfigError, match=message):
        HostsConfig(**fields)


def test_a_process_alone_decides_at_once():
    """Red if a stop had to wait for a vote that nobody else takes part in."""
    wishes = [Decision(False, False, 1, 32)]
    agreement = Agreement(make_mesh(hosts.jax.devices()[:1]), lambda: wishes[-1])
    assert agreement.decision == wishes[0]
    wishes.append(Decision(True, True, 5, 7))
    agreement.ask()
    agreement.hear()
    assert agreement.decision == Decision(True, True, 5, 7)


def test_what_the_first_process_does_is_done_here_and_its_errors_are_raised():
    done = []
    hosts.on_first(lambda: done.append(1))
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        hosts.on_first(lambda: 1 / 0)
