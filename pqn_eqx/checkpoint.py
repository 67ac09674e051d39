"""Checkpoints: the whole state of a run on disk, so that a run that ends at any moment can be continued exactly.

A checkpoint is a folder ``checkpoints/<environment steps>`` of the run directory (of a population in groups,
``checkpoints/group-<number>/<environment steps>``), written by orbax in the background: arrays under names such as
``head.layer.weight``, and beside them what is no array. A folder under its final name is whole.
"""

import contextlib
import dataclasses
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from pqn_eqx.callbacks import Arrays, Callback, Evaluated, Outcome, Plan, Snapshot
from pqn_eqx.errors import ConfigError, UserError, require, require_at_least
from pqn_eqx.hosts import writes_files
from pqn_eqx.run_directory import CHECKPOINTS
from pqn_eqx.sharding import TrainState

LAYOUT = 1
"""Version of what a checkpoint holds. A change that old checkpoints do not fit takes the next number."""

SPARE_BYTES = 1_000_000
"""Room that a checkpoint takes beside its arrays, generously."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """The whole training state on disk, from which `--resume RUN_DIR` continues exactly."""

    interval: int | None = None
    """Environment steps between checkpoints, rounded to whole log intervals; default: with every evaluation. 0 writes
    none."""
    minutes: float | None = None
    """Minutes between checkpoints, each at the next log interval's end; given alone, it replaces the interval."""
    keep: int = 2
    """Checkpoints that are kept: this many of the last ones, and the best by mean evaluation return over members."""

    def __post_init__(self):
        require_at_least(1, **{"checkpoint.keep": self.keep})
        require(
            self.interval is None or self.interval >= 0,
            f"checkpoint.interval must be at least 0, got {self.interval}.",
        )
        require(
            self.minutes is None or 0 < self.minutes < float("inf"),
            f"checkpoint.minutes must be a finite number above 0 where it is given, got {self.minutes}.",
        )
        require(
            self.minutes is None or self.interval != 0,
            "checkpoint.interval 0 writes no checkpoints; give checkpoint.minutes alone, without it.",
        )


def name_arrays(tree: PyTree) -> dict[str, Array]:
    """The arrays of `tree` by the names of their places; random keys as the numbers they are made of.

    Arrays without elements are left out: there is nothing to save.
    """
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = _key_data(leaf)
        if leaf.size:
            named[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    return named


def _key_data(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def put_arrays(named: dict[str, Array], like: PyTree) -> PyTree:
    """The tree `like`, of shapes or arrays, with the arrays that `name_arrays` found in such a tree."""

    def place(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(named[name])
        return named[name] if leaf.size else jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(place, like)


class Checkpoints:
    """The checkpoints of one group of a run."""

    ITEMS = ("network", "training", "actors", "measures")
    """The parts of a checkpoint that hold arrays. Who wants to act opens the first alone: environments are large."""

    def __init__(self, folder: Path, keep: int | None = None):
        """To write, with `keep` of the last ones; to read only, without."""
        # orbax takes seconds to import, and logs at length what it raises as well.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as managers

        self.args, self.folder = ocp.args, folder.resolve()
        options: dict[str, Any] = {"read_only": True}
        if keep is not None:
            best = managers.BestN(
                get_metric_fn=lambda metrics: metrics["eval_return"], n=1, keep_checkpoints_without_metrics=False
            )
            policy = managers.AnyPreservationPolicy([managers.LatestN(keep), best])
            options = {"preservation_policy": policy, "cleanup_tmp_directories": True}
        handlers: dict[str, Any] = {item: ocp.StandardCheckpointHandler() for item in self.ITEMS}
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(**options),
            item_handlers=handlers | {"about": ocp.JsonCheckpointHandler()},
        )

    def steps(self) -> list[int]:
        """The environment steps of the checkpoints that are there."""
        return sorted(self.manager.all_steps())

    def best(self) -> int | None:
        """The environment steps of the checkpoint with the best evaluation, if any was made at one."""
        scored = {step: self.about(step)["eval_return"] for step in self.steps()}
        known = {step: score for step, score in scored.items() if score is not None}
        return max(known, key=lambda step: (known[step], step)) if known else None

    def save(self, step: int, snapshot: Snapshot, about: dict[str, Any], eval_return: float | None) -> None:
        """Start writing a checkpoint. Raises what went wrong with this one, or with the one before."""
        progress = {name: getattr(snapshot, name) for name in ("update", "logged", "evaluated", "seconds")}
        progress |= {"layout": LAYOUT, "eval_return": eval_return}
        parts = {item: name_arrays(part) for item, part in self._parts(snapshot.arrays).items()}
        self._check_room(sum(leaf.nbytes for leaf in jax.tree.leaves(parts)))
        named = {item: self.args.StandardSave(jax.tree.map(_own_copy, part)) for item, part in parts.items()}
        self.manager.save(
            step,
            args=self.args.Composite(about=self.args.JsonSave(progress | about), **named),
            metrics=None if eval_return is None else {"eval_return": eval_return},
            force=True,
        )

    def latest(self, like: Arrays) -> Snapshot | None:
        """The run at its last checkpoint, its arrays as those of `like`; None where there is no checkpoint.

        Raises `UserError` where it is damaged or does not fit.
        """
        if not self.steps():
            return None
        step = self.steps()[-1]
        about = self.about(step)
        parts = {item: self.restore(step, item, part) for item, part in self._parts(like).items()}
        learner = eqx.tree_at(_network, parts["training"], parts["network"], is_leaf=lambda node: node is None)
        state = TrainState(learner, parts["actors"])
        return Snapshot(
            Arrays(state, *parts["measures"]), about["update"], about["logged"], about["evaluated"], about["seconds"]
        )

    def about(self, step: int) -> dict[str, Any]:
        """What is said of a checkpoint. Raises `UserError` for one that is damaged or of another layout."""
        with self._damage_told(step):
            about = self.manager.restore(step, args=self.args.Composite(about=self.args.JsonRestore())).about
            layout = about["layout"]
        if layout != LAYOUT:
            raise UserError(
                f"{self.folder / str(step)}: the checkpoint has layout {layout}, and this version of pqn_eqx reads "
                f"{LAYOUT}; it was written by pqn_eqx {about.get('versions', {}).get('pqn_eqx')}."
            )
        return about

    def restore(self, step: int, item: str, like: PyTree) -> PyTree:
        """A part of a checkpoint in the shapes and on the devices of `like`.

        Raises `ConfigError` naming the arrays that do not fit, `UserError` where the checkpoint is damaged.
        """
        wanted = name_arrays(like)
        with self._damage_told(step):
            found = self.manager.item_metadata(step)[item].tree
        self._check(step, wanted, found)
        with self._damage_told(step):
            restored = self.manager.restore(step, args=self.args.Composite(**{item: self.args.StandardRestore(wanted)}))
        return put_arrays(restored[item], like)

    def wait(self) -> None:
        """Until everything is written. Raises what went wrong."""
        self.manager.wait_until_finished()

    def close(self) -> None:
        self.manager.close()

    def _check_room(self, needed: int) -> None:
        """Raise `OSError` where the disk is too full: what orbax does there is noise from many threads."""
        free = shutil.disk_usage(self.folder).free
        if free < needed + SPARE_BYTES:
            raise OSError(f"No space left on device: it needs {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free")

    @staticmethod
    def _parts(arrays: Arrays) -> dict[str, PyTree]:
        learner = arrays.state.learner
        return {
            "network": learner.network,
            "training": eqx.tree_at(_network, learner, None),
            "actors": arrays.state.actors,
            "measures": (arrays.metrics, arrays.diverged_at),
        }

    def _check(self, step: int, wanted: dict[str, Any], found: dict[str, Any]) -> None:
        problems = [f"{name} is missing" for name in wanted.keys() - found.keys()]
        problems += [f"{name} is not wanted" for name in found.keys() - wanted.keys()]
        for name in wanted.keys() & found.keys():
            have, want = found[name], wanted[name]
            if (tuple(have.shape), have.dtype) != (tuple(want.shape), want.dtype):
                problems.append(f"{name} is {have.dtype}{list(have.shape)} and not {want.dtype}{list(want.shape)}")
        if problems:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ConfigError(
                f"{self.folder / str(step)} does not fit this configuration: {'; '.join(sorted(problems)[:5])}{more}."
            )

    @contextlib.contextmanager
    def _damage_told(self, step: int) -> Iterator[None]:
        """Whatever goes wrong within becomes a `UserError` that names the file and the checkpoint before it."""
        try:
            yield
        except Exception as error:
            before = [other for other in self.steps() if other < step]
            mend = f"The one before it is {before[-1]}: remove {step} to use it." if before else "None is before it."
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise UserError(f"{self.folder / str(step)}: the checkpoint is damaged ({reason}). {mend}") from error


def _network(learner: Any) -> Any:
    return learner.network


def _own_copy(leaf: Array) -> Array:
    """A copy that the next chunk, which overwrites its state, cannot reach.

    orbax copies from the device before `save` returns, but on CPUs that copy is the device's own memory.
    """
    return jnp.copy(leaf) if next(iter(leaf.devices())).platform == "cpu" else leaf


def group_folder(run_directory: Path, group: int, num_groups: int) -> Path:
    """Where the checkpoints of a group are."""
    return run_directory / CHECKPOINTS / (f"group-{group}" if num_groups > 1 else "")


def find_checkpoint(run_directory: Path, group: int, num_groups: int, which: str = "last") -> tuple[Checkpoints, int]:
    """A group's checkpoints, and the environment steps of `which`: last, best, or a number that is there.

    Raises `ConfigError` where there is no such checkpoint.
    """
    folder = group_folder(run_directory, group, num_groups)
    checkpoints = Checkpoints(folder) if folder.exists() else None
    steps = [] if checkpoints is None else checkpoints.steps()
    if checkpoints is None or not steps:
        raise ConfigError(f"{folder} holds no checkpoint; runs write them unless --checkpoint.interval is 0.")
    if which == "last":
        return checkpoints, steps[-1]
    if which == "best":
        if (best := checkpoints.best()) is None:
            raise ConfigError(f"{folder}: no checkpoint was evaluated, so that none is the best. There are {steps}.")
        return checkpoints, best
    if not which.isdecimal() or int(which) not in steps:
        raise ConfigError(
            f"{folder} has no checkpoint {which!r}. There are {', '.join(map(str, steps))}, last and best."
        )
    return checkpoints, int(which)


class Checkpointer(Callback):
    """Writes checkpoints when the trainer says so. A failure costs the checkpoint, and never the training."""

    def __init__(self, checkpoints: Checkpoints, about: dict[str, Any]):
        self.checkpoints, self.about = checkpoints, about
        self.eval_return: tuple[int, float] | None = None

    def on_start(self, plan: Plan) -> None:
        self.plan = plan

    def on_evaluation(self, evaluated: Evaluated) -> None:
        known = [row["episode_return"] for row in evaluated.rows() if row["episode_return"] is not None]
        self.eval_return = (evaluated.update, sum(known) / len(known)) if known else None

    def on_checkpoint(self, snapshot: Snapshot) -> None:
        at, eval_return = self.eval_return or (None, None)
        step = self.plan.env_steps(snapshot.update)
        if step in self.checkpoints.steps():
            return
        try:
            self.checkpoints.save(step, snapshot, self.about, eval_return if at == snapshot.update else None)
        except Exception as error:
            self._say(step, error)

    def on_end(self, outcome: Outcome) -> None:
        try:
            self.checkpoints.wait()
        except Exception as error:
            self._say(outcome.env_steps, error)

    def close(self) -> None:
        try:
            self.checkpoints.close()
        except Exception as error:
            self._say(None, error)

    def _say(self, step: int | None, error: Exception) -> None:
        if writes_files():
            which = (
                "A checkpoint" if step is None else f"The checkpoint at {step:,} environment steps, or the one before,"
            )
            why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            print(f"{which} was not written: {why}. Training goes on.", file=sys.stderr)
