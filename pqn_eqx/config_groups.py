"""Naming the members of a config group: the alternatives of one choice, such as the loss."""

from collections.abc import Callable
from typing import TypeVar

from tyro.conf import configure, subcommand

Config = TypeVar("Config", bound=type)


def group_member(name: str) -> Callable[[Config], Config]:
    """Give a config class the name it has on the command line (``loss:huber``) and in ``config.json``."""

    def decorate(config: Config) -> Config:
        config.group_name = name  # type: ignore[attr-defined]
        return configure(subcommand(name))(config)

    return decorate


def group_name(config: type) -> str:
    """The name that `group_member` gave."""
    return config.group_name  # type: ignore[attr-defined]
