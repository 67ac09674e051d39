"""Checkpoints: what they hold, which are kept, and what is said of damaged ones."""

import json
import shutil
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.callbacks import Arrays, Evaluated, Snapshot
from pqn_eqx.checkpoint import CheckpointConfig, Checkpointer, Checkpoints, group_folder, name_arrays, put_arrays
from pqn_eqx.command_line import parse_request
from pqn_eqx.errors import ConfigError, UserError
from pqn_eqx.metrics import Metrics
from pqn_eqx.sharding import PER_MEMBER, PER_MEMBER_AND_ENV, TrainState, make_mesh, place
from tests.test_loggers import PLAN, evaluated, outcome
from tests.test_train import TINY, command


class Learner(eqx.Module):
    network: dict
    key: jax.Array


MESH = make_mesh(jax.devices()[:4], 2)
TIMES = {"train": 1.5, "compile": 2.0, "wall": 4.0}


def snapshot(update=4, scale=1.0):
    """Two members of four environments on 2 x 2 devices, with keys and an array of no elements."""
    network = {"weight": place(scale * np.arange(6.0).reshape(2, 3), MESH, PER_MEMBER), "bias": jnp.ones(2)}
    learner = Learner(network, jax.vmap(jax.random.key)(jnp.arange(2)))
    actors = {
        "cell": place(np.arange(8).reshape(2, 4), MESH, PER_MEMBER_AND_ENV),
        "extras": place(np.zeros((2, 4, 0)), MESH, PER_MEMBER_AND_ENV),
    }
    metrics = Metrics({"loss": jnp.ones(2)}, {"loss": jnp.full(2, 3.0)})
    arrays = Arrays(TrainState(learner, actors), metrics, jnp.asarray([-1, 7]))
    return Snapshot(arrays, update, logged=update - 1, evaluated=2, seconds=TIMES)


def shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def assert_same(a, b):
    for (path, x), (other, y) in zip(*map(jax.tree_util.tree_leaves_with_path, (a, b)), strict=True):
        assert path == other
        assert (x.dtype, x.sharding) == (y.dtype, y.sharding)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_arrays_are_named_by_their_places():
    arrays = snapshot().arrays
    named = name_arrays(arrays.state)
    assert set(named) == {"learner.network.weight", "learner.network.bias", "learner.key", "actors.cell"}
    assert named["learner.key"].dtype == jnp.uint32
    assert_same(put_arrays(named, arrays.state), arrays.state)


@pytest.fixture
def saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step, score in ((100, 1.0), (200, 9.0), (300, 5.0), (400, None)):
        checkpoints.save(step, snapshot(step // 25, scale=step), {"versions": {"pqn_eqx": "0.1"}}, score)
    checkpoints.wait()
    yield checkpoints
    checkpoints.close()


def test_the_last_ones_and_the_best_are_kept(saved):
    """Red if the best were dropped once it is old, or one without an evaluation counted as best."""
    assert saved.steps() == [200, 300, 400]
    assert saved.best() == 200


def test_what_comes_back_is_what_was_saved(saved):
    """Red if a number, a dtype, a place on the devices or what is no array were lost."""
    expected = snapshot(16, scale=400)
    found = saved.latest(shapes(expected.arrays))
    assert found[1:] == expected[1:]
    assert_same(found.arrays, expected.arrays)


def test_it_comes_back_on_other_devices(saved):
    expected = snapshot(16, scale=400).arrays
    one = jax.sharding.SingleDeviceSharding(jax.devices()[5])
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), expected)
    found = saved.latest(like).arrays
    np.testing.assert_array_equal(found.state.actors["cell"], expected.state.actors["cell"])
    assert found.state.actors["cell"].devices() == {jax.devices()[5]}


def test_a_part_can_be_read_alone(saved):
    network = snapshot(8, scale=200).arrays.state.learner.network
    assert_same(saved.restore(200, "network", shapes(network)), network)


def test_what_does_not_fit_is_refused_by_name(saved):
    like = shapes(snapshot().arrays.state.learner.network)
    like["scale"] = like.pop("bias")
    like["weight"] = jax.ShapeDtypeStruct((2, 4), jnp.float32, sharding=like["weight"].sharding)
    with pytest.raises(
        ConfigError,
        match=r"400 does not fit .*bias is not wanted; scale is missing; weight is float32\[2, 3\] and not",
    ):
        saved.restore(400, "network", like)


# Threads of the library's own may be left with nobody to tell.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("file", ["network/d/*", "network/_METADATA", "about/metadata", "actors/manifest.ocdbt"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damage_is_told_with_the_one_before(saved, file, damage):
    """Red if half a checkpoint were loaded, or ended in a traceback of the library's."""
    for path in (saved.folder / "400").glob(file):
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    reader = Checkpoints(saved.folder)
    with pytest.raises(UserError, match=r"/400: the checkpoint is damaged .*The one before it is 300: remove 400"):
        reader.latest(shapes(snapshot().arrays))
    shutil.rmtree(saved.folder / "400")
    assert Checkpoints(saved.folder).latest(shapes(snapshot().arrays)).update == 12


def test_another_layout_is_refused(saved):
    file = saved.folder / "400" / "about" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layout": 99}))
    with pytest.raises(UserError, match="400: the checkpoint has layout 99, and this version of pqn_eqx reads 1"):
        Checkpoints(saved.folder).latest(shapes(snapshot().arrays))


def test_without_a_checkpoint_there_is_none(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    assert checkpoints.latest(shapes(snapshot().arrays)) is None
    assert checkpoints.best() is None


def test_groups_have_folders_of_their_own(tmp_path):
    assert group_folder(tmp_path, 0, 1) == tmp_path / "checkpoints"
    assert group_folder(tmp_path, 1, 3) == tmp_path / "checkpoints" / "group-1"


class Recording:
    """Checkpoints that remember what they are asked to save."""

    def __init__(self, fails=False):
        self.fails, self.saved = fails, []

    def steps(self):
        return [step for step, _ in self.saved]

    def save(self, step, snapshot, about, eval_return):
        if self.fails:
            raise OSError("No space left on device")
        self.saved.append((step, eval_return))

    def wait(self):
        pass

    close = wait


def test_a_checkpoint_is_judged_by_the_evaluation_at_its_update_alone():
    """The mean over the members that have one: 10. Red if an older evaluation made a later checkpoint the best."""
    writer = Checkpointer(recording := Recording(), {})
    writer.on_start(PLAN)
    writer.on_evaluation(evaluated(update=4))
    for update in (4, 6, 6):
        writer.on_checkpoint(snapshot(update))
    assert recording.saved == [(128, 10.0), (192, None)]


def test_a_checkpoint_that_cannot_be_written_ends_nothing(capsys):
    """Red if a full disk ended the training, or nobody learnt of it."""
    writer = Checkpointer(Recording(fails=True), {})
    writer.on_start(PLAN)
    writer.on_checkpoint(snapshot())
    writer.on_end(outcome())
    assert "The checkpoint at 128 environment steps, or the one before, was not written: No space left" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep": 0}, "checkpoint.keep must be at least 1, got 0"),
        ({"interval": -1}, "checkpoint.interval must be at least 0, got -1"),
        ({"minutes": 0.0}, "checkpoint.minutes must be a finite number above 0"),
        ({"minutes": 1.0, "interval": 0}, "checkpoint.interval 0 writes no checkpoints"),
    ],
)
def test_refuses_what_cannot_work(fields, message):
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(**fields)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of ten updates, with checkpoints at every third."""
    path = tmp_path_factory.mktemp("checkpoint") / "run"
    finished = command(*TINY, "--checkpoint.interval", "96", "--run-dir", path)
    assert finished.status == 0, finished.err
    return path


def test_checkpoints_fall_where_they_are_due(run):
    checkpoints = Checkpoints(run / "checkpoints")
    assert {288, 320} <= set(checkpoints.steps()) <= {96, 192, 288, 320}
    about = checkpoints.about(320)
    assert about["config"] == json.loads((run / "config.json").read_text())
    assert about["members"] == [{"member": 0, "seed": 0}]
    assert {"jax", "pqn_eqx"} <= set(about["versions"])
    assert (about["update"], about["logged"], about["evaluated"]) == (10, 10, 10)


def test_a_finished_run_can_be_extended(run):
    """Red if an extended run began anew, or its rows had a gap or a duplicate."""
    before = (run / "metrics.jsonl").read_text()
    finished = command("--resume", run, "--total-timesteps", "640")
    assert finished.status == 0, finished.err
    assert (run / "metrics.jsonl").read_text().startswith(before)
    assert [json.loads(line)["update"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [*range(1, 21)]
    assert json.loads((run / "summary.json").read_text())["env_steps"] == 640
    config, resume = parse_request(["--resume", str(run)])
    assert resume
    assert config.total_timesteps == 640


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--learning-rate", "1e-3"], "algorithm.learning_rate (0.0001 to 0.001)"),
        (["--seed", "5"], "seed (0 to 5)"),
        (["--total-timesteps", "64"], "--resume can extend a run, not shorten it"),
    ],
)
def test_a_resumed_run_stays_the_run_it_was(run, argv, words):
    finished = command("--resume", run, *argv)
    assert finished.status == 2
    assert words in finished.err


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    finished = command("--resume", tmp_path)
    assert finished.status == 2
    assert finished.err == f"error: {tmp_path} is no run directory: it has no config.json.\n"
    finished = command("--resume", tmp_path / "nowhere")
    assert "is no run directory" in finished.err
    finished = command("cartpole", "--resume", tmp_path)
    assert "a preset (cartpole) and --resume" in finished.err


def test_no_checkpoints_where_none_are_wanted(tmp_path):
    path = tmp_path / "run"
    assert command(*TINY, "--checkpoint.interval", "0", "--run-dir", path).status == 0
    assert not (path / "checkpoints").exists()


def test_best_needs_no_score_of_its_own():
    """Red if a checkpoint whose evaluation had no finished episode counted as one with a return."""
    writer = Checkpointer(recording := Recording(), {})
    writer.on_start(PLAN)
    none = types.SimpleNamespace(rows=lambda: [{"episode_return": None}], update=4)
    writer.on_evaluation(none)
    writer.on_checkpoint(snapshot(4))
    assert recording.saved == [(128, None)]
    assert isinstance(evaluated(), Evaluated)
