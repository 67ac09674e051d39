"""The command ``python -m pqn_eqx.evaluate RUN_DIR``: a trained policy's whole episodes; a table, JSON and a picture.

With the run's own ε and environments it plays the episodes that the run's evaluation at that step played.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from pqn_eqx.cache import enable_compilation_cache
from pqn_eqx.checkpoint import find_checkpoint
from pqn_eqx.config import TrainConfig
from pqn_eqx.episodes import Evaluation
from pqn_eqx.errors import ConfigError, UserError
from pqn_eqx.plot import mean_and_interval
from pqn_eqx.population import Member
from pqn_eqx.run_directory import to_json
from pqn_eqx.serialization import load_run
from pqn_eqx.sharding import MeshConfig

PROGRAM = "python -m pqn_eqx.evaluate"


@dataclasses.dataclass(frozen=True)
class Options:
    """Play whole episodes with the policies of a run."""

    run_directory: tyro.conf.Positional[Path]
    """The run."""
    step: str = "last"
    """Which checkpoint: last, best (by the mean evaluation return over members), or its environment steps."""
    episodes: int | None = None
    """Episodes of each member, the first of as many environments; default: as in training."""
    epsilon: float | None = None
    """Probability of a random action; default: as in the run's evaluations (0, the greedy policy)."""
    max_steps: int | None = None
    """Steps after which an episode counts as unfinished; default: as in training."""
    video: bool = False
    """Draw an episode of the first member, as episode-STEP.gif in the run directory."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write the numbers as JSON; default: evaluate-STEP.json in the run directory."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The episodes of a group of members at a checkpoint."""

    env_steps: int
    members: Sequence[Member]
    evaluation: Evaluation

    def rows(self) -> list[dict[str, Any]]:
        """A row per member; the interval is that of the mean over episodes, by bootstrap."""
        rows = []
        for place, (member, row) in enumerate(zip(self.members, self.evaluation.rows(), strict=True)):
            through = self.evaluation.finished[place]
            interval: list[float] | None = None
            if through.any():
                _, low, high = mean_and_interval(self.evaluation.episode_return[place][through][:, None])
                interval = [float(low[0]), float(high[0])]
            rows.append(member.row() | {"env_steps": self.env_steps} | row | {"episode_return_interval": interval})
        return rows


def with_options(config: TrainConfig, options: Options) -> TrainConfig:
    """The run's configuration with its evaluation changed, on whatever devices there are."""
    given = {"num_envs": options.episodes, "epsilon": options.epsilon, "max_steps": options.max_steps}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, **changes), mesh=MeshConfig())


def evaluate(options: Options) -> list[Evaluated]:
    """The episodes of every group. Raises `UserError` for what a user can mend."""
    config = with_options(load_run(options.run_directory), options)
    groups, found = config.groups, []
    for number, group in enumerate(groups):
        checkpoints, step = find_checkpoint(options.run_directory, number, len(groups), options.step)
        trainer = config.build(group=group)
        update = checkpoints.about(step)["update"]
        networks = checkpoints.restore(step, "network", trainer.abstract_arrays().state.learner.network)
        evaluation = trainer.evaluate(networks, update)
        assert evaluation is not None  # nothing stops it
        found.append(Evaluated(step, group, evaluation))
    return found


def table(rows: list[dict[str, Any]], swept: list[str]) -> Table:
    """The rows for people; achievements in per cent, those that no member has left out."""
    achievements = [name for name in rows[0] if name.startswith("achievement/")]
    achievements = [name for name in achievements if any(row[name] for row in rows)]
    drawn = Table(title=f"Whole episodes at {rows[0]['env_steps']:,} environment steps")
    for name in ("member", "seed", *swept, "return", "95 % interval", "length", "unfinished"):
        drawn.add_column(name, justify="right")
    for name in achievements:
        drawn.add_column(name.removeprefix("achievement/").replace("_", " ") + " %", justify="right")
    for row in rows:
        interval = row["episode_return_interval"]
        share = row["unfinished"] / (row["episodes"] + row["unfinished"])
        drawn.add_row(
            *(f"{row[name]:g}" for name in ("member", "seed", *swept)),
            _number(row["episode_return"]),
            "-" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}",
            _number(row["episode_length"]),
            f"{share:.0%}",
            *(_number(None if row[name] is None else 100 * row[name]) for name in achievements),
        )
    return drawn


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def run(options: Options) -> None:
    """Evaluate, print and write."""
    evaluated = evaluate(options)
    rows = [row for group in evaluated for row in group.rows()]
    swept = list(dict.fromkeys(name for group in evaluated for member in group.members for name in member.values))
    Console().print(table(rows, swept))
    known = [row["episode_return"] for row in rows if row["episode_return"] is not None]
    result = {"eval_return": float(np.mean(known)) if known else None, "members": rows}
    output = options.output or options.run_directory / f"evaluate-{evaluated[0].env_steps}.json"
    try:
        output.write_text(json.dumps(to_json(result), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}. Give another --output.") from error
    print(f"Numbers: {output}")
    if options.video:
        from pqn_eqx.video import draw_episode

        print(f"Episode: {draw_episode(options.run_directory, options.step, options.epsilon or 0.0)}")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for a failure, 2 for a wrong request."""
    options = tyro.cli(Options, prog=PROGRAM, description=__doc__, args=argv)
    enable_compilation_cache()
    try:
        run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
