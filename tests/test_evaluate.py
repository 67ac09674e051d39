"""The command that evaluates a run: the same episodes as in training, and what it writes."""

import json

import numpy as np
import pytest
from PIL import Image

from pqn_eqx.evaluate import main as evaluate
from pqn_eqx.run_directory import read_rows
from tests.test_train import TINY, command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two settings with input normalisation, evaluated and saved after every update."""
    path = tmp_path_factory.mktemp("evaluate") / "run"
    arguments = ["--network.input-normalization", "running", "--sweep.gamma", "0.9", "0.99", "--checkpoint.keep", "20"]
    finished = command(*TINY, *arguments, "--run-dir", path)
    assert finished.status == 0, finished.err
    return path


@pytest.mark.parametrize("step", ["last", "160"])
def test_episodes_are_those_of_the_evaluation_in_training(run, step):
    """Red if other keys, another network or other statistics of the observations were used."""
    finished = command(run, "--step", step, main=evaluate)
    assert finished.status == 0, finished.err
    env_steps = 320 if step == "last" else 160
    result = json.loads((run / f"evaluate-{env_steps}.json").read_text())
    rows = [row for row in read_rows(run / "eval.jsonl") if row["env_steps"] == env_steps]
    assert len(result["members"]) == len(rows) == 2
    for found, expected in zip(result["members"], rows, strict=True):
        for name in ("member", "seed", "episodes", "unfinished", "episode_return", "episode_length"):
            assert found[name] == expected[name], name
    assert [row["gamma"] for row in result["members"]] == [0.9, 0.99]
    assert "Whole episodes at" in finished.out
    assert "95 % interval" in finished.out


def test_options_change_the_evaluation(run, tmp_path):
    output = tmp_path / "numbers.json"
    finished = command(
        run,
        "--step",
        "best",
        "--episodes",
        "9",
        "--epsilon",
        "1",
        "--max-steps",
        "500",
        "--output",
        output,
        main=evaluate,
    )
    assert finished.status == 0, finished.err
    for row in json.loads(output.read_text())["members"]:
        assert (row["episodes"], row["unfinished"]) == (9, 0)
        low, high = row["episode_return_interval"]
        # The random policy holds the pole for about 22 steps.
        assert 10 <= low < row["episode_return"] < high <= 45


def test_a_video_of_an_episode(run):
    """Red if no episode is drawn, or all frames are alike."""
    finished = command(run, "--video", main=evaluate)
    assert finished.status == 0, finished.err
    with Image.open(run / "episode-last.gif") as image:
        assert image.n_frames >= 5
        assert image.size == (400, 240)
        first = np.asarray(image.convert("RGB"))
        image.seek(image.n_frames - 1)
        assert (np.asarray(image.convert("RGB")) != first).any()


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["--step", "7"], "has no checkpoint '7'"), (["--episodes", "0"], "eval.num_envs must be at least 1")],
)
def test_a_wrong_request_is_answered_in_a_line(run, argv, words):
    finished = command(run, *argv, main=evaluate)
    assert finished.status == 2
    assert words in finished.err
    assert finished.err.count("\n") == 1


def test_no_run_is_answered_in_a_line(tmp_path):
    finished = command(tmp_path, main=evaluate)
    assert finished.status == 2
    assert "is no run directory" in finished.err
