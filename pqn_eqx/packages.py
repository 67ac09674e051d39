"""Optional packages: imported when something that needs them is chosen."""

import importlib
from typing import Any

from pqn_eqx.errors import ConfigError


def import_or_explain(module: str, extra: str | None, field: str) -> Any:
    """The imported `module`; where its package is missing, a `ConfigError` that names the `extra` to install.

    `extra` is None for a package that pqn_eqx always installs; `field` is the option that asks for the package.
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
        raise ConfigError(f"{field}: {missing}. Install it with: {mend}") from error
