"""The listeners that show a run and write its files."""

import dataclasses
import io
import json
import re
import subprocess

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from pqn_eqx import __version__, loggers
from pqn_eqx.callbacks import Evaluated, Interval, Outcome, Plan
from pqn_eqx.episodes import Evaluation
from pqn_eqx.loggers import ConsoleLogger, JsonLinesLogger, SummaryLogger, git_commit, versions
from pqn_eqx.population import Member
from pqn_eqx.run_directory import RunDirectory, read_rows

NAN = float("nan")

PLAN = Plan(
    members=(Member(0, 5), Member(1, 6, {"loss.delta": 0.5})),
    population=2,
    num_envs=4,
    num_updates=100,
    steps_per_update=32,
    log_interval=2,
    eval_interval=10,
    checkpoint_interval=0,
    checkpoint_seconds=float("inf"),
    eval_envs=3,
    eval_max_steps=1500,
    eval_epsilon=0.0,
)


def interval(update: int, returns=(10.0, NAN), wall_seconds: float = 7.0) -> Interval:
    return Interval(
        update=update,
        env_steps=32 * update,
        metrics={"loss": np.asarray([0.5, 0.25], np.float32), "episode_return": np.asarray(returns, np.float32)},
        steps_per_second=1234.5,
        wall_seconds=wall_seconds,
    )


def evaluated(update: int = 10) -> Evaluated:
    """Two of member 0's three episodes ended, with returns 8 and 12; none of member 1's did."""
    evaluation = Evaluation(
        finished=np.asarray([[True, False, True], [False, False, False]]),
        episode_return=np.asarray([[8.0, 99.0, 12.0], [99.0, 99.0, 99.0]], np.float32),
        episode_length=np.asarray([[4, 50, 8], [50, 50, 50]]),
        extras=np.asarray([[[1.0], [1.0], [0.0]], [[1.0], [1.0], [1.0]]], np.float32),
        extra_names=("achievement/eat",),
    )
    return Evaluated(update=update, env_steps=32 * update, evaluation=evaluation, wall_seconds=9.0)


def outcome(status: str = "finished") -> Outcome:
    return Outcome(
        status=status,
        update=100,
        env_steps=3200,
        num_members=2,
        train_seconds=3.2,
        compile_seconds=3.5,
        wall_seconds=61.0,
        diverged_at=(None, 7),
    )


def test_json_lines_of_an_interval(tmp_path):
    """Red where a member gets another's numbers or seed, NaN reaches the file, or the time of a line is wrong."""
    logger = JsonLinesLogger(RunDirectory(tmp_path))
    logger.on_start(PLAN)
    logger.on_interval(interval(2))
    logger.on_interval(interval(4, returns=(11.0, 12.0)))
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {
            "member": member,
            "seed": 5 + member,
            "update": update,
            "env_steps": 32 * update,
            "loss": (0.5, 0.25)[member],
            "episode_return": returns[member],
            "steps_per_second": 1234.5,
            "wall_seconds": 7.0,
        }
        for update, returns in ((2, (10.0, None)), (4, (11.0, 12.0)))
        for member in range(2)
    ]
    assert not (tmp_path / "eval.jsonl").exists()


def test_json_lines_of_an_evaluation(tmp_path):
    """Red where unfinished episodes count into the means, or a member without a finished one gets a number."""
    logger = JsonLinesLogger(RunDirectory(tmp_path))
    logger.on_start(PLAN)
    logger.on_evaluation(evaluated())
    when = {"update": 10, "env_steps": 320, "wall_seconds": 9.0}
    assert read_rows(tmp_path / "eval.jsonl") == [
        when
        | {
            "member": 0,
            "seed": 5,
            "episodes": 2,
            "unfinished": 1,
            "episode_return": 10.0,
            "episode_return_std": 2.0,
            "episode_length": 6.0,
            "achievement/eat": 0.5,
        },
        when
        | {
            "member": 1,
            "seed": 6,
            "episodes": 0,
            "unfinished": 3,
            "episode_return": None,
            "episode_return_std": None,
            "episode_length": None,
            "achievement/eat": None,
        },
    ]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_progress_is_no_line_of_the_log(tmp_path):
    """Red where every chunk, whose length depends on the machine, becomes a line."""
    logger = JsonLinesLogger(RunDirectory(tmp_path))
    logger.on_start(PLAN)
    logger.on_progress(interval(1))
    assert list(tmp_path.iterdir()) == []


def test_lines_are_in_the_file_at_once(tmp_path):
    """Red where lines wait in a buffer that a kill would lose: the file is read while the logger lives."""
    logger = JsonLinesLogger(RunDirectory(tmp_path))
    logger.on_start(PLAN)
    logger.on_interval(interval(2))
    assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")


def test_summary_of_a_run(tmp_path):
    """Red where a field that tables read is missing, or the mean is not that of the members with a return."""
    logger = SummaryLogger(RunDirectory(tmp_path))
    logger.on_start(PLAN)
    logger.on_evaluation(Evaluated(4, 128, evaluated().evaluation, 1.0))
    logger.on_evaluation(evaluated(update=20))
    logger.on_end(outcome("interrupted"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("versions") == versions()
    assert summary.pop("git_commit") == git_commit()
    assert summary == {
        "status": "interrupted",
        "eval_return": {"mean": 10.0, "per_member": [10.0, None], "env_steps": 640, "unfinished": [1, 3]},
        "seeds": [5, 6],
        "diverged_at": [None, 7],
        "update": 100,
        "env_steps": 3200,
        "steps_per_second": 2000.0,
        "compile_seconds": 3.5,
        "wall_seconds": 61.0,
    }


def test_summary_of_groups_is_of_the_whole_population(tmp_path):
    """Red where a later group takes the place of an earlier one, or one that diverged makes all of them diverge."""
    logger = SummaryLogger(RunDirectory(tmp_path))
    logger.on_start(PLAN)
    logger.on_evaluation(evaluated(update=20))
    logger.on_end(outcome())
    logger.on_start(dataclasses.replace(PLAN, members=(Member(2, 9),)))
    logger.on_end(dataclasses.replace(outcome("diverged"), num_members=1, env_steps=1600, train_seconds=0.8))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["seeds"] == [5, 6, 9]
    assert summary["eval_return"] == {
        "mean": 10.0,
        "per_member": [10.0, None, None],
        "env_steps": 640,
        "unfinished": [1, 3, None],
    }
    assert summary["steps_per_second"] == pytest.approx((2 * 3200 + 1600) / 4.0)
    assert (summary["compile_seconds"], summary["wall_seconds"]) == (7.0, 122.0)


def test_summary_without_an_evaluation(tmp_path):
    """Red where a run stopped before its first evaluation ends in an exception."""
    logger = SummaryLogger(RunDirectory(tmp_path))
    logger.on_start(PLAN)
    logger.on_end(outcome("diverged"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "diverged"
    assert set(summary["eval_return"].values()) == {None}
    assert set(summary["eval_return"]) == {"mean", "per_member", "env_steps", "unfinished"}
    assert not (tmp_path / "learning_curve.png").exists()


def test_summary_draws_the_figure(tmp_path):
    """Red where a run ends without its figure."""
    directory = RunDirectory(tmp_path)
    lines, summary = JsonLinesLogger(directory), SummaryLogger(directory)
    for logger in (lines, summary):
        logger.on_start(PLAN)
        logger.on_interval(interval(2))
        logger.on_evaluation(evaluated())
        logger.on_end(outcome())
    with Image.open(tmp_path / "learning_curve.png") as image:
        image.load()
        assert min(image.size) > 100


def console(terminal: bool) -> tuple[ConsoleLogger, io.StringIO]:
    out = io.StringIO()
    return ConsoleLogger("a run", Console(file=out, force_terminal=terminal, width=200, color_system=None)), out


def play(logger: ConsoleLogger) -> None:
    """A run of ten chunks, 4 s each, with an evaluation in the middle."""
    logger.on_start(PLAN)
    logger.on_compiled(3.5)
    for chunk in range(1, 11):
        logger.on_progress(interval(10 * chunk, wall_seconds=4.0 * chunk))
        if chunk == 5:
            logger.on_evaluation(evaluated(50))
    logger.on_end(outcome())


def test_console_without_a_terminal_prints_plain_lines():
    """Red where a log file fills with control characters, or gets a line per chunk, or misses start and end."""
    logger, out = console(terminal=False)
    play(logger)
    text = out.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[0] == (
        "a run: 2 members, 100 updates of 32 environment steps; logging every 64, evaluating every 320."
    )
    progress = [line for line in lines if "steps/s  return" in line]
    # At 12, 24 and 36 s: not closer than 10 s.
    assert [line.split()[0] for line in progress] == ["30%", "60%", "90%"]
    assert " ".join(progress[0].split()) == "30% 960 steps 1,234 steps/s return 10.0"
    assert lines[-1] == "Finished after 3,200 environment steps and 61 s (2,000 steps/s)."


def test_console_of_one_member_does_not_speak_of_members():
    """Red where the usual run is introduced as a population of one."""
    logger, out = console(terminal=False)
    logger.on_start(Plan(**(vars(PLAN) | {"members": (Member(0, 0),), "population": 1})))
    assert out.getvalue().startswith("a run: 100 updates")


def test_console_of_a_group_says_which_members_it_has():
    """Red where a user of --members-per-group cannot tell how far the population is."""
    logger, out = console(terminal=False)
    logger.on_start(dataclasses.replace(PLAN, population=5, notes=("Devices: 1 cpu device.",)))
    logger.on_start(dataclasses.replace(PLAN, members=(Member(4, 9),), population=5))
    lines = out.getvalue().splitlines()
    assert lines[0] == "Devices: 1 cpu device."
    assert lines[1].startswith("a run: members 0 to 1 of 5, 100 updates")
    assert lines[3].startswith("a run: member 4 of 5, 100 updates")


def test_console_tells_of_unfinished_episodes():
    """Red where a mean over the episodes that happened to end is shown as if it were over all."""
    logger, out = console(terminal=False)
    logger.on_start(PLAN)
    logger.on_evaluation(evaluated())
    assert out.getvalue().splitlines()[-1] == (
        "320 steps: evaluation return 10.00 over 2 episodes; 4 did not end within 1,500 steps and are left out"
    )


def test_console_does_not_mention_what_did_not_happen():
    """Red where every evaluation is said to have unfinished episodes."""
    logger, out = console(terminal=False)
    logger.on_start(PLAN)
    found = evaluated().evaluation
    all_finished = Evaluation(**(vars(found) | {"finished": np.ones((2, 3), bool)}))
    logger.on_evaluation(Evaluated(10, 320, all_finished, 1.0))
    assert out.getvalue().splitlines()[-1].endswith("over 6 episodes")


def test_console_of_an_evaluation_without_an_end():
    """Red where the mean of no episodes warns or fails."""
    logger, out = console(terminal=False)
    logger.on_start(PLAN)
    found = evaluated().evaluation
    none_finished = Evaluation(**(vars(found) | {"finished": np.zeros((2, 3), bool)}))
    logger.on_evaluation(Evaluated(10, 320, none_finished, 1.0))
    assert "evaluation return unknown over 0 episodes; 6 did not end" in out.getvalue()


def test_console_keeps_the_last_known_return():
    """Red where an interval in which no episode ended warns, or shows the return as lost."""
    logger, out = console(terminal=False)
    logger.on_start(PLAN)
    logger.on_progress(interval(10, returns=(10.0, 20.0), wall_seconds=5.0))
    logger.on_progress(interval(20, returns=(NAN, NAN), wall_seconds=20.0))
    assert out.getvalue().splitlines()[-1].endswith("return 15.0")


def test_console_on_a_terminal_shows_progress_and_leaves_it_clean():
    """Red where there is no bar, it does not move, or the cursor stays hidden after the run."""
    logger, out = console(terminal=True)
    play(logger)
    text = out.getvalue()
    assert "100%" in text
    assert "steps/s" in text
    assert "return 10.0" in text
    assert "320 steps: evaluation" not in text
    assert "1,600 steps: evaluation return 10.00 over 2 episodes" in text
    assert logger.progress is None
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    plain = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", text)
    assert plain.rstrip().endswith("Finished after 3,200 environment steps and 61 s (2,000 steps/s).")


def test_console_can_be_closed_at_any_time():
    """Red where an exception in a run leaves the bar turning, or closing it twice or too early fails."""
    logger, out = console(terminal=True)
    logger.close()
    logger.on_start(PLAN)
    logger.close()
    logger.on_compiled(1.0)
    progress = logger.progress
    assert progress is not None
    assert progress.live.is_started
    logger.close()
    logger.close()
    assert not progress.live.is_started
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


def test_versions_name_what_numbers_depend_on():
    """Red where a summary no longer says which jax or environment its numbers came from."""
    found = versions()
    assert found["pqn_eqx"] == __version__
    assert {"python", "jax", "jaxlib", "equinox", "optax", "gymnax", "numpy"} <= set(found)
    assert all(re.match(r"\d+\.\d+", number) for number in found.values())


def test_versions_leave_out_what_is_missing(monkeypatch):
    """Red where a machine without the optional environments cannot end a run."""

    def version(package):
        if package == "craftax":
            raise loggers.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(loggers, "version", version)
    assert "craftax" not in versions()
    assert versions()["jax"] == "1.0"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A place that looks like a checkout of this package."""
    monkeypatch.setattr(loggers, "__file__", str(tmp_path / "pqn_eqx" / "loggers.py"))
    (tmp_path / ".git").mkdir()
    return tmp_path


def test_commit_of_a_checkout(checkout, monkeypatch):
    """Red where another folder's commit is told, or changed sources pass for the commit they came from."""
    asked = []

    def run(command, cwd, **options):
        asked.append((command, cwd))
        return subprocess.CompletedProcess(command, 0, stdout="0123abc-dirty\n")

    monkeypatch.setattr(loggers.subprocess, "run", run)
    assert git_commit() == "0123abc-dirty"
    ((command, cwd),) = asked
    assert cwd == checkout
    assert command[0] == "git"
    assert "--dirty" in command


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("git"), subprocess.CalledProcessError(128, "git"), subprocess.TimeoutExpired("git", 10)],
    ids=lambda error: type(error).__name__,
)
def test_commit_is_none_where_git_fails(checkout, monkeypatch, error):
    """Red where a run ends in an exception because git is missing, slow or refuses the folder."""

    def run(*args, **options):
        raise error

    monkeypatch.setattr(loggers.subprocess, "run", run)
    assert git_commit() is None


def test_an_installed_package_has_no_commit(checkout, monkeypatch):
    """Red where an installed package takes the commit of whatever repository it lies in."""
    (checkout / ".git").rmdir()
    monkeypatch.setattr(loggers.subprocess, "run", lambda *args, **options: pytest.fail("git was asked"))
    assert git_commit() is None
