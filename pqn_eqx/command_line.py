"""The command line of a run: a base, then flags that change it.

The base is a preset (the first argument) or a file (`--config FILE`). It is taken off the arguments first; tyro parses
the rest with the base as its defaults, so that flags and groups come in any order and change only what they name.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import tyro

from pqn_eqx.config import TrainConfig
from pqn_eqx.errors import ConfigError, nearest
from pqn_eqx.presets import PRESETS
from pqn_eqx.serialization import load_config
from pqn_eqx.sweep import explain_unknown

PROGRAM = "python -m pqn_eqx.train"
GROUP_CHOICE = re.compile(r"(env|env\.reset|network\.(encoder|memory|head)|loss|optimizer|scaling):\S*")


def description() -> str:
    """What stands above the options in `--help`."""
    width = max(map(len, PRESETS)) + 1
    presets = "\n".join(f"  {name:<{width}} {preset.summary}" for name, preset in PRESETS.items())
    return (
        "Train PQN (arXiv 2407.04811): Q-learning in many environments at once, without replay and target network.\n\n"
        f"  {PROGRAM} [PRESET | --config FILE] [flags and groups in any order]\n\n"
        f"Presets, the first argument:\n{presets}\n\n"
        "  --config FILE    start from a run's config.json instead of a preset\n\n"
        "Alternatives are chosen as groups, each with flags of its own:\n"
        "  env:gymnax --env.name Acrobot-v1 env.reset:optimistic loss:huber --loss.delta 2 optimizer:adam\n"
        "  network.memory:gru --network.memory.hidden-size 128 network.head:dueling network.encoder:mlp\n\n"
        "A population trains in one program, one member for each setting and seed (here 2 x 2 x 3 = 12):\n"
        f"  {PROGRAM} --sweep.learning-rate 1e-4 1e-3 --sweep.td-lambda 0.5 0.9 --num-seeds 3\n\n"
        "All devices are used, members first; --mesh.member and --mesh.env say otherwise. A CPU can play several:\n"
        "  XLA_FLAGS=--xla_force_host_platform_device_count=4\n\n"
        "The defaults shown are those of the base: ask a preset with `PRESET --help`."
    )


def split_base(argv: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """The base that `argv` names, and the arguments that are left. Raises `ConfigError` where it names none."""
    rest = list(argv)
    preset = rest.pop(0) if rest and not rest[0].startswith("-") and ":" not in rest[0] else None
    file = None
    for position, argument in enumerate(rest):
        flag, _, value = argument.partition("=")
        if flag == "--config":
            taken = 1 if value else 2
            file = value or (rest[position + 1] if position + 1 < len(rest) else None)
            if not file:
                raise ConfigError("--config needs the path of a config.json.")
            del rest[position : position + taken]
            break
    for before, argument in itertools.pairwise(rest):
        if argument in PRESETS and not before.startswith("-"):
            raise ConfigError(f"A preset is the first argument: {PROGRAM} {argument} [flags]; got it after {before!r}.")
    if preset is not None and preset not in PRESETS:
        raise ConfigError(
            f"There is no preset {preset!r}. {nearest(preset, list(PRESETS))}Presets: {', '.join(PRESETS)}."
        )
    if preset is not None and file is not None:
        raise ConfigError(f"Give a preset or --config, not both: got {preset!r} and --config {file}.")
    if file is not None:
        # A rerun goes to a folder of its own.
        return dataclasses.replace(load_config(Path(file)), run_dir=None), rest
    return PRESETS[preset or "cartpole"].config, rest


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
    base, rest = split_base(argv)
    explain_unknown(rest)
    return tyro.cli(
        TrainConfig,
        prog=PROGRAM,
        description=description(),
        args=in_order(rest),
        default=base,
        config=(tyro.conf.CascadeSubcommandArgs,),
    )
