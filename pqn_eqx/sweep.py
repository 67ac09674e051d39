"""Populations of hyperparameters: what a sweep names, and the members it makes.

Every float field of the algorithm, the loss and the exploration can differ between the members of one program, since
it is an array leaf there. What shapes the program (a width, num_envs) cannot.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, get_args, get_type_hints

import numpy as np
from tyro.conf import arg

from pqn_eqx.errors import ConfigError, nearest, require
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.losses import LossConfig
from pqn_eqx.population import Member
from pqn_eqx.pqn import PQNConfig


def _floats(config: type) -> list[str]:
    return [name for name, kind in get_type_hints(config).items() if kind is float]


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


FIELDS: dict[str, list[str]] = {
    "": _floats(PQNConfig),
    "exploration": _floats(EpsilonGreedyConfig),
    "loss": _unique(name for loss in get_args(LossConfig) for name in _floats(loss)),
}
"""What can be swept, by the part of the configuration it belongs to; the algorithm's own fields have no prefix."""

OPTIONS = tuple(f"{part}.{name}" if part else name for part, names in FIELDS.items() for name in names)
"""The names of all that can be swept: `learning_rate`, `exploration.finish`, `loss.delta`."""


def _values_of(name: str) -> tuple[str, Any, Any]:
    kind = Annotated[tuple[float, ...], arg(help=f"Values of {name}, or with --sweep-samples the ends of its range.")]
    return name, kind, dataclasses.field(default=())


def _part(class_name: str, doc: str, part: str) -> type:
    made = dataclasses.make_dataclass(class_name, map(_values_of, FIELDS[part]), frozen=True)
    made.__doc__, made.__module__ = doc, __name__
    return made


ExplorationSweep = _part("ExplorationSweep", "Values of the exploration's fields.", "exploration")
LossSweep = _part("LossSweep", "Values of the loss's fields.", "loss")
SweepConfig = dataclasses.make_dataclass(
    "SweepConfig",
    [
        *map(_values_of, FIELDS[""]),
        ("exploration", ExplorationSweep, dataclasses.field(default=ExplorationSweep())),
        ("loss", LossSweep, dataclasses.field(default=LossSweep())),
    ],
    frozen=True,
)
SweepConfig.__doc__ = (
    "Hyperparameters of the population: `--sweep.learning-rate 1e-4 1e-3 --sweep.td-lambda 0.5 0.9` trains every "
    "combination with every seed, 4 x num_seeds members in one program. With --sweep-zip the first values belong "
    "together, then the second ones; with --sweep-samples N, N settings are drawn from the ranges."
)
SweepConfig.__module__ = __name__


def _lists(sweep: SweepConfig) -> dict[str, tuple[float, ...]]:
    """The options that are swept and their values."""
    found = {}
    for option in OPTIONS:
        values = sweep
        for name in option.split("."):
            values = getattr(values, name)
        if values:
            found[option] = values
    return found


def settings(sweep: SweepConfig, zipped: bool, samples: int, seed: int) -> list[dict[str, float]]:
    """The settings of the sweep, as values by option: [{}] where nothing is swept.

    By default every combination; where `zipped`, the i-th values of all options together; with `samples` > 0 that many
    draws, log-uniform between an option's two values (uniform where they are not both positive), from `seed`. Raises
    `ConfigError` where the values do not fit that.
    """
    lists = _lists(sweep)
    require(not (zipped and samples), "Give --sweep-zip or --sweep-samples, not both.")
    require(bool(lists) or not samples, "sweep_samples needs ranges to draw from: --sweep.learning-rate 1e-5 1e-2.")
    for option, values in lists.items():
        require(
            len(set(values)) == len(values) or zipped,
            f"sweep.{option}: a value is given twice: {', '.join(map(str, values))}.",
        )
        require(all(map(math.isfinite, values)), f"sweep.{option}: every value must be finite, got {values}.")
    if samples:
        return list(_draws(lists, samples, seed))
    if zipped:
        lengths = {option: len(values) for option, values in lists.items()}
        require(
            len(set(lengths.values())) <= 1,
            f"sweep_zip needs as many values of each option, got "
            f"{', '.join(f'{length} of {option}' for option, length in lengths.items())}.",
        )
        return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)] or [{}]
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def _draws(lists: dict[str, tuple[float, ...]], samples: int, seed: int) -> Iterator[dict[str, float]]:
    rng = np.random.default_rng(seed)
    for option, values in lists.items():
        require(
            len(values) == 2,
            f"sweep.{option}: --sweep-samples draws between two values, the ends of the range; got {len(values)}.",
        )
    for _ in range(samples):
        drawn = {}
        for option, (low, high) in lists.items():
            share = rng.uniform()
            logarithmic = low > 0 and high > 0
            drawn[option] = low * (high / low) ** share if logarithmic else low + (high - low) * share
        yield drawn


def members(settings: Sequence[dict[str, float]], seeds: Sequence[int]) -> tuple[Member, ...]:
    """A member for every setting and seed, the seeds of a setting side by side."""
    pairs = itertools.product(settings, seeds)
    return tuple(Member(number, seed, values) for number, (values, seed) in enumerate(pairs))


def with_values(config: Any, values: "dict[str, float] | Any") -> Any:
    """A `TrainConfig` with swept values in their places. Raises `ConfigError` for an option its parts do not have."""
    for option, value in values.items():
        part, _, name = option.rpartition(".")
        part = part or "algorithm"
        owner = getattr(config, part)
        if name not in _floats(type(owner)):
            having = [loss.group_name for loss in get_args(LossConfig) if name in _floats(loss)]
            raise ConfigError(
                f"sweep.{option}: {part}:{type(owner).group_name} has no {name}; choose "
                f"{' or '.join(f'{part}:{member}' for member in having)}."
            )
        config = dataclasses.replace(config, **{part: dataclasses.replace(owner, **{name: value})})
    return config


def explain_unknown(arguments: Iterable[str]) -> None:
    """Raise `ConfigError` for a `--sweep.` flag of something that cannot be swept, with the reason."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        name = flag.removeprefix("--sweep.").replace("-", "_")
        if flag.startswith("--sweep.") and name not in OPTIONS:
            raise ConfigError(
                f"{flag}: {name} cannot be swept. {nearest(name, list(OPTIONS))}The members of a population share one "
                f"program, so that only numbers can differ: what shapes it (widths, num_envs, groups) takes a run of "
                f"its own for each value. Can be swept: {', '.join(OPTIONS)}."
            )
