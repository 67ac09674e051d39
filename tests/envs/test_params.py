"""Changed parameters of environments: what is cast to what, and what is refused."""

import dataclasses
import math

import pytest

from pqn_eqx.envs.params import with_params
from pqn_eqx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Params:
    max_timesteps: int = 100
    gravity: float = 9.8
    god_mode: bool = False
    angles: tuple = (None, None)


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
