"""Disks that are full, read-only or gone: real ones, mounted in memory. Skipped where mounting is not allowed."""

import json
import shutil
import subprocess

import pytest

from pqn_eqx.run_directory import RunDirectory, read_rows
from tests.test_train import TINY, command


@pytest.fixture
def mounted(tmp_path):
    """A function that mounts a disk of memory with options; unmounted at the end."""
    mounts = []

    def mount(options):
        path = tmp_path / f"disk{len(mounts)}"
        path.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
        mounts.append(path)
        return path

    if shutil.which("mount") is None:
        pytest.skip("no disk can be mounted here")
    yield mount
    for path in mounts:
        subprocess.run(["umount", "-l", path], check=True)


def test_rows_wait_for_room_and_no_line_is_torn(mounted, capsys):
    """Red if a full disk ended the run, lost rows for good, or left half a line."""
    disk = mounted("size=64k")
    directory = RunDirectory(disk)
    directory.append("metrics.jsonl", [{"row": 0}])
    (disk / "ballast").write_bytes(b"x" * 55_000)
    long = "y" * 3000
    for row in range(1, 6):
        directory.append("metrics.jsonl", [{"row": row, "text": long}])
    assert capsys.readouterr().err.count("cannot be written: No space left on device") == 1
    written = read_rows(disk / "metrics.jsonl")
    assert [row["row"] for row in written] == list(range(len(written)))
    assert len(written) < 6
    assert (disk / "metrics.jsonl").read_text().endswith("}\n")
    (disk / "ballast").unlink()
    directory.append("metrics.jsonl", [{"row": 6}])
    assert [row["row"] for row in read_rows(disk / "metrics.jsonl")] == list(range(7))
    directory.close()
    assert capsys.readouterr().err == ""


def test_what_is_lost_is_said_at_the_end(mounted, capsys):
    disk = mounted("size=32k")
    directory = RunDirectory(disk)
    (disk / "ballast").write_bytes(b"x" * 28_000)
    directory.append("metrics.jsonl", [{"row": row, "text": "y" * 3000} for row in range(3)])
    directory.close()
    assert "metrics.jsonl: the last 3 rows are lost" in capsys.readouterr().err


def test_training_goes_on_without_room(mounted):
    """Red if the disk's end were the run's: rows, checkpoints, summary and figure fail, and each is told."""
    disk = mounted("size=72k")
    finished = command(*TINY, "--run-dir", disk / "run")
    assert finished.status == 0, finished.err
    assert "Finished after 320 environment steps" in finished.out
    assert "No space left on device" in finished.err
    assert "was not written" in finished.err
    assert "Traceback" not in finished.err
    for line in (disk / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_a_read_only_disk_is_refused(mounted):
    disk = mounted("size=64k,ro")
    finished = command(*TINY, "--run-dir", disk / "run")
    assert finished.status == 1
    assert finished.err == (
        f"error: run_dir: {disk / 'run'} cannot be written: Read-only file system. Give another --run-dir.\n"
    )


def test_a_folder_that_disappears_ends_nothing(tmp_path, capsys):
    directory = RunDirectory.create(tmp_path / "run", {})
    shutil.rmtree(tmp_path / "run")
    directory.append("metrics.jsonl", [{"row": 0}])
    directory.append("metrics.jsonl", [{"row": 1}])
    directory.close()
    err = capsys.readouterr().err
    assert err.count("cannot be written: No such file or directory") == 1
    assert "the last 2 rows are lost" in err
