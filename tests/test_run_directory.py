"""The files of a run."""

import json
from pathlib import Path

import numpy as np
import pytest

from pqn_eqx.errors import UserError
from pqn_eqx.run_directory import (
    CONFIG,
    EVALUATIONS,
    FIGURE,
    MEMBERS,
    METRICS,
    SUMMARY,
    RunDirectory,
    check_unused,
    default_run_directory,
    read_rows,
    to_json,
)


def test_file_names_are_those_that_readers_know():
    """Red where a file is renamed: runs that exist, and the tools that read them, would be lost."""
    assert (CONFIG, MEMBERS, METRICS, EVALUATIONS, SUMMARY, FIGURE) == (
        "config.json",
        "members.json",
        "metrics.jsonl",
        "eval.jsonl",
        "summary.json",
        "learning_curve.png",
    )


def test_default_directory_is_named_after_the_run_and_never_twice_the_same():
    """Red where two runs that start in the same second would share a folder."""
    paths = [default_run_directory("acrobot") for _ in range(20)]
    assert len(set(paths)) == 20
    assert all(path.parent == Path("runs") and path.name.startswith("acrobot-") for path in paths)


def test_create_writes_the_configuration_below_missing_parents(tmp_path):
    """Red where parents are not made, or the configuration is not what was given."""
    path = tmp_path / "a" / "b"
    directory = RunDirectory.create(path, {"seed": 3, "env": {"name": "x"}}, [{"member": 0, "seed": 3}])
    assert directory.path == path
    assert json.loads((path / "config.json").read_text()) == {"seed": 3, "env": {"name": "x"}}
    assert json.loads((path / "members.json").read_text()) == [{"member": 0, "seed": 3}]
    assert {p.name for p in path.iterdir()} == {"config.json", "members.json"}


def test_create_takes_a_folder_that_holds_no_run(tmp_path):
    """Red where any existing folder is refused: notes beside a run are harmless."""
    (tmp_path / "notes.txt").write_text("mine")
    RunDirectory.create(tmp_path, {})
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "eval.jsonl", "summary.json"])
def test_a_run_is_never_overwritten(tmp_path, name):
    """Red where one of a run's files is not looked for, so that two runs mix in one folder."""
    (tmp_path / name).write_text("old")
    with pytest.raises(UserError, match=r"run_dir: .* holds a run already"):
        check_unused(tmp_path)
    with pytest.raises(UserError, match="holds a run already"):
        RunDirectory.create(tmp_path, {"seed": 1})
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {name: "old"}


def test_a_file_is_no_run_directory(tmp_path):
    """Red where the user gets a NotADirectoryError instead of a message."""
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(UserError, match=r"run_dir: .*file is a file"):
        RunDirectory.create(path, {})
    assert path.read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_a_message(tmp_path):
    """Red where an OSError gets through. A path below a file cannot be made by any user, root included."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"run_dir: .* cannot be written: .*--run-dir"):
        RunDirectory.create(tmp_path / "file" / "run", {})


def test_unused_paths_pass(tmp_path):
    """Red where a path that is not there yet, or an empty folder, is refused."""
    check_unused(tmp_path / "missing" / "run")
    check_unused(tmp_path)


def test_appended_rows_come_back(tmp_path):
    """Red where a later append replaces the earlier lines, or a number changes on the way."""
    directory = RunDirectory(tmp_path)
    directory.append(METRICS, [{"member": 0, "loss": 0.1}, {"member": 1, "loss": float("nan")}])
    directory.append(METRICS, [{"member": 0, "loss": np.float32(0.5)}])
    assert read_rows(tmp_path / METRICS) == [
        {"member": 0, "loss": 0.1},
        {"member": 1, "loss": None},
        {"member": 0, "loss": 0.5},
    ]
    assert (tmp_path / METRICS).read_text().count("\n") == 3


def test_reading_leaves_out_a_line_cut_short(tmp_path):
    """Red where a killed run can no longer be read."""
    path = tmp_path / METRICS
    path.write_text('{"update": 1}\n{"update": 2}\n{"upda')
    assert read_rows(path) == [{"update": 1}, {"update": 2}]


def test_reading_no_file_gives_no_rows(tmp_path):
    """Red where a run without an evaluation cannot be read."""
    assert read_rows(tmp_path / EVALUATIONS) == []
    (tmp_path / METRICS).write_text("")
    assert read_rows(tmp_path / METRICS) == []


def test_summary_is_written_whole(tmp_path):
    """Red where a failing write leaves half a summary, or its temporary file stays after a good one."""
    directory = RunDirectory(tmp_path)
    directory.write_summary({"status": "finished", "mean": float("inf"), "seeds": (3, 4)})
    expected = {"status": "finished", "mean": None, "seeds": [3, 4]}
    assert json.loads((tmp_path / SUMMARY).read_text()) == expected
    assert [p.name for p in tmp_path.iterdir()] == [SUMMARY]
    with pytest.raises(TypeError):
        directory.write_summary({"status": object()})
    assert json.loads((tmp_path / SUMMARY).read_text()) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (float("inf"), None),
        (-float("inf"), None),
        (np.float32("nan"), None),
        (np.float64("inf"), None),
        (np.float32(0.25), 0.25),
        (np.int64(2**40), 2**40),
        (np.bool_(True), True),
        (np.asarray([1.0, np.nan]), [1.0, None]),
        (np.asarray(3), 3),
        (np.asarray(np.nan), None),
        ((1, (2.5, float("nan"))), [1, [2.5, None]]),
        ({"a": {"b": [np.float32("inf"), "text", None, True]}}, {"a": {"b": [None, "text", None, True]}}),
    ],
)
def test_to_json_gives_strict_json(value, expected):
    """Red where NaN or Infinity, which no strict reader takes, or a numpy type would reach a file."""
    found = to_json(value)
    assert found == expected
    assert type(found) is type(expected)
    assert json.loads(json.dumps(found, allow_nan=False)) == expected
