"""Weights & Biases: real offline runs, read back from their files, and failures that cost no training."""

import dataclasses
import json
import struct
import sys
import time
from pathlib import Path

import pytest

from pqn_eqx.run_directory import read_rows
from pqn_eqx.wandb_logger import WandbConfig, WandbLogger
from tests.test_loggers import PLAN, evaluated, interval, outcome
from tests.test_train import TINY, command


def records(file: Path) -> list:
    """The records of an offline run: protocol buffers in LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts, found = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


@dataclasses.dataclass
class OfflineRun:
    """What an offline run's file holds."""

    name: str
    group: str
    project: str
    tags: list[str]
    config: dict
    history: list[dict]
    summary: dict

    @classmethod
    def read(cls, file: Path) -> "OfflineRun":
        run, history, summary = None, [], {}
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = record.run
            elif kind == "history":
                items = record.history.item
                history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
            elif kind == "summary":
                updates = record.summary.update
                summary |= {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in updates}
        config = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in run.config.update}
        return cls(run.display_name, run.run_group, run.project, list(run.tags), config, history, summary)


def offline_runs(directory: Path) -> list[OfflineRun]:
    files = list((directory / "wandb").glob("offline-run-*/*.wandb"))
    deadline = time.monotonic() + 60
    # The service that writes the files may be a little behind.
    while not all(any(record.HasField("exit") for record in records(file)) for file in files):
        assert time.monotonic() < deadline, "a run was not written to its end"
        time.sleep(0.2)
    return sorted((OfflineRun.read(file) for file in files), key=lambda run: run.name)


@pytest.fixture(scope="module")
def population(tmp_path_factory):
    """A run of two learning rates, logged offline."""
    path = tmp_path_factory.mktemp("wandb") / "run"
    finished = command(
        *TINY,
        *("--sweep.learning-rate", "1e-4", "1e-3", "--run-dir", path),
        *("--wandb.mode", "offline", "--wandb.project", "tests", "--wandb.tags", "a", "b"),
    )
    assert finished.status == 0, finished.err
    return path, finished, offline_runs(path)


def test_every_member_is_a_run_in_one_group(population):
    """Red if members shared a run, or a run had another member's hyperparameters."""
    path, finished, runs = population
    assert [run.name for run in runs] == ["run-0", "run-1"]
    assert {run.group for run in runs} == {"run"}
    assert {run.project for run in runs} == {"tests"}
    assert all(sorted(run.tags) == ["a", "b"] for run in runs)
    assert [run.config["learning_rate"] for run in runs] == [1e-4, 1e-3]
    assert [run.config["algorithm"]["learning_rate"] for run in runs] == [1e-4, 1e-3]
    assert [run.config["member"] for run in runs] == [0, 1]
    assert "wandb sync" in finished.err


def test_history_is_what_the_files_say_by_environment_steps(population):
    """Red if a number went to another member or step, or an evaluation was lost."""
    path, _, runs = population
    for number, run in enumerate(runs):
        logged = {}
        for row in run.history:
            logged.setdefault(row["_step"], {}).update(row)
        for file, prefix in (("metrics.jsonl", ""), ("eval.jsonl", "eval/")):
            rows = [row for row in read_rows(path / file) if row["member"] == number]
            assert len(rows) == 10
            for row in rows:
                for name in row.keys() - {"member", "seed"}:
                    expected = row[name]
                    assert logged[row["env_steps"]].get(f"{prefix}{name}") == (
                        None if expected is None else pytest.approx(expected)
                    )


def test_summary_and_figure_are_uploaded(population):
    path, _, runs = population
    summary = json.loads((path / "summary.json").read_text())
    for number, run in enumerate(runs):
        assert run.summary["eval_return"] == summary["eval_return"]["per_member"][number]
        assert run.summary["status"] == "finished"
        assert any(name.startswith("learning_curve/") for row in run.history for name in row)


class Broken:
    """A wandb that has no network: what it is asked for fails, in one mode or in all."""

    Settings = dict
    Image = str

    def __init__(self, fails):
        self.fails, self.modes, self.logged = fails, [], []

    def login(self, prompt):
        return True

    def init(self, mode, **_):
        self.modes.append(mode)
        if mode in self.fails:
            raise ConnectionError("no route to host")
        return self

    def log(self, row, step):
        self.logged.append(step)
        if "log" in self.fails:
            raise ConnectionError("gone")


def logger_with(wandb, tmp_path, mode="online"):
    return WandbLogger(WandbConfig(mode=mode), wandb, tmp_path, lambda member: {})


def test_without_a_network_it_goes_on_offline(tmp_path, capsys):
    """Red if a server out of reach ended the training, or was tried once a member."""
    wandb = Broken(fails={"online"})
    logger = logger_with(wandb, tmp_path)
    logger.on_start(PLAN)
    logger.on_interval(interval(2))
    assert wandb.modes == ["online", "offline", "offline"]
    assert wandb.logged == [64, 64]
    err = capsys.readouterr().err
    assert "goes on offline: no route to host" in err
    assert f"wandb sync {tmp_path}" in err


def test_without_an_account_it_goes_on_offline(tmp_path, capsys, monkeypatch):
    """Red if a prompt for a key waited on a cluster for ever."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb = Broken(fails=set())
    wandb.login = lambda prompt: False if prompt is False else pytest.fail("asked")
    logger_with(wandb, tmp_path).on_start(PLAN)
    assert wandb.modes == ["offline", "offline"]
    assert "no account" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [{"online", "offline"}, {"log"}])
def test_any_other_failure_ends_the_logging_alone(fails, tmp_path, capsys):
    """Red if an exception of wandb reached the trainer, or was told at every interval."""
    wandb = Broken(fails)
    logger = logger_with(wandb, tmp_path)
    logger.on_start(PLAN)
    for update in (2, 4):
        logger.on_interval(interval(update))
    logger.on_evaluation(evaluated())
    logger.on_end(outcome())
    assert capsys.readouterr().err.count("W&B stopped") == 1
    assert len(wandb.logged) <= 1


def test_ids_last_as_long_as_the_folder(tmp_path):
    """Red if a run that is taken up again became another run on the server."""
    ids = []

    class Recording(Broken):
        def init(self, id, **options):
            ids.append(id)
            return super().init(**options)

    for _ in range(2):
        logger_with(Recording(set()), tmp_path).on_start(PLAN)
    assert ids[:2] == ids[2:]
    assert len(set(ids)) == 2


def test_disabled_is_the_default_and_imports_nothing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert WandbConfig().build(tmp_path, lambda member: {}) == []


def test_missing_package_names_the_extra(monkeypatch, tmp_path):
    """Red if a run were started, or a folder made, that cannot log where it was told to."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    path = tmp_path / "run"
    finished = command(*TINY, "--wandb.mode", "offline", "--run-dir", path)
    assert finished.status == 2
    assert finished.err == (
        "error: wandb: the package wandb is not installed. Install it with: pip install 'pqn-eqx[wandb]'\n"
    )
    assert not path.exists()
