"""Which loss should Q-learning use: squared error, Huber, or cross-entropy over bins (HL-Gauss)?

python -m experiments.losses            # everything; hours on two cores
python -m experiments.losses --smoke    # a minute: does it run?
"""

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from experiments.harness import Arm, conduct, smoke
from pqn_eqx.config import TrainConfig
from pqn_eqx.losses import HLGaussConfig, HuberConfig, LossConfig, MSEConfig
from pqn_eqx.presets import PRESETS

QUESTION = "Which loss should Q-learning use?"
RESULTS = Path(__file__).parent / "results" / "losses"

Task = Literal["cartpole", "acrobot", "breakout"]

TASKS: dict[Task, tuple[TrainConfig, tuple[float, float]]] = {
    "cartpole": (PRESETS["cartpole"].config, (-1, 11)),
    "acrobot": (PRESETS["acrobot"].config, (-11, 1)),
    "breakout": (PRESETS["minatar-breakout"].config, (-2, 20)),
}
"""The run of each task, and HL-Gauss's support there: the returns there can be in scaled, discounted rewards, and a
margin; `target_outside` in the raw results tells how much fell outside."""


FURTHER_LEARNING_RATES: dict[Task, tuple[float, ...]] = {"cartpole": (5e-4,)}
"""The presets of the other tasks have this learning rate already; that of CartPole was found for the squared error, and
a cross-entropy need not like it."""


@dataclasses.dataclass(frozen=True)
class Options:
    """MSE, Huber and HL-Gauss on CartPole (at two learning rates), Acrobot and MinAtar Breakout, all else equal."""

    tasks: tuple[Task, ...] = ("cartpole", "acrobot", "breakout")
    """Which tasks to run."""
    num_seeds: int = 5
    """Seeds of every arm, trained together as a population."""
    breakout_steps: int = 1_000_000
    """Environment steps of Breakout; the others take those of their presets."""
    output: Path | None = None
    """Folder of the results; default: experiments/results/losses, and a temporary one for a smoke run."""
    smoke: bool = False
    """Only see that it runs: two seeds, three updates."""


def arms(options: Options) -> list[Arm]:
    """Every task with every loss at every learning rate of the task; the squared error at the first is the baseline."""
    found = []
    for task in options.tasks:
        config, (v_min, v_max) = TASKS[task]
        losses: dict[str, LossConfig] = {
            "mse": MSEConfig(),
            "huber": HuberConfig(),
            "hl-gauss": HLGaussConfig(v_min, v_max),
        }
        if task == "breakout":
            config = dataclasses.replace(config, total_timesteps=options.breakout_steps)
        given = config.algorithm.learning_rate
        for learning_rate in (given, *FURTHER_LEARNING_RATES.get(task, ())):
            algorithm = dataclasses.replace(config.algorithm, learning_rate=learning_rate)
            suffix = "" if learning_rate == given else f"-{learning_rate:g}"
            for name, loss in losses.items():
                arm = dataclasses.replace(config, loss=loss, algorithm=algorithm, num_seeds=options.num_seeds)
                found.append(Arm(task, name + suffix, smoke(arm) if options.smoke else arm))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = tyro.cli(Options, prog="python -m experiments.losses", args=argv)
    output = options.output or (Path(tempfile.mkdtemp(prefix="losses-smoke-")) if options.smoke else RESULTS)
    return conduct(QUESTION, arms(options), output)


if __name__ == "__main__":
    sys.exit(main())
