"""Configurations as JSON and back, strictly: a file with a misspelt field is refused, not half understood."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import cattrs
import cattrs.v
from cattrs.strategies import configure_tagged_union

from pqn_eqx.config import EnvConfig, TrainConfig
from pqn_eqx.config_groups import group_name
from pqn_eqx.envs.resets import ResetConfig
from pqn_eqx.errors import ConfigError
from pqn_eqx.losses import LossConfig
from pqn_eqx.networks.q_network import EncoderConfig, HeadConfig, MemoryConfig
from pqn_eqx.optimizers import OptimizerConfig
from pqn_eqx.run_directory import CONFIG
from pqn_eqx.scaling import ScalingConfig

GROUPS = (ResetConfig, EnvConfig, EncoderConfig, MemoryConfig, HeadConfig, LossConfig, OptimizerConfig, ScalingConfig)
"""The config groups of more than one member: in JSON, `type` says which one is meant."""


def _exactly(*kinds: type) -> Any:
    """A hook that takes JSON values of `kinds` alone; cattrs would turn 2.5 into the integer 2."""

    def structure(value: Any, target: type) -> Any:
        if type(value) not in kinds:
            raise ValueError(f"expected {target.__name__}, got {value!r}")
        return target(value)

    return structure


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (bool, int, str):
        converter.register_structure_hook(kind, _exactly(kind))
    converter.register_structure_hook(float, _exactly(float, int))
    converter.register_structure_hook(Path, lambda value, _: Path(converter.structure(value, str)))
    converter.register_unstructure_hook(Path, str)
    for group in GROUPS:
        configure_tagged_union(group, converter, tag_name="type", tag_generator=group_name)
        converter.register_structure_hook(group, _known_member(group, converter.get_structure_hook(group)))
    return converter


def _known_member(group: Any, structure: Any) -> Any:
    """`structure` for a config group, after a look at whether its `type` is one of the group's members."""
    names = [group_name(member) for member in get_args(group)]

    def checked(value: Any, target: Any) -> Any:
        if not isinstance(value, dict):
            raise ConfigError(f"expected an object with a type of {', '.join(names)}, got {value!r}")
        if value.get("type") not in names:
            raise ConfigError(f"type must be one of {', '.join(names)}, got {value.get('type')!r}")
        return structure(value, target)

    return checked


def _explain(error: BaseException, target: Any) -> str:
    """Our own errors say what is wrong; cattrs' words serve for the rest."""
    return str(error) if isinstance(error, ConfigError) else cattrs.v.format_exception(error, target)


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """The complete configuration in JSON's types."""
    return _converter().unstructure(config, TrainConfig)


def config_from_dict(data: dict[str, Any]) -> TrainConfig:
    """The configuration that `config_to_dict` wrote. Raises `ConfigError` naming every field that does not fit."""
    try:
        return _converter().structure(data, TrainConfig)
    except Exception as error:
        problems = cattrs.transform_error(error, path="config", format_exception=_explain)
        raise ConfigError("; ".join(problem.replace(" @ ", " at ") for problem in problems)) from error


def load_config(path: Path, source: str = "--config") -> TrainConfig:
    """Read a ``config.json``. Raises `ConfigError`, naming `source`, where it cannot be read or does not fit."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{source}: {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{source}: {path} is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: {path} holds no configuration, but a {type(data).__name__}.")
    try:
        return config_from_dict(data)
    except ConfigError as error:
        raise ConfigError(f"{source}: {path}: {error}") from error


def load_run(directory: Path) -> TrainConfig:
    """The configuration of the run in `directory`. Raises `ConfigError` where there is none."""
    if not (directory / CONFIG).exists():
        raise ConfigError(f"{directory} is no run directory: it has no {CONFIG}.")
    return dataclasses.replace(load_config(directory / CONFIG, str(directory)), run_dir=directory)
