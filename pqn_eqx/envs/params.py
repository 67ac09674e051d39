"""Changing the parameters of an environment library's environments."""

import dataclasses
import math
from typing import Any

from pqn_eqx.errors import ConfigError, nearest


def with_params(params: Any, changes: dict[str, float]) -> Any:
    """The parameter dataclass `params` of an environment with `changes`, each cast to the type of its default.

    Raises `ConfigError` for a name that is not there, a number where none fits, or a fraction where an integer stands.
    """
    known = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(params)
        if isinstance(getattr(params, field.name), bool | int | float)
    }
    cast = {}
    for name, value in changes.items():
        if name not in known:
            raise ConfigError(
                f"env.params: there is no parameter {name!r}. {nearest(name, list(known))}There are: "
                f"{', '.join(f'{k} ({v})' for k, v in known.items())}."
            )
        kind = type(known[name])
        if math.isnan(value) or (kind is not float and (math.isinf(value) or kind(value) != value)):
            raise ConfigError(f"env.params: {name} is of type {kind.__name__}, got {value}.")
        cast[name] = kind(value)
    return dataclasses.replace(params, **cast)
