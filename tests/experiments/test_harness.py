"""Reports from hand-made run directories, and a whole study made short."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import losses, minatar
from experiments.harness import Arm, report, run, scores, smoke
from pqn_eqx.errors import UserError
from pqn_eqx.losses import HLGaussConfig
from pqn_eqx.presets import PRESETS
from pqn_eqx.run_directory import EVALUATIONS, RunDirectory
from pqn_eqx.serialization import config_to_dict

CONFIG = PRESETS["cartpole"].config


def folder(output, name, returns):
    """An arm whose seeds end with `returns`, half of them at the evaluation before."""
    arm = Arm("cartpole", name, CONFIG)
    directory = RunDirectory.create(arm.directory(output), {})
    for steps, share in ((250_000, 0.5), (499_712, 1.0)):
        rows = [
            {"member": m, "seed": m, "env_steps": steps, "episode_return": share * r} for m, r in enumerate(returns)
        ]
        directory.append(EVALUATIONS, rows)
    return arm


def test_reports_what_the_files_say(tmp_path):
    """The last evaluation, the right arm in the right line, and a verdict that follows from the intervals."""
    rng = np.random.default_rng(0)
    arms = [
        folder(tmp_path, "base", [100, 101, 99, 100, 100]),
        folder(tmp_path, "better", [200, 201, 199, 202, 200]),
        folder(tmp_path, "worse", [50, 51, 49, 48, 50]),
        folder(tmp_path, "same", (100 + rng.normal(0, 1, 5)).tolist()),
    ]
    np.testing.assert_array_equal(scores(arms[1], tmp_path), [200, 201, 199, 202, 200])
    report("What?", arms, tmp_path)
    table = (tmp_path / "table.md").read_text()
    assert "| cartpole | better | 200.33 [199.3" in table
    assert "| 5 | 499,712 |" in table
    verdict = (tmp_path / "verdict.md").read_text()
    assert "**better** (200.33" in verdict
    assert "5 seeds) is better than base (100.00" in verdict
    assert "**worse** (49.67" in verdict
    assert "5 seeds) is worse than base" in verdict
    assert "**same**" in verdict
    assert "cannot be told from base" in verdict
    assert json.loads((tmp_path / "scores.json").read_text())["cartpole"]["worse"] == [50, 51, 49, 48, 50]
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_an_arm_without_another_to_compare_it_with_is_reported_alone(tmp_path):
    report("What?", [folder(tmp_path, "only", [100, 102])], tmp_path)
    assert "- **only**: 101.00 [100.00, 102.00]; seeds: 2." in (tmp_path / "verdict.md").read_text()


def test_the_study_of_losses_differs_in_the_loss_alone():
    """Per task; CartPole is run at two learning rates, each with every loss."""
    arms = losses.arms(losses.Options(num_seeds=3))
    names = ["mse", "huber", "hl-gauss"]
    assert [arm.name for arm in arms] == [*names, *(f"{name}-0.0005" for name in names), *names, *names]
    for first, *others in (arms[start : start + 3] for start in range(0, 12, 3)):
        assert first.config.num_seeds == 3
        assert first.config.algorithm.learning_rate == (1e-4 if first is arms[0] else 5e-4)
        for other in others:
            assert dataclasses.replace(other.config, loss=first.config.loss) == first.config
    by_task = {arm.task: arm.config for arm in arms if arm.name == "hl-gauss"}
    assert by_task["acrobot"].loss == HLGaussConfig(-11, 1)
    assert by_task["breakout"].total_timesteps == 1_000_000


def test_the_study_of_minatar_is_the_presets():
    arms = minatar.arms(minatar.Options(num_seeds=2))
    assert [arm.task for arm in arms] == ["asterix", "breakout", "freeway", "space-invaders"]
    for arm in arms:
        assert arm.config == dataclasses.replace(PRESETS[f"minatar-{arm.task}"].config, num_seeds=2)
        assert arm.config.total_timesteps == 10_000_000


def test_a_smoke_run_of_the_study_writes_everything(tmp_path, capsys):
    """The whole path with real training, and a second call that trains nothing again."""
    arguments = ["--smoke", "--tasks", "cartpole", "--output", str(tmp_path)]
    assert losses.main(arguments) == 0
    for name in ("table.md", "verdict.md", "scores.json", "figure.png", "raw/cartpole-hl-gauss/metrics.jsonl"):
        assert (tmp_path / name).exists(), name
    row = json.loads((tmp_path / "raw/cartpole-hl-gauss/metrics.jsonl").read_text().splitlines()[0])
    assert 0 <= row["target_outside"] <= 1
    first = (tmp_path / "scores.json").read_text()
    capsys.readouterr()
    assert losses.main(arguments) == 0
    assert capsys.readouterr().out.count("is there already") == 6
    assert (tmp_path / "scores.json").read_text() == first


def test_refuses_what_is_of_another_configuration_or_did_not_finish(tmp_path):
    arm = Arm("cartpole", "mse", smoke(CONFIG))
    RunDirectory.create(arm.directory(tmp_path / "b"), config_to_dict(CONFIG))
    with pytest.raises(UserError, match="holds a run of another configuration: remove it, or give another --output"):
        run([arm], tmp_path / "b")
    named = dataclasses.replace(arm.config, name="cartpole-mse")
    RunDirectory.create(arm.directory(tmp_path / "c"), config_to_dict(named))
    with pytest.raises(UserError, match="holds a run that did not finish: remove it to run it again"):
        run([arm], tmp_path / "c")


def test_help_explains_itself():
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-m", "experiments.losses", "--help"], capture_output=True, text=True, cwd=root, check=True
    )
    assert "MSE, Huber and HL-Gauss" in result.stdout
    assert "--smoke" in result.stdout
