"""The command line of a run: a base, then flags that change it.

The base is a preset (the first argument), a file (`--config FILE`) or a run to go on with (`--resume RUN_DIR`). It is
taken off the arguments first; tyro parses the rest with the base as its defaults, so that flags and groups come in any
order and change only what they name.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from pqn_eqx.config import TrainConfig
from pqn_eqx.errors import ConfigError, nearest
from pqn_eqx.presets import PRESETS
from pqn_eqx.run_directory import CONFIG
from pqn_eqx.serialization import config_to_dict, load_config, load_run
from pqn_eqx.sweep import explain_unknown

PROGRAM = "python -m pqn_eqx.train"
GROUP_CHOICE = re.compile(r"(env|env\.reset|network\.(encoder|memory|head)|loss|optimizer|scaling):\S*")


def description() -> str:
    """What stands above the options in `--help`."""
    width = max(map(len, PRESETS)) + 1
    presets = "\n".join(f"  {name:<{width}} {preset.summary}" for name, preset in PRESETS.items())
    return (
        "Train PQN (arXiv 2407.04811): Q-learning in many environments at once, without replay and target network.\n\n"
        f"  {PROGRAM} [PRESET | --config FILE | --resume DIR] [flags and groups in any order]\n\n"
        f"Presets, the first argument:\n{presets}\n\n"
        "  --config FILE    start from a run's config.json instead of a preset\n"
        "  --resume DIR     go on with a run from its last checkpoint; with --total-timesteps N, beyond its end\n\n"
        "Alternatives are chosen as groups, each with flags of its own:\n"
        "  env:gymnax --env.name Acrobot-v1 env.reset:optimistic loss:huber --loss.delta 2 optimizer:adam\n"
        "  network.memory:gru --network.memory.hidden-size 128 network.head:dueling network.encoder:mlp\n\n"
        "A population trains in one program, one member for each setting and seed (here 2 x 2 x 3 = 12):\n"
        f"  {PROGRAM} --sweep.learning-rate 1e-4 1e-3 --sweep.td-lambda 0.5 0.9 --num-seeds 3\n\n"
        "All devices are used, members first; --mesh.member and --mesh.env say otherwise. A CPU can play several:\n"
        "  XLA_FLAGS=--xla_force_host_platform_device_count=4\n\n"
        "The defaults shown are those of the base: ask a preset with `PRESET --help`."
    )


def _take(flag: str, what: str, arguments: list[str]) -> str | None:
    """Take the first `flag` and its value off the arguments; None where it is not there."""
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == flag:
            following = arguments[position + 1 : position + 2]
            if not value and (not following or following[0].startswith("--")):
                raise ConfigError(f"{flag} needs {what}.")
            del arguments[position : position + (1 if value else 2)]
            return value or following[0]
    return None


def split_base(argv: Sequence[str]) -> tuple[TrainConfig, list[str], bool]:
    """The base that `argv` names, the arguments that are left, and whether a run is to be resumed.

    Raises `ConfigError` where it names none.
    """
    rest = list(argv)
    preset = rest.pop(0) if rest and not rest[0].startswith("-") and ":" not in rest[0] else None
    file = _take("--config", "the path of a config.json", rest)
    directory = _take("--resume", "the path of a run directory", rest)
    for before, argument in itertools.pairwise(rest):
        if argument in PRESETS and not before.startswith("-"):
            raise ConfigError(f"A preset is the first argument: {PROGRAM} {argument} [flags]; got it after {before!r}.")
    if preset is not None and preset not in PRESETS:
        raise ConfigError(
            f"There is no preset {preset!r}. {nearest(preset, list(PRESETS))}Presets: {', '.join(PRESETS)}."
        )
    given = {"a preset": preset, "--config": file, "--resume": directory}
    bases = [f"{what} ({value})" for what, value in given.items() if value is not None]
    if len(bases) > 1:
        raise ConfigError(f"A run starts from a preset, --config or --resume, not both: got {' and '.join(bases)}.")
    if directory is not None:
        return load_run(Path(directory)), rest, True
    if file is not None:
        # A rerun goes to a folder of its own.
        return dataclasses.replace(load_config(Path(file), "--config"), run_dir=None), rest, False
    return PRESETS[preset or "cartpole"].config, rest, False


CHANGEABLE = ("total_timesteps", "mesh", "hosts", "checkpoint", "wandb", "name")
"""What may differ when a run is resumed: nothing that its numbers up to here depend on."""


def check_resumable(old: TrainConfig, new: TrainConfig) -> None:
    """Raise `ConfigError` naming the fields of a resumed run that would make it another run."""
    before, after = (flatten(config_to_dict(config)) for config in (old, new))
    changed = sorted(
        field
        for field in before.keys() | after.keys()
        if before.get(field) != after.get(field) and field.partition(".")[0] not in CHANGEABLE
    )
    if changed:
        said = ", ".join(f"{field} ({before.get(field)} to {after.get(field)})" for field in changed)
        raise ConfigError(
            f"--resume goes on with a run as it was; to change {said}, start a new one with --config "
            f"{old.run_dir}/{CONFIG}. May change: {', '.join(CHANGEABLE)}."
        )
    if new.total_timesteps < old.total_timesteps:
        raise ConfigError(
            f"total_timesteps: --resume can extend a run, not shorten it: got {new.total_timesteps:,} of "
            f"{old.total_timesteps:,}."
        )


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, by the fields' paths."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def in_order(arguments: Sequence[str]) -> list[str]:
    """The choices of groups (``env.reset:full``) before all flags, outer groups before those within them.

    tyro wants a group before its flags and before the groups within it; users need not know. Of a flag that is given
    twice the last alone is kept, as everywhere on command lines: tyro looks for the second within the group before it.
    """
    chosen = [argument for argument in arguments if GROUP_CHOICE.fullmatch(argument)]
    flags: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name = re.sub(r"^--(.*\.)?no-", r"--\1", argument.partition("=")[0].replace("_", "-"))
            flags.pop(name, None)
        if argument not in chosen:
            flags.setdefault(name, []).append(argument)
    ordered = sorted(chosen, key=lambda choice: choice.partition(":")[0].count("."))
    return ordered + [argument for values in flags.values() for argument in values]


def parse(argv: Sequence[str]) -> TrainConfig:
    """The configuration that `argv` asks for. Raises `ConfigError`; leaves as tyro does for `--help` and bad flags."""
    return parse_request(argv)[0]


def parse_request(argv: Sequence[str]) -> tuple[TrainConfig, bool]:
    """The configuration that `argv` asks for, and whether it is of a run to be resumed."""
    base, rest, resume = split_base(argv)
    explain_unknown(rest)
    config = tyro.cli(
        TrainConfig,
        prog=PROGRAM,
        description=description(),
        args=in_order(rest),
        default=base,
        config=(tyro.conf.CascadeSubcommandArgs,),
    )
    if resume:
        check_resumable(base, config)
    return config, resume
