"""N copies of a simulator: what an episode's end shows, its statistics, and populations folded into N."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.envs.resets import FullReset, OptimisticReset
from pqn_eqx.envs.vectorized import VectorizedEnvironment, fold_members
from tests.toys import Corridor

# Programs that run for milliseconds: half the time to compile them matters more than their speed.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

MEMBERS, ENVS, STEPS = 3, 4, 6


def assert_trees_equal(actual, expected):
    """Bitwise, leaf by leaf; random keys by their data."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def start(env, cells, seed=0):
    """A state with its environments at `cells` of the corridor."""
    cells = jnp.asarray(cells)
    state, _ = env.reset(jax.random.split(jax.random.key(seed), cells.shape[0]))
    return eqx.tree_at(lambda state: (state.world["cell"], state.world["time"]), state, (cells, cells))


def walk(env, state, actions, seed=1):
    """One step for each row of `actions`; the last state, and the steps stacked to [T, N]."""
    keys = jax.random.split(jax.random.key(seed), actions.shape)
    return jit(lambda s: jax.lax.scan(lambda s, x: env.step(s, *x), s, (actions, keys)))(state)


def test_attributes_are_the_simulators():
    """Red if a network would be built for other observations or actions than the simulator has."""
    env = VectorizedEnvironment(Corridor(time_limit=7, num_cells=5), FullReset())
    assert (env.name, env.num_actions, env.obs_shape) == ("Corridor", 2, (5,))
    assert (env.time_limit, env.extra_names) == (7, ("cell",))


def test_obs_shows_the_reset_and_next_obs_never_does():
    """Red if `next_obs` is taken after the reset, or `obs` before it: two environments, one of them a cell ahead."""
    env = VectorizedEnvironment(Corridor(terminal=3), FullReset())
    state, steps = walk(env, start(env, [0, 1]), jnp.ones((5, 2), int))
    assert steps.next_obs.argmax(-1).tolist() == [[1, 2], [2, 3], [3, 1], [1, 2], [2, 3]]
    assert steps.obs.argmax(-1).tolist() == [[1, 2], [2, 0], [0, 1], [1, 2], [2, 0]]
    assert state.world["cell"].tolist() == [2, 0]
    assert steps.terminated.tolist() == [[False, False], [False, True], [True, False], [False, False], [False, True]]
    assert steps.done.tolist() == steps.terminated.tolist()
    assert not steps.truncated.any()
    assert steps.valid.all()
    # What belongs to the step that ended the episode is read before the reset.
    assert steps.extras[..., 0].tolist() == [[1, 2], [2, 3], [3, 1], [1, 2], [2, 3]]


def test_episode_statistics_are_whole_and_start_again():
    """Red if the last step's reward or the step itself is missing, or the next episode begins with the old sum."""
    env = VectorizedEnvironment(Corridor(terminal=3), FullReset())
    actions = jnp.array([[1, 0, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0, 1]]).T
    state, steps = walk(env, start(env, [0, 0]), actions)
    assert steps.reward.T.tolist() == [[1, 0, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0, 1]]
    assert steps.episode_return.T.tolist() == [[1, 1, 2, 1, 2, 3, 0], [0, 0, 1, 0, 0, 0, 1]]
    assert steps.episode_length.T.tolist() == [[1, 2, 3, 1, 2, 3, 1]] * 2
    assert (state.episode_return.tolist(), state.episode_length.tolist()) == ([0, 1], [1, 1])
    assert jnp.issubdtype(steps.episode_length.dtype, jnp.integer)


@pytest.mark.parametrize(
    ("terminal", "time_limit", "terminated", "truncated"),
    [(2, 9, [0, 1, 0], [0, 0, 0]), (9, 2, [0, 0, 0], [0, 1, 0]), (2, 2, [0, 1, 0], [0, 1, 0])],
)
def test_flags_are_passed_through(terminal, time_limit, terminated, truncated):
    """Red if one flag hides the other, or an episode goes on after either of them."""
    env = VectorizedEnvironment(Corridor(terminal=terminal, time_limit=time_limit, num_cells=10), FullReset())
    _, steps = walk(env, start(env, [0]), jnp.ones((3, 1), int))
    assert steps.terminated[:, 0].tolist() == terminated
    assert steps.truncated[:, 0].tolist() == truncated
    assert steps.done[:, 0].tolist() == [0, 1, 0]
    assert steps.obs[:, 0].argmax(-1).tolist() == [1, 0, 1]
    assert steps.episode_length[:, 0].tolist() == [1, 2, 1]


def test_new_worlds_come_from_the_environments_own_keys():
    """Red if a new world depends on another environment's key, or two of them get the same world."""
    env = VectorizedEnvironment(Corridor(terminal=1), FullReset())
    keys = jax.random.split(jax.random.key(3), ENVS)
    step = jit(env.step)
    tags = np.asarray(step(start(env, [0] * ENVS), jnp.zeros(ENVS, int), keys)[0].world["tag"])
    assert len(set(tags.tolist())) == ENVS
    permuted = step(start(env, [0] * ENVS), jnp.zeros(ENVS, int), keys[::-1])[0].world["tag"]
    assert permuted.tolist() == tags[::-1].tolist()
    other = step(start(env, [0] * ENVS), jnp.zeros(ENVS, int), jax.random.split(jax.random.key(4), ENVS))[0]
    assert not set(other.world["tag"].tolist()) & set(tags.tolist())


def test_step_and_new_world_have_different_keys():
    """Red if a new world is made from the key that moved the old one: what happens last would tell what comes next."""

    class KeyedCorridor(Corridor):
        def step(self, key, state, action):
            state, *others = super().step(key, state, action)
            return {**state, "tag": jax.random.bits(key)}, *others

    keys = jax.random.split(jax.random.key(3), ENVS)
    tags = []
    for terminal in (9, 1):
        env = VectorizedEnvironment(KeyedCorridor(terminal=terminal), FullReset())
        tags += env.step(start(env, [0] * ENVS), jnp.zeros(ENVS, int), keys)[0].world["tag"].tolist()
    assert len(set(tags) | set(jax.vmap(jax.random.bits)(keys).tolist())) == 3 * ENVS


@pytest.fixture(scope="module", params=[FullReset(), OptimisticReset(ENVS, 2)], ids=["full", "optimistic"])
def env(request):
    """Worlds that end after two steps. Under the optimistic rule two of them share a world where four end at once."""
    return VectorizedEnvironment(Corridor(terminal=2), request.param)


@pytest.fixture(scope="module")
def step_alone(env):
    return jit(env.step)


@pytest.fixture(scope="module")
def population(env):
    """States, actions and keys of MEMBERS members with ENVS environments: all end at once, some, and one."""
    cells = [[1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 1, 0]]
    states = [start(env, member, seed) for seed, member in enumerate(cells)]
    actions = jnp.arange(MEMBERS * ENVS).reshape(MEMBERS, ENVS) % 2
    keys = jax.random.split(jax.random.key(5), (MEMBERS, ENVS))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), actions, keys


def member(tree, *index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def test_step_of_a_population_equals_each_member_alone(env, step_alone, population):
    """Red if folding mixes up members, their keys or their groups: a member's run would depend on its neighbours."""
    together = jit(jax.vmap(env.step))(*population)
    for m in range(MEMBERS):
        assert_trees_equal(member(together, m), step_alone(*member(population, m)))
    tags = together[0].world["tag"][0]
    assert len(set(tags.tolist())) == (4 if isinstance(env.reset_rule, FullReset) else 2)


def test_population_in_a_scan_equals_each_member_alone(env, population):
    """Red if the batching rule is lost inside `lax.scan`, or a carry changes its type from step to step."""
    state, actions, keys = population
    keys = jax.vmap(jax.vmap(lambda key: jax.random.split(key, STEPS)))(keys)

    def run(state, actions, keys):
        return jax.lax.scan(lambda state, t: env.step(state, actions, keys[:, t]), state, jnp.arange(STEPS))

    together = jit(jax.vmap(run))(state, actions, keys)
    alone = jit(run)
    for m in range(MEMBERS):
        assert_trees_equal(member(together, m), alone(*member((state, actions, keys), m)))
    assert together[1].done.sum() == 36, "every environment ends three episodes of two steps"


@pytest.mark.parametrize("in_axes", [(None, 0, 0), (0, None, 0), (0, 0, None)], ids=["state", "action", "keys"])
def test_one_argument_shared_by_all_members(env, step_alone, population, in_axes):
    """Red if an argument without a member axis is folded as if it had one, or not repeated for every member."""
    args = [arg if axis == 0 else member(arg, 1) for arg, axis in zip(population, in_axes, strict=True)]
    together = jit(jax.vmap(env.step, in_axes))(*args)
    for m in range(MEMBERS):
        own = [member(arg, m) if axis == 0 else arg for arg, axis in zip(args, in_axes, strict=True)]
        assert_trees_equal(member(together, m), step_alone(*own))


def test_nested_populations_equal_each_member_alone(env, step_alone, population):
    """Red if a `vmap` over a `vmap` folds the axes in the wrong order."""
    outer = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), population)
    together = jit(jax.vmap(jax.vmap(env.step)))(*outer)
    for m in range(MEMBERS):
        alone = step_alone(*member(population, m))
        assert_trees_equal(member(together, 0, m), alone)
        assert_trees_equal(member(together, 1, MEMBERS - 1 - m), alone)


def test_fold_members_calls_the_function_once_on_all_rows():
    """Red if the function is batched after all (it sees N rows), or a row gets the key of another row."""
    rows = []

    def function(tree, keys):
        rows.append((tree["x"].shape, keys.shape))
        return {"draw": jax.vmap(jax.random.bits)(keys), "x": tree["x"] * 2}

    folded = fold_members(function)
    x = jnp.arange(MEMBERS * ENVS * 2).reshape(MEMBERS, ENVS, 2)
    keys = jax.random.split(jax.random.key(7), (MEMBERS, ENVS))
    out = jax.vmap(folded)({"x": x}, keys)
    assert rows[-1] == ((MEMBERS * ENVS, 2), (MEMBERS * ENVS,))
    expected = [[int(jax.random.bits(keys[m, n])) for n in range(ENVS)] for m in range(MEMBERS)]
    assert out["draw"].tolist() == expected
    assert out["x"].tolist() == (x * 2).tolist()
    shared = jax.vmap(folded, in_axes=(0, None))({"x": x}, keys[1])
    assert shared["draw"].tolist() == [expected[1]] * MEMBERS


class CostlyCorridor(Corridor):
    """A corridor whose new worlds cost a Cholesky factorisation, which nothing else in a step needs."""

    def reset(self, key):
        state, obs = super().reset(key)
        matrix = jnp.eye(3) * (2 + state["tag"] % 7)
        return {**state, "factor": jnp.linalg.cholesky(matrix)}, obs

    def step(self, key, state, action):
        new, *others = super().step(key, state, action)
        return {**new, "factor": state["factor"]}, *others


def computations(text):
    """The computations of a compiled program: name -> lines; the entry's name is ENTRY."""
    found, name = {}, None
    for line in text.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            name = "ENTRY" if line.startswith("ENTRY") else line.split()[0].lstrip("%")
            found[name] = []
        elif name is not None:
            found[name].append(line)
    return found


def reachable(found, roots, through_loops):
    """Names of the computations that `roots` run, with or without the bodies of their loops."""
    seen, pending = set(), list(roots)
    while pending:
        name = pending.pop()
        if name in found and name not in seen:
            seen.add(name)
            for line in found[name]:
                calls = line if through_loops else re.sub(r"body=%?[\w.\-]+", "", line)
                pending += re.findall(r"(?<==|[{ ])%([\w.\-]+)", calls)
    return seen


@pytest.mark.parametrize("rule", [FullReset(), OptimisticReset(ENVS, 2)], ids=["full", "optimistic"])
def test_worlds_of_a_population_are_made_in_a_loop_only(rule):
    """Red if a population of four turns the lazy loop into work on every step, or into a loop that makes one world
    for each member in every turn."""
    env = VectorizedEnvironment(CostlyCorridor(), rule)
    keys = jax.random.split(jax.random.key(0), (4, ENVS))
    state, _ = jax.vmap(env.reset)(keys)
    text = jit(jax.vmap(env.step)).lower(state, jnp.zeros((4, ENVS), int), keys).compile().as_text()
    found = computations(text)
    factorisations = [(name, line) for name, lines in found.items() for line in lines if "potrf" in line]
    assert len(factorisations) == 1
    (name, line), *_ = factorisations
    assert name not in reachable(found, ["ENTRY"], through_loops=False)
    assert name in reachable(found, ["ENTRY"], through_loops=True)
    assert "f32[1,3,3]" in line


def test_a_population_makes_as_many_worlds_as_episodes_ended():
    """Red if the members wait for the slowest one: [4, 2, 1, 0] ended are 7 worlds, not 4 turns of 4."""
    made = []

    class CountedCorridor(Corridor):
        def reset(self, key):
            jax.debug.callback(lambda _: made.append(1), jax.random.bits(key))
            return super().reset(key)

    env = VectorizedEnvironment(CountedCorridor(terminal=2), FullReset())
    cells = jnp.array([[1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
    keys = jax.random.split(jax.random.key(0), cells.shape)
    state, _ = jax.vmap(env.reset)(keys)
    state = eqx.tree_at(lambda state: state.world["cell"], state, cells)
    jax.effects_barrier()
    made.clear()
    _, steps = jit(jax.vmap(env.step))(state, jnp.zeros(cells.shape, int), keys)
    jax.effects_barrier()
    assert steps.done.sum(axis=1).tolist() == [4, 2, 1, 0]
    assert len(made) == 7
