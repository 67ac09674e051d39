"""Reset rules: who gets which world, bit for bit, and how many worlds are built."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pqn_eqx.envs.resets import FullReset, FullResetConfig, OptimisticReset, OptimisticResetConfig
from pqn_eqx.errors import ConfigError

# Programs that run for milliseconds: half the time to compile them matters more than their speed.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

BLOCK_SIZES = [1, 3, 64, None]


def make(key):
    """A world whose `tag` tells which key it was made from."""
    tag = jax.random.bits(key)
    return {"tag": tag, "map": (tag % 1000) * jnp.arange(1.0, 7.0).reshape(2, 3)}


def old_worlds(num_envs):
    """Worlds to be replaced, with a NaN that a blend by arithmetic would spread."""
    tag = jnp.arange(num_envs, dtype=jnp.uint32)
    return {"tag": tag, "map": jnp.full((num_envs, 2, 3), jnp.nan).at[:, 0].set(tag[:, None].astype(float))}


def keys_of(num_envs, seed=0):
    return jax.random.split(jax.random.key(seed), num_envs)


def apply(rule, done, keys):
    """The rule on old worlds, compiled; numpy results."""
    run = jit(lambda done, keys: rule(make, done, old_worlds(done.shape[0]), keys))
    return jax.tree.map(np.asarray, run(jnp.asarray(done), keys))


def assert_bitwise(actual, expected):
    for name in ("tag", "map"):
        assert np.asarray(actual[name]).tobytes() == np.asarray(expected[name]).tobytes(), name


def select(done, new, old):
    """What the full rule is defined to give."""
    done = np.asarray(done)
    return {name: np.where(done.reshape(-1, *[1] * (np.ndim(new[name]) - 1)), new[name], old[name]) for name in new}


def masks(num_envs):
    """None finished, all, only the first, only the last, and random ones."""
    random = np.random.default_rng(0).random((4, num_envs)) < np.array([[0.1], [0.4], [0.6], [0.9]])
    ends = np.zeros((2, num_envs), bool)
    ends[0, 0] = ends[1, -1] = True
    return [np.zeros(num_envs, bool), np.ones(num_envs, bool), *ends, *random]


@pytest.mark.parametrize(("num_envs", "block_size"), [*itertools.product([10], BLOCK_SIZES), (300, None), (1, None)])
def test_full_reset_gives_each_finished_environment_its_own_world(num_envs, block_size):
    """Red if a block is skipped, its padding is written, keys are mixed up or an unfinished world is touched."""
    keys = keys_of(num_envs)
    new, old = jax.vmap(make)(keys), old_worlds(num_envs)
    rule = jit(lambda done: FullReset(block_size)(make, done, old, keys))
    for done in masks(num_envs):
        assert_bitwise(rule(done), select(done, new, old))


@pytest.mark.parametrize(("block_size", "num_built"), [(1, 5), (3, 6), (64, 10), (None, 5)])
def test_worlds_are_built_for_finished_environments_only(block_size, num_built):
    """Red if worlds are built for everyone, or while nothing finished: 5 of 10 finished, in whole blocks."""
    built = []

    def counted(key):
        jax.debug.callback(lambda _: built.append(1), jax.random.bits(key))
        return make(key)

    rule = jit(lambda done: FullReset(block_size)(counted, done, old_worlds(10), keys_of(10)))
    for done, expected in ((jnp.zeros(10, bool), 0), (jnp.arange(10) % 2 == 0, num_built)):
        built.clear()
        jax.block_until_ready(rule(done))
        jax.effects_barrier()
        assert len(built) == expected


@pytest.mark.parametrize(("num_envs", "num_built"), [(255, 4), (384, 6)])
def test_default_block_is_one_environment_in_128(num_envs, num_built):
    """Red if the default block grows: four finished environments would build more worlds than they need."""
    built = []

    def counted(key):
        jax.debug.callback(lambda _: built.append(1), jax.random.bits(key))
        return make(key)

    done = jnp.arange(num_envs) < 4
    jax.block_until_ready(FullReset()(counted, done, old_worlds(num_envs), keys_of(num_envs)))
    jax.effects_barrier()
    assert len(built) == num_built


@pytest.mark.parametrize(("group_size", "ratio"), [(8, 2), (4, 1)])
def test_optimistic_reset_shares_nothing_while_fresh_worlds_suffice(group_size, ratio):
    """Red if a finished environment goes without a world of its own although its group may build one."""
    num_worlds, num_groups = group_size // ratio, 5
    keys, rng = keys_of(group_size * num_groups), np.random.default_rng(1)
    new, old = jax.vmap(make)(keys), old_worlds(group_size * num_groups)
    rule = jit(lambda done: OptimisticReset(group_size, ratio)(make, done, old, keys))
    for _ in range(5):
        done = np.zeros((num_groups, group_size), bool)
        for group, finished in enumerate([0, num_worlds, *rng.integers(0, num_worlds + 1, num_groups - 2)]):
            done[group, rng.permutation(group_size)[:finished]] = True
        assert_bitwise(rule(done.ravel()), select(done.ravel(), new, old))


@pytest.mark.parametrize(
    ("group_size", "ratio", "num_worlds", "block_size"),
    [(8, 4, 2, 1), (8, 4, 2, None), (8, 3, 2, 3), (6, 2, 3, 64), (4, 9, 1, 3)],
)
def test_optimistic_reset_deals_a_limited_number_of_whole_worlds(group_size, ratio, num_worlds, block_size):
    """Red if a group builds more or fewer worlds than it may, a copy mixes two worlds or crosses groups, the owner of
    a fresh world does not hold it, or an unfinished world is touched. A ratio beyond the group still builds one."""
    num_envs = 4 * group_size
    keys = keys_of(num_envs)
    new, old = jax.tree.map(np.asarray, jax.vmap(make)(keys)), old_worlds(num_envs)
    rule = jit(lambda done: OptimisticReset(group_size, ratio, block_size)(make, done, old, keys))
    for done in masks(num_envs):
        out = jax.tree.map(np.asarray, rule(done))
        source = np.arange(num_envs)
        for group in np.arange(num_envs).reshape(-1, group_size):
            finished = group[done[group]]
            owners = [i for i in finished if out["tag"][i] == new["tag"][i]]
            assert len(owners) == min(len(finished), num_worlds)
            for i in finished:
                (source[i],) = [j for j in owners if out["tag"][i] == new["tag"][j]]
        assert_bitwise(out, select(done, {name: leaf[source] for name, leaf in new.items()}, old))


def test_block_size_changes_no_world():
    """Red if the block size of the optimistic rule decides who shares with whom."""
    done, keys = masks(24)[-1], keys_of(24)
    first, other = [apply(OptimisticReset(8, 4, block_size), done, keys) for block_size in (3, 64)]
    assert_bitwise(other, first)


def test_groups_do_not_influence_each_other():
    """Red if a group fares differently alone, beside others, or beside others that finish otherwise."""
    rule, keys = OptimisticReset(8, 4), keys_of(24)
    done = np.arange(24) % 4 != 1
    together = apply(rule, done, keys)
    other_neighbours = apply(rule, np.where(np.arange(24) // 8 == 1, done, ~done), keys)
    alone = jit(lambda old: rule(make, jnp.asarray(done[8:16]), old, keys[8:16]))(
        jax.tree.map(lambda leaf: leaf[8:16], old_worlds(24))
    )
    middle = {name: leaf[8:16] for name, leaf in together.items()}
    assert_bitwise(alone, middle)
    assert_bitwise({name: leaf[8:16] for name, leaf in other_neighbours.items()}, middle)


def sources(out_tags, new_tags, group_size):
    """[groups, group_size]: the place in its group of the key that each environment's world was made from."""
    out, new = out_tags.reshape(-1, group_size), np.asarray(new_tags).reshape(-1, group_size)
    same = out[:, :, None] == new[:, None, :]
    return np.where(same.any(-1), same.argmax(-1), -1)


def dealt(finished, group_size, ratio, num_groups, seed):
    """`sources` of many groups in which the environments at the places `finished` ended."""
    keys = keys_of(num_groups * group_size, seed)
    done = np.tile(np.isin(np.arange(group_size), finished), num_groups)
    new = jax.vmap(jax.random.bits)(keys)
    rule = jit(lambda: OptimisticReset(group_size, ratio, 4096)(jax.random.bits, done, jnp.zeros_like(new), keys))
    return sources(np.asarray(rule()), new, group_size)


def test_who_gets_a_fresh_world_is_uniformly_random():
    """Red if the order of the environments favours some: all ten pairs of winners among five are equally likely."""
    finished = [0, 2, 3, 5, 7]
    place = dealt(finished, group_size=8, ratio=4, num_groups=3000, seed=3)
    wins = place == np.arange(8)
    assert wins.sum(axis=1).tolist() == [2] * 3000
    pairs = list(itertools.combinations(finished, 2))
    counts = [int((wins[:, a] & wins[:, b]).sum()) for a, b in pairs]
    assert sum(counts) == 3000
    assert stats.chisquare(counts).pvalue > 1e-3


def test_leftovers_are_dealt_uniformly_and_independently():
    """Red if leftovers all get the same world, take turns, or prefer the first of the four."""
    place = dealt([0, 1, 2, 3, 5, 6, 7], group_size=8, ratio=2, num_groups=4000, seed=4)
    joint = np.zeros((4, 4), int)
    for row in place:
        winners = [i for i in range(8) if row[i] == i]
        first, second, _ = [winners.index(row[i]) for i in (0, 1, 2, 3, 5, 6, 7) if row[i] != i]
        joint[first, second] += 1
    assert stats.chisquare(joint.ravel()).pvalue > 1e-3


def test_winning_says_nothing_about_the_world():
    """Red if the rule draws from the same random bits as the new world: then the worlds that win the draw are no
    sample of all worlds (every world would begin with a low number)."""

    def coins(key):
        derived = [key, *jax.random.split(key, 4), jax.random.fold_in(key, 7)]
        return jax.vmap(jax.random.bernoulli)(jnp.stack(derived))

    keys = keys_of(8 * 1000, seed=5)
    done, old = jnp.ones(len(keys), bool), jnp.zeros((len(keys), 6), bool)
    worlds = jit(lambda: OptimisticReset(8, 8, 8000)(coins, done, old, keys))()
    heads = np.asarray(worlds).reshape(1000, 8, 6)[:, 0].sum(axis=0)
    p_values = [stats.binomtest(int(count), 1000).pvalue for count in heads]
    assert min(p_values) > 1e-3, f"heads in 1000 throws, by the key of the coin: {heads.tolist()}"


def test_configs_build_their_rules():
    """Red if a field of a config does not reach its rule, or the group is not the member's environments."""
    assert FullResetConfig().build(64) == FullReset(None)
    assert FullResetConfig(block_size=2).build(64) == FullReset(2)
    assert OptimisticResetConfig().build(64) == OptimisticReset(64, 16, None)
    assert OptimisticResetConfig(ratio=4, block_size=2).build(32) == OptimisticReset(32, 4, 2)


@pytest.mark.parametrize("config", [FullResetConfig, OptimisticResetConfig])
@pytest.mark.parametrize("block_size", [0, -1])
def test_block_of_no_worlds_is_refused(config, block_size):
    """Red if a block size is accepted with which the loop never ends."""
    with pytest.raises(ConfigError, match=f"env.reset.block_size must be at least 1, got {block_size}"):
        config(block_size=block_size)


def test_ratio_below_one_is_refused():
    """Red if a group may build more worlds than it has environments."""
    with pytest.raises(ConfigError, match=r"env.reset.ratio must be at least 1, got 0"):
        OptimisticResetConfig(ratio=0)
