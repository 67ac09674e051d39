"""What the adapters of environment packages share: importing one when it is chosen, and changing its parameters."""

import dataclasses
import importlib
import math
from typing import Any

from pqn_eqx.errors import ConfigError, nearest


def import_or_explain(module: str, extra: str | None) -> Any:
    """The imported `module`; where its package is missing, a `ConfigError` that names the `extra` to install.

    `extra` is None for a package that pqn_eqx always installs.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            missing = f"{package} cannot be imported because {error.name} is missing"
        else:
            missing = f"the package {package} is not installed"
        mend = f"pip install 'pqn-eqx[{extra}]'" if extra else "pip install --force-reinstall pqn-eqx"
        raise ConfigError(f"env: {missing}. Install it with: {mend}") from error


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
