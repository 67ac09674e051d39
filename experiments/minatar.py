"""How far does PQN get on MinAtar in ten million steps, with purejaxql's hyperparameters?

python -m experiments.minatar                    # all four games, one seed: an hour on two cores
python -m experiments.minatar --games breakout --num-seeds 3 --total-timesteps 2000000
python -m experiments.minatar --smoke            # a minute: does it run?
"""

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from experiments.harness import Arm, conduct, smoke
from pqn_eqx.presets import PRESETS

QUESTION = "How far does PQN get on MinAtar?"
RESULTS = Path(__file__).parent / "results" / "minatar"

Game = Literal["asterix", "breakout", "freeway", "space-invaders"]


@dataclasses.dataclass(frozen=True)
class Options:
    """PQN's MinAtar presets on gymnax's four games."""

    games: tuple[Game, ...] = ("asterix", "breakout", "freeway", "space-invaders")
    """Which games to run."""
    num_seeds: int = 1
    """Seeds of every game, trained together as a population."""
    total_timesteps: int = 10_000_000
    """Environment steps of every seed."""
    output: Path | None = None
    """Folder of the results; default: experiments/results/minatar, and a temporary one for a smoke run."""
    smoke: bool = False
    """Only see that it runs: two seeds, three updates."""


def arms(options: Options) -> list[Arm]:
    """A population for each game."""
    found = []
    for game in options.games:
        preset = PRESETS[f"minatar-{game}"].config
        config = dataclasses.replace(preset, num_seeds=options.num_seeds, total_timesteps=options.total_timesteps)
        found.append(Arm(game, "pqn", smoke(config) if options.smoke else config))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = tyro.cli(Options, prog="python -m experiments.minatar", args=argv)
    output = options.output or (Path(tempfile.mkdtemp(prefix="minatar-smoke-")) if options.smoke else RESULTS)
    return conduct(QUESTION, arms(options), output)


if __name__ == "__main__":
    sys.exit(main())
