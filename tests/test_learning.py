"""The presets reach their reference numbers. Minutes each: ``pytest -m slow``."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# The preset's learning rate was found for the squared error; at 1e-4 some seeds of HL-Gauss are not through yet.
HL_GAUSS = ("loss:hl-gauss", "--loss.v-min", "-1", "--loss.v-max", "11", "--learning-rate", "5e-4")


def train(directory, *arguments):
    command = [sys.executable, "-m", "pqn_eqx.train", *arguments, "--run-dir", str(directory)]
    subprocess.run(command, check=True, timeout=7200)
    return json.loads((directory / "summary.json").read_text())


def test_cartpole_reaches_its_top_score(tmp_path):
    result = train(tmp_path / "one")["eval_return"]
    assert result["mean"] >= 495
    assert result["unfinished"] == [0]


def test_cartpole_does_so_for_every_seed(tmp_path):
    result = train(tmp_path / "five", "cartpole", "--num-seeds", "5")["eval_return"]
    assert min(result["per_member"]) >= 475
    assert result["mean"] >= 490


def test_acrobot(tmp_path):
    assert train(tmp_path / "acrobot", "acrobot", "--num-seeds", "5")["eval_return"]["mean"] >= -92


def test_craftax_classic_learns_far_beyond_chance(tmp_path):
    """Against the uniformly random policy, played by the same code."""
    games = ["craftax-classic", "--num-seeds", "3", "--eval.num-envs", "256"]
    random = train(tmp_path / "random", *games, "--total-timesteps", "4096", "--eval.epsilon", "1")
    trained = train(tmp_path / "trained", *games)
    assert trained["eval_return"]["mean"] >= 2.8 * random["eval_return"]["mean"]


@pytest.mark.parametrize("loss", [("loss:mse",), ("loss:huber",), HL_GAUSS])
def test_every_loss_solves_cartpole(tmp_path, loss):
    assert train(tmp_path / "run", "cartpole", *loss, "--num-seeds", "5")["eval_return"]["mean"] >= 485


@pytest.mark.parametrize("memory", ["gru", "lstm", "min-gru", "transformer"])
def test_every_memory_carries_a_cue_over_32_steps(tmp_path, memory):
    steps = "500000" if memory == "transformer" else "200000"
    arguments = [f"network.memory:{memory}", "--total-timesteps", steps, "--eval.num-envs", "256"]
    assert train(tmp_path / "run", "memory-chain", *arguments)["eval_return"]["mean"] >= 0.95


def test_without_a_memory_the_cue_is_lost(tmp_path):
    arguments = ["network.memory:none", "--memory-window", "0", "--eval.num-envs", "256"]
    assert abs(train(tmp_path / "run", "memory-chain", *arguments)["eval_return"]["mean"]) <= 0.2
