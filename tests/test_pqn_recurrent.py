"""PQN with a memory: what learning is shown, the window of the past, and targets computed anew."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.envs.resets import FullReset
from pqn_eqx.envs.vectorized import VectorizedEnvironment
from pqn_eqx.errors import ConfigError
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.losses import HLGaussConfig, MSEConfig
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.normalization import split_statistics
from pqn_eqx.networks.q_network import QNetworkConfig
from pqn_eqx.networks.recurrent import GRUConfig, LSTMConfig
from pqn_eqx.optimizers import RAdamConfig
from pqn_eqx.population import map_members, stack_members
from pqn_eqx.pqn import PQNConfig
from pqn_eqx.rollout import rollout
from pqn_eqx.sharding import PER_ENV, REPLICATED, STATE_SPEC, TrainState, distribute, make_mesh
from tests.toys import Corridor

N, T, W = 4, 6, 3
# Episodes of 4 steps, one of 5 cut by a time limit: the windows start in the middle of them.
ENV = VectorizedEnvironment(Corridor(terminal=5, time_limit=4), FullReset())
NETWORK = QNetworkConfig(
    MLPConfig(hidden_size=8, num_layers=1), GRUConfig(hidden_size=8), add_last_action=True, add_last_reward=True
)
CONFIG = PQNConfig(num_envs=N, num_steps=T, num_minibatches=2, num_epochs=2, num_env_blocks=1, reward_scale=0.5)
STILL = {"learning_rate": 1e-30}
"""A step too small to change any parameter: what acting saw is what learning must see."""
ONE_MEMBER = TrainState(learner=REPLICATED, actors=PER_ENV)


def build(network=NETWORK, loss=MSEConfig(), **fields):  # noqa: B008
    config = dataclasses.replace(CONFIG, **fields)
    return config.build(ENV, network, loss, RAdamConfig(), EpsilonGreedyConfig(1.0, 1.0), total_timesteps=1200)


def on_devices(function, in_specs, out_specs, num_devices=1):
    return jax.jit(distribute(function, make_mesh(jax.devices()[:num_devices]), in_specs, out_specs))


def updates(algorithm, num_updates, num_devices=1, seed=0):
    init = on_devices(algorithm.init, (PER_ENV, REPLICATED), ONE_MEMBER, num_devices)
    update = on_devices(algorithm.update, (ONE_MEMBER,), (ONE_MEMBER, REPLICATED), num_devices)
    state, metrics = init(jnp.arange(N), jax.random.key(seed)), []
    for _ in range(num_updates):
        state, latest = update(state)
        metrics.append(latest.mean())
    return state, metrics


def next_sequences(algorithm, state):
    """What the next update will learn from, and the transitions it acts out."""
    learner, current = state.learner, state.actors.current

    @jax.jit
    def act(network, current, past):
        actors, transitions, _, _ = rollout(ENV, network, algorithm.loss, 1.0, current, jax.random.key(7), T)
        return algorithm.sequences(network, current.memory, past, transitions, actors), transitions

    return act(learner.network, current, state.actors.past)


def loss_of(algorithm, network, batch):
    return eqx.filter_jit(algorithm.minibatch_loss)(*split_statistics(network), batch)


def learned_values(algorithm, network, batch):
    """max_a Q of every step of the batch, as a gradient step computes it, from the state the batch starts in."""
    memory = eqx.filter_jit(algorithm._burnt_in)(network, batch)

    def unroll(memory, inputs):
        outputs, _, _ = network.unroll(memory, inputs, lambda x: x)
        return algorithm.loss.value(outputs).max(-1)

    return jax.jit(jax.vmap(unroll, in_axes=(0, 1), out_axes=1))(memory, batch.transitions.inputs)


GRU, LSTM = GRUConfig(8), LSTMConfig(8, num_layers=2)


@pytest.mark.parametrize(
    ("window", "use", "memory"),
    [
        pytest.param(0, "burn-in", LSTM, id="no-window"),
        pytest.param(W, "burn-in", LSTM, id="burn-in"),
        pytest.param(W, "train", GRU, id="train"),
        pytest.param(T, "burn-in", GRU, id="whole-burn-in"),
        pytest.param(T, "train", LSTM, id="whole-train"),
    ],
)
def test_learning_sees_what_acting_saw(window, use, memory):
    """With a network that does not change, unrolling the sequences gives the values of acting, in every step.

    Red if the state at the start of the window were that of another step, if the past were not what came before the
    window, or if memory, last action or last reward were reset by the wrong end.
    """
    algorithm = build(dataclasses.replace(NETWORK, memory=memory), memory_window=window, memory_window_use=use, **STILL)
    state, _ = updates(algorithm, 2)
    batch, transitions = next_sequences(algorithm, state)
    values = learned_values(algorithm, state.learner.network, batch)
    assert len(values) == T + (window if use == "train" else 0)
    np.testing.assert_allclose(values, batch.transitions.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(batch.transitions.value[-T:], transitions.value)
    if not window:
        assert state.actors.past is None
    else:
        # No more than the window is carried, and without what burn-in does not read.
        steps = state.actors.past.steps
        leaves = jax.tree.leaves(steps)
        assert all(leaf.shape[:2] == (N, window) for leaf in leaves)
        assert len(leaves) == (4 if use == "burn-in" else 11)


@pytest.mark.parametrize("use", ["burn-in", "train"])
def test_before_the_first_update_the_past_is_blank(use):
    """The first window's values, targets and costs are those without a past."""
    algorithm, without = build(memory_window=W, memory_window_use=use), build()
    batch, _ = next_sequences(algorithm, updates(algorithm, 0)[0])
    state = updates(without, 0)[0]
    expected, _ = next_sequences(without, state)
    np.testing.assert_array_equal(batch.transitions.inputs.obs[-T:], expected.transitions.inputs.obs)
    np.testing.assert_allclose(batch.targets[-T:], expected.targets, rtol=1e-6)
    loss, _ = loss_of(algorithm, state.learner.network, batch)
    whole, _ = loss_of(without, state.learner.network, expected)
    num_steps = len(batch.targets)
    assert loss * num_steps == pytest.approx(float(whole) * T, rel=1e-5)


def test_training_on_the_past_continues_its_returns():
    """The targets of window and past are the λ-returns of both as one: the last past step sees the whole window."""
    algorithm = build(memory_window=W, memory_window_use="train", **STILL)
    state, _ = updates(algorithm, 1)
    batch, _ = next_sequences(algorithm, state)
    after = batch.following
    last_value = jax.vmap(
        lambda memory, inputs: state.learner.network.step(memory, inputs)[0].max()
    )(next_actors(algorithm, state).memory, after)  # fmt: skip
    np.testing.assert_allclose(batch.targets, algorithm.targets(batch.transitions, last_value), rtol=1e-5)
    changed = eqx.tree_at(lambda t: t.reward, batch.transitions, batch.transitions.reward.at[W].add(1.0))
    moved = algorithm.targets(changed, last_value) - batch.targets
    open_episode = ~np.asarray(batch.transitions.terminated | batch.transitions.truncated)[W - 1]
    assert open_episode.any()
    np.testing.assert_array_equal(np.abs(moved[W - 1]) > 1e-3, open_episode)


def next_actors(algorithm, state):
    current = state.actors.current
    act = jax.jit(lambda network, current: rollout(ENV, network, algorithm.loss, 1.0, current, jax.random.key(7), T)[0])
    return act(state.learner.network, current)


@pytest.mark.parametrize(
    ("network", "loss"),
    [
        pytest.param(NETWORK, HLGaussConfig(-1, 1, 11), id="gru-hl-gauss"),
        pytest.param(QNetworkConfig(MLPConfig(8, 1)), MSEConfig(), id="feed-forward-mse"),
    ],
)
def test_targets_computed_anew_equal_those_of_acting_while_nothing_has_changed(network, loss):
    """Red if the value after the window, or the cut at its time limits, were lost when targets are recomputed."""
    once, anew = build(network, loss), build(network, loss, recompute_targets=True)
    state, _ = updates(anew, 0)
    batch, _ = next_sequences(anew, state)
    assert batch.transitions.truncated.any()
    assert batch.transitions.inputs.obs.shape[:2] == (T, N)
    flat, _ = next_sequences(once, state)
    expected, (_, metrics) = loss_of(once, state.learner.network, flat)
    got, (_, got_metrics) = loss_of(anew, state.learner.network, batch)
    assert got == pytest.approx(float(expected), rel=1e-5)
    assert got_metrics["td_error"] == pytest.approx(float(metrics["td_error"]), rel=1e-5)


def test_targets_computed_anew_follow_the_network():
    """Red if the field did nothing: with another network the recomputed targets differ from those of acting."""
    anew = build(recompute_targets=True)
    state, _ = updates(anew, 0)
    batch, _ = next_sequences(anew, state)
    other = eqx.tree_at(lambda n: n.head.layer.bias, state.learner.network, jnp.asarray([5.0, 5.0]))
    _, (_, metrics) = loss_of(anew, other, batch)
    frozen = build()
    _, (_, frozen_metrics) = loss_of(frozen, other, batch)
    assert frozen_metrics["td_error"] > metrics["td_error"] + 1


@pytest.mark.parametrize(("use", "recompute"), [("burn-in", False), ("train", True)])
def test_gradients_by_finite_differences(use, recompute):
    """Of a minibatch of sequences with a past, in float64, with the targets held; burn-in gives no gradient."""
    with jax.enable_x64(True):
        algorithm = build(memory_window=W, memory_window_use=use, recompute_targets=recompute)
        state, _ = updates(algorithm, 1)
        state = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, state)
        batch, _ = next_sequences(algorithm, state)
        network = state.learner.network
        held = build(memory_window=W, memory_window_use=use)
        if recompute:
            network_now = network
            extended = jax.tree.map(
                lambda a, b: jnp.concatenate([a, b[None]]), batch.transitions.inputs, batch.following
            )
            window = eqx.tree_at(lambda b: b.transitions.inputs, batch, extended)
            values = learned_values(algorithm, network_now, window)
            transitions = eqx.tree_at(lambda t: t.value, batch.transitions, values[:-1])
            batch_held = eqx.tree_at(lambda b: b.targets, batch, algorithm.targets(transitions, values[-1]))
        else:
            batch_held = batch
        if use == "burn-in":
            memory = held._burnt_in(network, batch_held)
            batch_held = dataclasses.replace(batch_held, memory=memory, burn_in=None)

        gradient = jax.jit(jax.grad(lambda network: loss_of(algorithm, network, batch)[0]))(network)
        cost = jax.jit(lambda network: loss_of(held, network, batch_held)[0])
        leaves, structure = jax.tree.flatten(network)
        keys = jax.random.split(jax.random.key(3), len(leaves))
        direction = structure.unflatten([jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
        step = 1e-6
        ahead, behind = (jax.tree.map(lambda p, d, s=s: p + s * step * d, network, direction) for s in (1, -1))
        slope = (cost(ahead) - cost(behind)) / (2 * step)
        products = jax.tree.map(lambda g, d: jnp.sum(g * d), gradient, direction)
        assert slope == pytest.approx(float(sum(jax.tree.leaves(products))), rel=1e-5)


NORMALIZED = dataclasses.replace(
    NETWORK, encoder=MLPConfig(8, 1, "batch-renorm"), input_normalization="running", memory=LSTMConfig(8)
)


@pytest.mark.parametrize("network", [NETWORK, NORMALIZED], ids=["plain", "normalized"])
def test_the_update_does_not_depend_on_the_number_of_devices(network):
    """One minibatch, so that shuffling cannot matter: parameters, statistics and metrics agree on 1, 2 and 4 devices.

    Red if running moments or batch moments were of one device's environments alone.
    """
    algorithm = build(network, num_minibatches=1, num_env_blocks=4, memory_window=W)
    (one, one_metrics), *others = (updates(algorithm, 2, n) for n in (1, 2, 4))
    for state, metrics in others:
        for x, y in zip(jax.tree.leaves(one.learner.network), jax.tree.leaves(state.learner.network), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)
        for name, value in one_metrics[-1].items():
            np.testing.assert_allclose(metrics[-1][name], value, rtol=1e-4, err_msg=name)


def test_statistics_move_by_measuring_alone():
    """Running moments are those of the observations; batch moments counted once a gradient step."""
    algorithm = build(NORMALIZED)
    state, _ = updates(algorithm, 3)
    network = state.learner.network
    assert network.input_norm.count == 3 * N * T
    # Cells 0 to 3 in turn, a quarter of the time each.
    np.testing.assert_allclose(network.input_norm.mean[:4], 0.25, atol=0.09)
    np.testing.assert_array_equal(network.input_norm.mean[4:], 0)
    assert network.encoder.layers[3].running.batches == 3 * CONFIG.num_minibatches * CONFIG.num_epochs


def test_a_member_of_a_population_is_the_run_alone():
    algorithm = build(NORMALIZED, memory_window=W, memory_window_use="train")
    keys = jnp.stack([jax.random.key(seed) for seed in (0, 1, 2)])

    def both(algorithms, keys, index):
        return map_members(lambda algorithm, key: algorithm.update(algorithm.init(index, key)), algorithms, keys)

    specs = (STATE_SPEC.learner, STATE_SPEC.learner, PER_ENV)
    together = on_devices(both, specs, (STATE_SPEC, STATE_SPEC.learner))
    population, _ = together(stack_members([algorithm] * 3), keys, jnp.arange(N))
    for member in range(3):
        alone, _ = updates(algorithm, 1, seed=member)
        networks = (population.learner.network, alone.learner.network)
        for x, y in zip(*map(jax.tree.leaves, networks), strict=True):
            np.testing.assert_allclose(x[member], y, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("fields", "network", "message"),
    [
        ({"memory_window": 7}, NETWORK, r"memory_window must lie in \[0, num_steps\], got 7 with num_steps 6"),
        ({"memory_window": 2}, QNetworkConfig(), r"memory_window 2 needs a network with a memory; choose one, such as"),
        ({"num_minibatches": 3}, NETWORK, r"num_minibatches must divide num_envs .* 3 does not divide 4. Divisors nea"),
        (
            {"num_minibatches": 3, "recompute_targets": True},
            QNetworkConfig(),
            r"num_minibatches must divide num_envs .* recompute_targets\): 3 does not divide 4",
        ),
    ],
)
def test_refuses_what_cannot_work(fields, network, message):
    with pytest.raises(ConfigError, match=message):
        build(network, **fields)
