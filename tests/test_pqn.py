"""One update of PQN: its loss, gradients and steps, alone, in a population, and on several devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pqn_eqx.envs.gymnax import GymnaxConfig
from pqn_eqx.envs.resets import OptimisticResetConfig
from pqn_eqx.errors import ConfigError
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.losses import HuberConfig, MSEConfig
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.normalization import split_statistics
from pqn_eqx.networks.q_network import Inputs, QNetworkConfig
from pqn_eqx.networks.recurrent import GRUConfig
from pqn_eqx.optimizers import AdamConfig, RAdamConfig, SGDConfig
from pqn_eqx.population import map_members, stack_members
from pqn_eqx.pqn import PQNConfig, Sequences
from pqn_eqx.rollout import Transition
from pqn_eqx.sharding import PER_ENV, REPLICATED, STATE_SPEC, TrainState, distribute, make_mesh
from tests.toys import inputs

SMALL = PQNConfig(num_envs=8, num_steps=8, num_minibatches=4, num_epochs=2, num_env_blocks=8, learning_rate=1e-3)
NETWORK = QNetworkConfig(MLPConfig(hidden_size=16))
ENV = GymnaxConfig("CartPole-v1").build(1)


def build(config=SMALL, network=NETWORK, loss=MSEConfig(), optimizer=RAdamConfig(), env=ENV):  # noqa: B008
    return config.build(env, network, loss, optimizer, EpsilonGreedyConfig(finish=0.5), total_timesteps=6_400)


def on_devices(function, num_devices, in_specs, out_specs):
    return jax.jit(distribute(function, make_mesh(jax.devices()[:num_devices]), in_specs, out_specs))


# Of `build()` with seed 0: the first updates of a small CartPole run.
GOLDEN = [
    {"loss": 0.145702, "q_mean": 0.0647813, "td_error": 0.469265, "grad_norm": 2.39161},
    {
        "loss": 0.152912,
        "q_mean": -0.0485972,
        "td_error": 0.485466,
        "grad_norm": 3.04154,
        "episode_return": 14,
        "episode_length": 14,
    },
    {
        "loss": 0.177544,
        "q_mean": -0.046039,
        "td_error": 0.517221,
        "grad_norm": 3.29004,
        "episode_return": 19,
        "episode_length": 19,
    },
]

ONE_MEMBER = TrainState(learner=REPLICATED, actors=PER_ENV)


def updates(algorithm, num_updates, num_devices=1, seed=0, num_envs=8):
    """The state after `num_updates`, and the metrics of each."""
    init = on_devices(algorithm.init, num_devices, (PER_ENV, REPLICATED), ONE_MEMBER)
    update = on_devices(algorithm.update, num_devices, (ONE_MEMBER,), (ONE_MEMBER, REPLICATED))
    state, metrics = init(jnp.arange(num_envs), jax.random.key(seed)), []
    for _ in range(num_updates):
        state, latest = update(state)
        metrics.append(latest.mean())
    return state, metrics


@pytest.fixture(scope="module")
def three_updates():
    return updates(build(), 3)


def one_step_sequences(obs, action, target, valid=None):
    """B transitions as a feed-forward network learns from them."""
    number, no = jnp.zeros(target.shape), jnp.zeros(target.shape, bool)
    inputs = Inputs(obs, jnp.zeros(target.shape, int), number, no)
    valid = ~no if valid is None else valid
    transitions = Transition(inputs, jnp.asarray(action), number, no, no, valid, number, number)
    transitions, target = jax.tree.map(lambda leaf: leaf[None], (transitions, jnp.asarray(target)))
    return Sequences((), None, transitions, target, None)


def assert_trees_close(a, b, **tolerances):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, **tolerances)


def test_golden_metrics(three_updates):
    """The first updates of a small run. They may change only where the algorithm, a key or an initialisation does."""
    _, metrics = three_updates
    for update, expected in enumerate(GOLDEN):
        for name, value in expected.items():
            assert metrics[update][name] == pytest.approx(value, rel=1e-3), f"{name} of update {update}"


def test_reports_the_names_it_promises(three_updates):
    state, metrics = three_updates
    assert set(metrics[0]) == set(build().metric_names)
    assert int(state.learner.update) == 3


def test_learning_rate_and_epsilon_follow_their_schedules(three_updates):
    """Red if a schedule counted gradient steps, or were one update off. 100 updates; ε falls to 0.5 within 20."""
    _, metrics = three_updates
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], 1e-3 * np.array([1, 0.99, 0.98]), rtol=1e-5)
    np.testing.assert_allclose([m["epsilon"] for m in metrics], [1, 0.975, 0.95], rtol=1e-5)


@pytest.mark.parametrize("loss", [MSEConfig(), HuberConfig(0.5)], ids=["mse", "huber"])
def test_gradients_by_finite_differences(loss):
    """The gradient of a minibatch's loss along random directions, in float64."""
    with jax.enable_x64(True):
        algorithm = build(loss=loss)
        network = NETWORK.build((4,), 2, 1, key=jax.random.key(0))
        network = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), network)
        keys = jax.random.split(jax.random.key(1), 3)
        obs, target = jax.random.normal(keys[0], (16, 4)), jax.random.normal(keys[1], (16,)) * 3
        action, valid = jnp.arange(16) % 2, jnp.arange(16) != 3

        @jax.jit
        def cost(network):
            parameters, statistics = split_statistics(network)
            return algorithm.minibatch_loss(parameters, statistics, one_step_sequences(obs, action, target, valid))[0]

        gradient = jax.jit(jax.grad(cost))(network)
        leaves, structure = jax.tree.flatten(network)
        for seed in range(3):
            direction_keys = jax.random.split(jax.random.fold_in(keys[2], seed), len(leaves))
            direction = structure.unflatten(
                [jax.random.normal(k, leaf.shape) for k, leaf in zip(direction_keys, leaves, strict=True)]
            )
            step = 1e-6
            ahead, behind = (jax.tree.map(lambda p, d, s=s: p + s * step * d, network, direction) for s in (1, -1))
            slope = (cost(ahead) - cost(behind)) / (2 * step)
            products = jax.tree.map(lambda g, d: jnp.sum(g * d), gradient, direction)
            assert slope == pytest.approx(float(sum(jax.tree.leaves(products))), rel=1e-6)


def test_minibatch_loss_by_hand():
    """Chosen actions alone, half the square, invalid transitions out, mean over the whole minibatch."""
    algorithm = build()
    network = NETWORK.build((4,), 2, 1, key=jax.random.key(0))
    obs = jax.random.normal(jax.random.key(1), (4, 4))
    q = np.stack([network.step((), inputs(o))[0][:, 0] for o in obs])
    action, target = np.array([0, 1, 1, 0]), np.array([1.0, -1.0, 2.0, 500.0])
    valid = jnp.asarray([True, True, True, False])
    error = q[np.arange(4), action] - target
    batch = one_step_sequences(obs, action, target, valid)
    loss, (_, metrics) = algorithm.minibatch_loss(*split_statistics(network), batch)
    assert loss == pytest.approx(0.5 * np.sum(error[:3] ** 2) / 4, rel=1e-5)
    assert metrics["q_mean"] == pytest.approx(q[np.arange(4), action].mean(), rel=1e-4)
    assert metrics["td_error"] == pytest.approx(np.abs(error).mean(), rel=1e-5)


def test_gradients_are_clipped_by_their_global_norm():
    """Red for element-wise clipping: the direction stays, the length over all leaves is the limit."""
    algorithm = build(dataclasses.replace(SMALL, max_grad_norm=1.0), optimizer=SGDConfig())
    transformation = algorithm.transformation(jnp.asarray(1.0))
    for factor, norm in ((10.0, 1.0), (0.01, 0.05)):
        grads = {"a": factor * jnp.asarray([3.0]), "b": factor * jnp.asarray([[0.0, 4.0]])}
        steps, _ = transformation.update(grads, transformation.init(grads))
        assert optax.global_norm(steps) == pytest.approx(norm, rel=1e-5)
        np.testing.assert_allclose(steps["b"][0, 1] / steps["a"][0], 4 / 3, rtol=1e-5)


def test_every_transition_is_used_once_an_epoch():
    """With a step of 0 nothing changes between minibatches: the mean loss of an epoch is that of the window."""
    algorithm = build(dataclasses.replace(SMALL, num_epochs=1))
    state, _ = updates(algorithm, 0)
    network = state.learner.network
    obs = jax.random.normal(jax.random.key(5), (64, 4))
    window = one_step_sequences(obs, jnp.zeros(64, int), jnp.arange(64.0))
    learn = on_devices(
        lambda learner, window: algorithm.learn(learner, window, 0.0, jax.random.key(9))[2],
        1,
        (REPLICATED, REPLICATED),
        REPLICATED,
    )
    total, count = learn(state.learner, window)["loss"]
    whole, _ = algorithm.minibatch_loss(*split_statistics(network), window)
    assert total / count == pytest.approx(float(whole), rel=1e-5)


RECURRENT = QNetworkConfig(MLPConfig(hidden_size=16, num_layers=1), GRUConfig(hidden_size=8), add_last_action=True)


def normalized(network):
    return dataclasses.replace(network, input_normalization="running")


def for_devices(network, num_envs=16):
    """A run whose environments lie in 8 blocks, shuffled into 2 minibatches, with worlds shared within blocks."""
    env = GymnaxConfig("CartPole-v1", reset=OptimisticResetConfig(ratio=2)).build(num_envs // 8)
    config = dataclasses.replace(SMALL, num_envs=num_envs, num_minibatches=2, reward_scale=0.1)
    return build(config, normalized(network), env=env), num_envs


@pytest.mark.parametrize("network", [NETWORK, RECURRENT], ids=["feed-forward", "recurrent"])
def test_one_update_does_not_depend_on_the_number_of_devices(network):
    """Float32 on 1, 2 and 8 devices: parameters, statistics and metrics to 1e-5, actors with the same actions.

    Red if gradients were summed or reduced twice, minibatches mixed other steps, or a key came from the device.
    """
    algorithm, num_envs = for_devices(network)
    (one, (one_metrics,)), *others = (updates(algorithm, 1, n, num_envs=num_envs) for n in (1, 2, 8))
    for state, (metrics,) in others:
        assert_trees_close(one.learner, state.learner, rtol=1e-5, atol=1e-5)
        assert_trees_close(one.actors, state.actors, rtol=1e-5, atol=1e-5)
        for name, value in one_metrics.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("network", [NETWORK, RECURRENT], ids=["feed-forward", "recurrent"])
def test_twenty_updates_in_float64_do_not_depend_on_the_number_of_devices(network):
    """Float32 drifts with the order of sums; float64 has room: the same actions and episode ends, parameters to 1e-10.

    Red if a dtype were fixed anywhere on the way of the numbers.
    """
    with jax.enable_x64(True):
        algorithm, num_envs = for_devices(network)
        (one, one_metrics), *others = (updates(algorithm, 20, n, num_envs=num_envs) for n in (1, 2, 8))
        assert one.learner.network.head.layer.weight.dtype == jnp.float64
        assert np.isfinite([metrics["episode_return"] for metrics in one_metrics]).sum() >= 10
        for state, many_metrics in others:
            assert_trees_close(one.learner, state.learner, rtol=1e-10, atol=1e-10)
            np.testing.assert_array_equal(
                one.actors.current.inputs.last_action, state.actors.current.inputs.last_action
            )
            assert_trees_close(one.actors, state.actors, rtol=1e-9, atol=1e-9)
            for then, now in zip(one_metrics, many_metrics, strict=True):
                for name in ("episode_return", "episode_length"):
                    np.testing.assert_array_equal(then[name], now[name], err_msg=name)


def test_warm_up_raises_the_learning_rate_to_its_schedule():
    """Red if warm-up began at 0, lasted a step more, or went on above the schedule."""
    _, metrics = updates(build(dataclasses.replace(SMALL, warmup_updates=4)), 6)
    expected = 1e-3 * (1 - np.arange(6) / 100) * np.array([0.25, 0.5, 0.75, 1, 1, 1])
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], expected, rtol=1e-5)


@pytest.mark.parametrize("reset", [None, OptimisticResetConfig(ratio=4)], ids=["full", "optimistic"])
def test_a_member_of_a_population_is_the_run_alone(reset):
    """Red if members shared a key, a reset or a shuffle: one update to 1e-5, actors exactly."""
    env = ENV if reset is None else GymnaxConfig("CartPole-v1", reset=reset).build(1)
    algorithm = build(env=env)
    keys = jnp.stack([jax.random.key(seed) for seed in (0, 1, 2)])
    mesh = make_mesh(jax.devices()[:1])

    def both(algorithms, keys, index):
        def member(algorithm, key):
            return algorithm.update(algorithm.init(index, key))

        return map_members(member, algorithms, keys)

    specs = (STATE_SPEC.learner, STATE_SPEC.learner, PER_ENV)
    together = jax.jit(distribute(both, mesh, specs, (STATE_SPEC, STATE_SPEC.learner)))
    population, _ = together(stack_members([algorithm] * 3), keys, jnp.arange(8))
    for member in range(3):
        alone, _ = updates(algorithm, 1, seed=member)
        of_population = jax.tree.map(lambda leaf, m=member: leaf[m], population)
        assert_trees_close(of_population.learner, alone.learner, rtol=1e-5, atol=1e-6)
        assert_trees_close(of_population.actors, alone.actors, rtol=1e-6)


@pytest.mark.parametrize("optimizer", [AdamConfig(), SGDConfig(0.9)], ids=["adam", "sgd"])
@pytest.mark.parametrize("norm", ["rms", "none"])
def test_every_option_learns_something(optimizer, norm):
    """Each optimiser and normalisation runs, and changes the network."""
    network = QNetworkConfig(MLPConfig(hidden_size=16, normalization=norm))
    before, _ = updates(build(network=network, optimizer=optimizer, loss=HuberConfig()), 0)
    after, metrics = updates(build(network=network, optimizer=optimizer, loss=HuberConfig()), 1)
    assert np.isfinite(metrics[0]["loss"])
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), before.learner.network, after.learner.network)
    assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_envs": 0}, r"num_envs must be at least 1, got 0"),
        ({"num_minibatches": 7}, r"7 does not divide 32 x 64 = 2048. Divisors nearby: 2, 4, 8"),
        ({"num_env_blocks": 5}, r"num_env_blocks must divide num_envs: 5 does not divide 32. Divisors nearby: 2, 4, 8"),
        ({"warmup_updates": -1}, r"warmup_updates must be at least 0, got -1"),
        ({"learning_rate": -1e-4}, r"learning_rate must be a finite number above 0, got -0.0001"),
        ({"gamma": 1.5}, r"gamma must lie in \[0, 1\], got 1.5"),
        ({"td_lambda": float("nan")}, r"td_lambda must lie in \[0, 1\], got nan"),
    ],
)
def test_refuses_what_cannot_work(fields, message):
    with pytest.raises(ConfigError, match=message):
        PQNConfig(**fields)


@pytest.mark.parametrize(
    ("num_envs", "num_steps", "num_minibatches", "network", "expected"),
    [
        (32, 64, 16, NETWORK, 2),
        (32, 64, 16, RECURRENT, 2),
        (128, 32, 16, NETWORK, 8),
        (128, 32, 16, RECURRENT, 8),
        (128, 32, 64, RECURRENT, 2),
        (1024, 1, 1, NETWORK, 64),
        (204_800, 4, 16, NETWORK, 64),
        (8, 64, 4, NETWORK, 1),
        (36, 1, 12, NETWORK, 1),
    ],
)
def test_default_number_of_blocks(num_envs, num_steps, num_minibatches, network, expected):
    """Red if a default run could not use several devices, or had blocks that no minibatch can be taken from."""
    config = PQNConfig(num_envs=num_envs, num_steps=num_steps, num_minibatches=num_minibatches)
    blocks = config.blocks(network)
    assert blocks == expected
    dataclasses.replace(config, num_env_blocks=blocks).check(network)


def test_blocks_that_give_no_whole_minibatches_are_refused():
    with pytest.raises(ConfigError, match=r"16 does not divide 32 / 8 = 4. .* out of 1, 2, 4"):
        PQNConfig(num_env_blocks=8).check(RECURRENT)
