"""The adapter of Craftax, on Craftax-Classic: two compiled programs serve every test."""

import copy
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.envs.craftax import CraftaxConfig
from pqn_eqx.envs.resets import FullReset, FullResetConfig, OptimisticReset
from pqn_eqx.errors import ConfigError

# Programs that run for milliseconds: half the time to compile them matters more than their speed.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

NOOP, LEFT, DO = 0, 1, 5
GRASS, STONE, TREE, LAVA = 2, 4, 5, 14


@pytest.fixture(scope="module")
def world(craftax_classic):
    """A new world: its state and first observation."""
    return jit(craftax_classic.reset)(jax.random.key(0))


@pytest.fixture(scope="module")
def state(world):
    """The player on grass in a new world, walled in by stone: nothing comes near."""
    state, _ = world
    x, y = (int(i) for i in state.player_position)
    walled = state.map.at[x - 1 : x + 2, y - 1 : y + 2].set(STONE).at[x, y].set(GRASS)
    return state.replace(map=walled, player_direction=jnp.full_like(state.player_direction, LEFT))


@pytest.fixture(scope="module")
def step(craftax_classic):
    """One step. The time limit is an argument, so that one program serves all limits."""

    def step(state, action, max_timesteps):
        simulator = copy.copy(craftax_classic)
        simulator.params = craftax_classic.params.replace(max_timesteps=max_timesteps)
        return simulator.step(jax.random.key(1), state, action)

    compiled = jit(step)
    return lambda state, action=NOOP, limit=10000: compiled(state, jnp.array(action), jnp.array(limit))


def flags(results):
    """(terminated, truncated)"""
    _, _, _, terminated, truncated, _ = results
    assert (terminated.shape, terminated.dtype, truncated.shape, truncated.dtype) == ((), bool, (), bool)
    return bool(terminated), bool(truncated)


def achievements(craftax_classic, results):
    """Names of the extras that are 1; the others are 0."""
    extras = np.asarray(results[-1])
    assert set(extras.tolist()) <= {0.0, 1.0}
    return {name for name, extra in zip(craftax_classic.extra_names, extras, strict=True) if extra}


def here(state, block):
    """`state` with `block` under the player."""
    x, y = state.player_position
    return state.replace(map=state.map.at[x, y].set(block))


def left(state, block):
    """`state` with `block` in front of the player."""
    x, y = state.player_position
    return state.replace(map=state.map.at[x, y - 1].set(block))


def test_declared_numbers(craftax_classic):
    """Red if the adapter declares other sizes than Craftax-Classic has, or names achievements in another order than
    the state counts them."""
    assert (craftax_classic.num_actions, craftax_classic.obs_shape) == (17, (1345,))
    assert (craftax_classic.time_limit, craftax_classic.name) == (10000, "Craftax-Classic-Symbolic-v1")
    names = craftax_classic.extra_names
    assert (len(names), len(set(names))) == (22, 22)
    assert names[:3] == ("achievement/collect_wood", "achievement/place_table", "achievement/eat_cow")
    assert names[-1] == "achievement/make_iron_sword"


def test_shapes_and_types(world, step):
    """Red if shapes or types differ from the declared ones, or a step changes the types of the state."""
    state, obs = world
    new_state, new_obs, reward, terminated, truncated, extras = step(state)
    for seen in (obs, new_obs):
        assert (seen.shape, seen.dtype) == ((1345,), jnp.float32)
        assert np.isfinite(seen).all()
        assert float(seen.sum()) > 63, "one block at least in each of the 7 × 9 cells"
    assert (reward.shape, reward.dtype, float(reward)) == ((), jnp.float32, 0.0)
    assert (extras.shape, extras.dtype, float(extras.sum())) == ((22,), jnp.float32, 0.0)
    assert (bool(terminated), bool(truncated), int(new_state.timestep)) == (False, False, 1)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(new_state), jax.tree.leaves(state), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)


@pytest.mark.parametrize("end", ["health", "lava"])
def test_death_terminates(state, step, end):
    """Red if the end of the game is taken for a time limit: the value after death would be learned from."""
    dying = here(state, LAVA) if end == "lava" else state.replace(player_health=jnp.zeros_like(state.player_health))
    assert flags(step(state)) == (False, False)
    assert flags(step(dying)) == (True, False)


def test_time_limit_truncates_at_its_step(state, step):
    """Red if the time limit ends the game for good, comes a step early or late, or is Craftax's default."""
    seen = []
    for _ in range(3):
        state, *_ = results = step(state, limit=3)
        seen.append(flags(results))
    assert seen == [(False, False), (False, False), (False, True)]


def test_default_time_limit(state, step):
    """Red if the limit of 10000 steps is off by one."""
    assert flags(step(state.replace(timestep=jnp.full_like(state.timestep, 9998)))) == (False, False)
    assert flags(step(state.replace(timestep=jnp.full_like(state.timestep, 9999)))) == (False, True)


@pytest.mark.parametrize("end", ["health", "lava"])
def test_death_on_the_last_step_is_no_truncation(state, step, end):
    """Red if a death that falls on the time limit counts as a cut: the successor's value would be bootstrapped."""
    last = state.replace(timestep=jnp.full_like(state.timestep, 2))
    dying = here(last, LAVA) if end == "lava" else last.replace(player_health=jnp.zeros_like(state.player_health))
    assert flags(step(last, limit=3)) == (False, True)
    assert flags(step(dying, limit=3)) == (True, False)


def test_achievements_show_in_the_step_that_unlocks_them(craftax_classic, state, step):
    """Red if extras are those before the step, forget earlier ones, or are named in the wrong order: felling a tree
    collects wood."""
    results = step(left(state, TREE), DO)
    assert achievements(craftax_classic, results) == {"achievement/collect_wood"}
    assert float(results[2]) == 1.0
    assert int(results[0].inventory.wood) == 1

    earlier = left(state, TREE).replace(achievements=state.achievements.at[jnp.array([2, 21])].set(True))
    unlocked = {"achievement/eat_cow", "achievement/make_iron_sword"}
    assert achievements(craftax_classic, step(earlier)) == unlocked
    assert achievements(craftax_classic, step(earlier, DO)) == {"achievement/collect_wood", *unlocked}


def test_achievements_survive_in_the_step_that_ends_the_episode(craftax_classic, state, step):
    """Red if extras are emptied where they are read: at the end."""
    dying = left(state, TREE).replace(player_health=jnp.zeros_like(state.player_health))
    results = step(dying, DO)
    assert flags(results) == (True, False)
    assert achievements(craftax_classic, results) == {"achievement/collect_wood"}


def test_config_reaches_the_simulator_and_the_rule(monkeypatch):
    """Red if parameters or the reset rule of the config are dropped, or resets are shared where that is not asked."""
    config = CraftaxConfig(name="Craftax-Classic-Symbolic-v1", params={"max_timesteps": 3.0, "spawn_cow_chance": 0})
    env = config.build(32)
    assert env.time_limit == 3
    params = env.simulator.params
    assert (params.max_timesteps, params.spawn_cow_chance, params.day_length) == (3, 0.0, 300)
    assert (type(params.max_timesteps), type(params.spawn_cow_chance)) == (int, float)
    assert env.reset_rule == OptimisticReset(32, 16)

    simulator = env.simulator
    monkeypatch.setattr(CraftaxConfig, "simulator", lambda self: simulator)
    assert CraftaxConfig(reset=FullResetConfig(block_size=2)).build(32).reset_rule == FullReset(2)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_timestep": 3}, r"no parameter 'max_timestep'. Did you mean max_timesteps\?"),
        ({"max_timesteps": 3.5}, "max_timesteps is of type int, got 3.5"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(params, message):
    """Red if a misspelt parameter of Craftax is dropped silently."""
    with pytest.raises(ConfigError, match=message):
        CraftaxConfig(name="Craftax-Classic-Symbolic-v1", params=params).simulator()


@pytest.mark.parametrize("name", ["Craftax-Symbolic-v1", "Craftax-Classic-Pixels-v1"])
def test_missing_craftax_names_its_extra(monkeypatch, name):
    """Red if an installation without Craftax ends in a bare ImportError, or does not say what to install."""
    for module in [module for module in sys.modules if module.partition(".")[0] == "craftax"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "craftax", None)
    with pytest.raises(ConfigError, match=r"the package craftax is not installed.*pip install 'pqn-eqx\[craftax\]'"):
        CraftaxConfig(name=name).build(1)
