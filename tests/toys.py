"""Hand-made worlds whose every number is known."""

import jax
import jax.numpy as jnp

from pqn_eqx.envs.base import Simulator
from pqn_eqx.networks.q_network import Inputs


def inputs(obs, last_action=0, last_reward=0.0, reset=False):
    """What a network is told at one step."""
    return Inputs(jnp.asarray(obs), jnp.asarray(last_action), jnp.asarray(last_reward), jnp.asarray(reset))


class Corridor(Simulator):
    """Walk right from cell 0, one cell a step, whatever the action. Reward 1 for action 1, 0 for action 0.

    The observation is one-hot over cells. The episode terminates on reaching `terminal`, is truncated after
    `time_limit` steps, and may do both at once. Its one extra is the cell. A new world remembers its key as `tag`,
    which tells who was reset, and from what.
    """

    name = "Corridor"
    num_actions = 2
    extra_names = ("cell",)

    def __init__(self, terminal: int = 4, time_limit: int = 100, num_cells: int = 8):
        self.terminal, self.time_limit, self.num_cells = terminal, time_limit, num_cells
        self.obs_shape = (num_cells,)

    def reset(self, key):
        state = {"cell": jnp.zeros((), int), "time": jnp.zeros((), int), "tag": jax.random.bits(key)}
        return state, self._obs(state)

    def step(self, key, state, action):
        state = {"cell": state["cell"] + 1, "time": state["time"] + 1, "tag": state["tag"]}
        terminated = state["cell"] == self.terminal
        truncated = state["time"] >= self.time_limit
        return state, self._obs(state), action.astype(float), terminated, truncated, state["cell"][None].astype(float)

    def _obs(self, state):
        return jax.nn.one_hot(state["cell"], self.num_cells)


class Noise(Simulator):
    """Random observations of any shape, two actions, rewards of 0 and 1, episodes of three steps."""

    name = "Noise"
    num_actions = 2

    def __init__(self, obs_shape: tuple[int, ...]):
        self.obs_shape, self.time_limit = obs_shape, 3

    def reset(self, key):
        return jnp.zeros((), int), jax.random.uniform(key, self.obs_shape)

    def step(self, key, state, action):
        state = state + 1
        obs, false = jax.random.uniform(key, self.obs_shape), jnp.zeros((), bool)
        return state, obs, action.astype(float), false, state >= 3, jnp.zeros(0)
