"""Missing packages and changed parameters: what the user is told, and what is cast to what."""

import dataclasses
import math
import sys

import pytest

from pqn_eqx.envs.packages import import_or_explain, with_params
from pqn_eqx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Params:
    max_timesteps: int = 100
    gravity: float = 9.8
    god_mode: bool = False
    angles: tuple = (None, None)


def test_import_gives_the_module():
    """Red if the package instead of the module is given."""
    assert import_or_explain("os.path", extra=None) is sys.modules["os.path"]
    assert import_or_explain("xml.dom", extra=None).__name__ == "xml.dom"


def test_missing_package_names_the_extra():
    """Red if a missing package ends in a bare ImportError, or the extra that brings it is not named."""
    with pytest.raises(ConfigError, match=r"no_such_package is not installed.*pip install 'pqn-eqx\[worlds\]'"):
        import_or_explain("no_such_package.worlds", extra="worlds")
    with pytest.raises(ConfigError, match=r"no_such_package is not installed.*--force-reinstall pqn-eqx$"):
        import_or_explain("no_such_package", extra=None)


def test_missing_dependency_of_a_package_is_named(tmp_path, monkeypatch):
    """Red if the package is called missing where it is one that it imports itself."""
    (tmp_path / "half_installed.py").write_text("import no_such_dependency.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="half_installed cannot be imported because no_such_dependency is missing"):
        import_or_explain("half_installed", extra="worlds")


def test_an_error_inside_the_package_keeps_its_traceback(tmp_path, monkeypatch):
    """Red if every failure of an import is reported as a missing package."""
    (tmp_path / "broken_package.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        import_or_explain("broken_package", extra=None)


def test_params_are_cast_to_the_type_of_their_default():
    """Red if a float reaches an integer parameter: shapes and comparisons of the environment would change."""
    params = with_params(Params(), {"max_timesteps": 30.0, "gravity": 3, "god_mode": 1.0})
    assert params == Params(max_timesteps=30, gravity=3.0, god_mode=True)
    assert (type(params.max_timesteps), type(params.gravity), type(params.god_mode)) == (int, float, bool)
    assert with_params(Params(), {}) == Params()
    assert with_params(Params(), {"gravity": 0.5}) == Params(gravity=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_timestep": 3}, r"no parameter 'max_timestep'. Did you mean max_timesteps\? .*gravity \(9.8\)"),
        ({"angles": 3}, "no parameter 'angles'"),
        ({"max_timesteps": 3.5}, "max_timesteps is of type int, got 3.5"),
        ({"god_mode": 0.5}, "god_mode is of type bool, got 0.5"),
        ({"gravity": math.nan}, "gravity is of type float, got nan"),
        ({"max_timesteps": math.inf}, "max_timesteps is of type int, got inf"),
        ({"max_timesteps": math.nan}, "max_timesteps is of type int, got nan"),
        ({"gravity": 1.0, "max_timesteps": 3.5}, "max_timesteps is of type int"),
    ],
)
def test_params_that_do_not_fit_are_refused(changes, message):
    """Red if a misspelt, fractional or endless parameter is dropped, truncated or ends in a traceback."""
    with pytest.raises(ConfigError, match=message):
        with_params(Params(), changes)
