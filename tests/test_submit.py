"""Submission to a cluster: the batch script, what is refused, and a real job of the local executor."""

import json
import re

import pytest

from pqn_eqx import submit as submit_module
from pqn_eqx.errors import ConfigError
from pqn_eqx.submit import REQUEUE, SubmitConfig, TrainJob, main
from tests.test_train import TINY, command


def submitted(*argv) -> tuple[int, str, str]:
    finished = command(*argv, main=main)
    return finished.status, finished.out, finished.err


def test_batch_script(tmp_path):
    """Red if the processes, GPUs or limits of the job were not those asked for: one process for each GPU."""
    status, out, _ = submitted(
        *("--nodes", 16, "--gpus-per-node", 4, "--cpus-per-task", 12, "--minutes", 90, "--mem-gb", 480),
        *("--partition", "gpu", "--account", "rl", "--setup", "module load cuda", "--folder", tmp_path, "--print"),
        *("--", "craftax", "--num-envs", "204800"),
    )
    assert status == 0
    lines = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", out, re.MULTILINE))
    expected = {
        "nodes": "16",
        "ntasks-per-node": "4",
        "gpus-per-node": "4",
        "cpus-per-task": "12",
        "time": "90",
        "mem": "480GB",
        "partition": "gpu",
        "account": "rl",
        "job-name": "pqn_eqx",
    }
    assert {name: lines.get(name) for name in expected} == expected
    assert "module load cuda" in out.splitlines()
    assert re.search(rf"^srun .* -m submitit.core._submit {tmp_path}", out, re.MULTILINE)
    assert "python -m pqn_eqx.train craftax --num-envs 204800" in out
    assert list(tmp_path.iterdir()) == []


def test_without_gpus_one_process_a_node(tmp_path):
    _, out, _ = submitted("--nodes", 2, "--folder", tmp_path, "--print", "--", "cartpole")
    assert "#SBATCH --ntasks-per-node=1" in out
    assert "gpus-per-node" not in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nodes", "2"], "Say what to train after --"),
        (["--", "cartpol"], "There is no preset 'cartpol'"),
        (["--", "--sweep.num-envs", "1"], "cannot be swept"),
    ],
)
def test_a_wrong_request_is_told_here_and_not_by_the_job(argv, words):
    status, _, err = submitted(*argv)
    assert status == 2
    assert err.startswith("error: ")
    assert words in err


def test_without_a_cluster_it_says_how_to_try(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = submitted("--folder", tmp_path, "--", "cartpole")
    assert status == 1
    assert "srun" in err
    assert "--cluster local" in err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"gpus_per_node": -1}, "gpus_per_node must be at least 0"),
        ({"cluster": "local", "nodes": 2}, "cluster local is one process on this machine; got 2 nodes x 1"),
        ({"cluster": "local", "gpus_per_node": 4}, "got 1 nodes x 4 processes"),
    ],
)
def test_refuses_what_cannot_work(fields, message):
    with pytest.raises(ConfigError, match=message):
        SubmitConfig(**fields)


def test_a_job_on_this_machine_trains(tmp_path):
    """Red if a job could be submitted and not run: a real process, which unpickles the job and trains."""
    path = tmp_path / "run"
    status, out, err = submitted("--cluster", "local", "--folder", tmp_path / "jobs", "--", *TINY, "--run-dir", path)
    assert status == 0, err
    assert "Finished after 320 environment steps" in out
    assert json.loads((path / "summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_job_that_fails_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    status, _, err = submitted("--cluster", "local", "--folder", tmp_path / "jobs", "--", *TINY, "--run-dir", tmp_path)
    assert status == 1
    assert "holds a run already" in err


def test_a_job_that_is_queued_again_goes_on_with_its_run(tmp_path, monkeypatch):
    """Red if a requeued job began anew, or one that saved and left were not queued again, or by every process."""
    job = TrainJob(("cartpole", "--seed", "3"), tmp_path / "run")
    assert job.command_line() == ["cartpole", "--seed", "3", "--run-dir", str(tmp_path / "run")]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    assert job.command_line() == ["--resume", str(tmp_path / "run")]
    trained, asked = [], []
    monkeypatch.setattr(submit_module, "train", lambda argv: trained.append(argv) or REQUEUE)
    monkeypatch.setattr(submit_module.subprocess, "run", lambda command, check: asked.append(command))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for process in ("0", "1"):
        monkeypatch.setenv("SLURM_PROCID", process)
        assert job() == REQUEUE
    assert trained == [["--resume", str(tmp_path / "run")]] * 2
    assert asked == [["scontrol", "requeue", "77"]]


def test_the_script_asks_for_the_signal_and_the_queue(tmp_path):
    _, out, _ = submitted("--grace-seconds", 90, "--folder", tmp_path, "--print", "--", "cartpole")
    assert "#SBATCH --signal=USR1@90" in out
    assert "#SBATCH --requeue" in out
