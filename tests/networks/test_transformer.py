"""The Transformer against numpy and the papers' formulas; unrolling against stepping; what is in sight; gradients."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pqn_eqx.errors import ConfigError
from pqn_eqx.networks.transformer import Layer, TransformerConfig, TransformerState, sinusoids

F, E, H, L, N, T = 3, 8, 2, 4, 2, 16
CONFIG = TransformerConfig(embed_size=E, num_layers=N, num_heads=H, memory_length=L, feedforward_size=6)


def scrambled(tree, key=7, scale=0.5):
    """`tree` with noise on every leaf, so that no parameter is zero or one."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(key), len(leaves))
    noisy = [leaf + scale * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


FRESH = jax.jit(lambda key: CONFIG.build(F, key=key))(jax.random.key(0))
MODEL = jax.jit(scrambled)(FRESH)
ONE_LAYER = dataclasses.replace(MODEL, layers=MODEL.layers[:1])
FEATURES = jax.random.normal(jax.random.key(1), (T, F))
NO_RESET = np.zeros(T, bool)

unroll = eqx.filter_jit(MODEL.unroll)
step = eqx.filter_jit(MODEL.step)


def step_by_step(state, features, reset):
    outputs = []
    for x, first in zip(features, reset, strict=True):
        output, state = step(state, x, first)
        outputs.append(output)
    return jnp.stack(outputs), state


def after(num_steps, key=2):
    """The state after steps of some other features."""
    state = MODEL.initial()
    for x in jax.random.normal(jax.random.key(key), (num_steps, F)):
        _, state = step(state, x, np.False_)
    return state


def resets(*at, length=T):
    return np.isin(np.arange(length), at)


def assert_same(a, b, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def moved(outputs, others):
    """By how much the outputs of each step differ."""
    return np.max(np.abs(np.asarray(outputs) - np.asarray(others)), axis=-1)


@pytest.mark.parametrize("num_before", [0, 2, 7], ids=lambda n: f"{n}-before")
@pytest.mark.parametrize("num_steps", [2, L, 12])
@pytest.mark.parametrize("at", [(), (0,), (1,), (0, 1, 3, 8)], ids=str)
def test_unroll_equals_repeated_step(num_steps, num_before, at):
    """Outputs and states, for windows shorter and longer than the memory. Red for a memory moved by a step
    too many, a distance off by one, or a reset that one of both read late."""
    state, features, reset = after(num_before), FEATURES[:num_steps], resets(*at, length=num_steps)
    assert_same(unroll(state, features, reset), step_by_step(state, features, reset))


def test_windows_that_follow_each_other_equal_one():
    """Red if the state after `unroll` lacked a step, or counted steps of an earlier episode."""
    reset = resets(5, 9)
    together = unroll(after(3), FEATURES, reset)
    first, state = unroll(after(3), FEATURES[:12], reset[:12])
    assert state.length == 3
    second, state = unroll(state, FEATURES[12:14], reset[12:14])
    third, state = unroll(state, FEATURES[14:], reset[14:])
    assert_same(together, (jnp.concatenate([first, second, third]), state))


@pytest.mark.parametrize(("num_steps", "at"), [(4, 2), (T, 4)])
@pytest.mark.parametrize("run", [unroll, step_by_step], ids=["unroll", "step"])
def test_a_reset_in_the_middle_equals_two_sequences(run, num_steps, at):
    """States too. Red if a reset emptied the memory after, not before its observation, or emptied it in part, or if
    positions counted from the window's start."""
    features, no_reset = FEATURES[:num_steps], NO_RESET[:num_steps]
    together, last = run(after(7), features, resets(at, length=num_steps))
    first, _ = run(after(7), features[:at], no_reset[:at])
    second, last_of_second = run(MODEL.initial(), features[at:], no_reset[at:])
    assert_same((together, last), (jnp.concatenate([first, second]), last_of_second))
    assert last.length == min(L, num_steps - at)


def test_weights_are_those_of_the_steps_in_sight():
    """Exactly 0 across a start and beyond L steps, all above 0 within, rows of 1. Red for a mask that is only large,
    an episode numbered wrongly, or a window of L - 1 or L + 1 steps."""
    num_before, reset = 3, resets(2, 3, 9)
    weights = np.asarray(eqx.filter_jit(MODEL.attention_weights)(after(num_before), FEATURES, reset))
    assert weights.shape == (N, H, T, L + T)
    for t in range(T):
        start = max([first for first in np.flatnonzero(reset) if first <= t], default=-num_before)
        in_sight = [max(start, t - L) <= at <= t for at in range(-L, T)]
        assert (weights[:, :, t, in_sight] > 0).all()
        np.testing.assert_array_equal(weights[:, :, t, np.logical_not(in_sight)], 0)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize("run", [unroll, step_by_step], ids=["unroll", "step"])
def test_nothing_crosses_an_episode_start(run):
    """To the bit. Red if a masked step leaked, however little."""
    outputs, _ = run(after(7), FEATURES, resets(6))
    others, _ = run(after(7, key=5), FEATURES.at[:6].add(1), resets(6))
    assert (moved(outputs, others)[:6] > 1e-3).all()
    np.testing.assert_array_equal(outputs[6:], others[6:])


@pytest.mark.parametrize("run", [unroll, step_by_step], ids=["unroll", "step"])
def test_a_step_reaches_just_as_far_as_the_layers_together(run):
    """The step at 1 moves those from 1 to 1 + N L and no other, to the bit. Red for a look ahead, or a reach of less
    or more than L per layer."""
    outputs, _ = run(MODEL.initial(), FEATURES, NO_RESET)
    others, _ = run(MODEL.initial(), FEATURES.at[1].add(3), NO_RESET)
    reached = (np.arange(T) >= 1) & (np.arange(T) <= 1 + N * L)
    np.testing.assert_array_equal(moved(outputs, others) > 0, reached)


def test_outputs_do_not_depend_on_the_time_of_day():
    """A sequence three steps later, the window full in both. Red if positions were absolute, or those in the window."""
    outputs, _ = unroll(MODEL.initial(), FEATURES, NO_RESET)
    later, _ = unroll(after(5), jnp.concatenate([-FEATURES[:3], FEATURES[:-3]]), NO_RESET)
    np.testing.assert_allclose(later[N * L + 3 :], outputs[N * L : -3], rtol=1e-5, atol=1e-5)
    assert moved(later[3:], outputs[:-3])[0] > 1e-3


def test_environments_do_not_mix():
    """`vmap` over three of them, their memories filled differently, equals one by one."""
    states = [after(n) for n in (0, 2, 7)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    features = jax.random.normal(jax.random.key(3), (3, T, F))
    reset = np.stack([resets(3), resets(0, 5), NO_RESET])
    outputs, _ = eqx.filter_jit(eqx.filter_vmap(MODEL.unroll))(stacked, features, reset)
    first, _ = eqx.filter_jit(eqx.filter_vmap(MODEL.step))(stacked, features[:, 0], reset[:, 0])
    alone = jnp.stack([unroll(s, f, r)[0] for s, f, r in zip(states, features, reset, strict=True)])
    assert_same(outputs, alone)
    assert_same(first, alone[:, 0])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def layer_norm(norm, x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * norm.weight + norm.bias


def gru_gate(gate, x, y):
    """arXiv 1910.06764, section 3.2: "gated-recurrent-unit-type gating"."""
    w_r, w_z, w_g = np.split(gate.update, 3, axis=1)
    u_r, u_z = np.split(gate.stream, 2, axis=1)
    r = sigmoid(y @ w_r + x @ u_r)
    z = sigmoid(y @ w_z + x @ u_z - gate.bias)
    h = np.tanh(y @ w_g + (r * x) @ gate.kept)
    return (1 - z) * x + z * h


def last_output_by_the_papers(layer, stream):
    """One layer's output for the last of the L + 1 steps of `stream`, a head and a step of the past at a time."""
    attention, normed = layer.attention, layer_norm(layer.attention.norm, stream)
    heads, size = [], E // H
    for h in range(H):
        columns = slice(h * size, (h + 1) * size)
        w_q, w_kr = attention.query[:, columns], attention.position[:, columns]
        w_ke, w_v = (w[:, columns] for w in np.split(attention.key_value, 2, axis=1))
        u, v, q = attention.content_bias[h], attention.position_bias[h], normed[-1] @ w_q
        scores, values = [], []
        for distance, x in enumerate(normed[::-1]):
            angle = [distance / 10000 ** (2 * k / E) for k in range(E // 2)]
            k_r = np.concatenate([np.sin(angle), np.cos(angle)]) @ w_kr
            k_e = x @ w_ke
            scores.append((q @ k_e + q @ k_r + u @ k_e + v @ k_r) / np.sqrt(size))  # terms a, b, c, d
            values.append(x @ w_v)
        weights = np.exp(scores) / np.sum(np.exp(scores))
        heads.append(weights @ np.stack(values))
    y = gru_gate(layer.attention_gate, stream[-1], np.maximum(np.concatenate(heads) @ attention.output, 0))
    hidden = np.maximum(layer_norm(layer.norm, y) @ layer.expand.weight + layer.expand.bias, 0)
    return gru_gate(layer.feedforward_gate, y, np.maximum(hidden @ layer.contract.weight + layer.contract.bias, 0))


def test_a_layer_equals_the_papers_formulas():
    """In float64 numpy. Red for a norm, ReLU, gate, scale, position or u, v in the wrong place, for either path."""
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), ONE_LAYER)
    features = np.asarray(FEATURES[: L + 1], np.float64)
    expected = last_output_by_the_papers(exact.layers[0], features @ exact.embed.weight + exact.embed.bias)
    unrolled, _ = eqx.filter_jit(ONE_LAYER.unroll)(ONE_LAYER.initial(), FEATURES[: L + 1], NO_RESET[: L + 1])
    np.testing.assert_allclose(unrolled[-1], expected, rtol=1e-5, atol=1e-5)
    state, step = ONE_LAYER.initial(), eqx.filter_jit(ONE_LAYER.step)
    for x in FEATURES[: L + 1]:
        output, state = step(state, x, np.False_)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


def test_sinusoids_of_an_odd_size():
    """A size that cannot be halved loses one cosine, the slowest."""
    expected = [[0, 0, 1], [np.sin(2), np.sin(2 / 10000 ** (2 / 3)), np.cos(2)]]
    np.testing.assert_allclose(sinusoids(jnp.asarray([0.0, 2.0]), 3), expected, rtol=1e-5)


def cost(model, state, features):
    outputs, _ = model.unroll(state, features, resets(2, length=len(features)))
    return jnp.sum(jnp.sin(3 * outputs))


def test_gradients_by_finite_differences():
    """In parameters and features, in float64. Red if a gradient were stopped within the window."""
    with jax.enable_x64(True):
        model, features = jax.tree.map(lambda leaf: leaf.astype(float), (ONE_LAYER, FEATURES[:6]))
        inputs = jax.random.normal(jax.random.key(4), (L, E))
        state = TransformerState((inputs,), length=jnp.asarray(3))
        of_both = jax.jit(lambda model, features: cost(model, state, features))
        check_grads(of_both, (model, features), 1, ["rev"], rtol=1e-6, atol=1e-6, eps=1e-6)


def test_every_parameter_learns_and_the_memory_does_not():
    """From the start's values. Red for a parameter that is read nowhere, or a gradient into the state."""
    state = after(7)

    @jax.jit
    def gradients(model, inputs):
        return jax.grad(lambda m, i: cost(m, dataclasses.replace(state, inputs=i), FEATURES), (0, 1))(model, inputs)

    of_model, of_memory = gradients(FRESH, state.inputs)
    for path, leaf in jax.tree_util.tree_leaves_with_path(of_model):
        assert np.isfinite(leaf).all(), jax.tree_util.keystr(path)
        assert np.max(np.abs(leaf)) > 1e-5, jax.tree_util.keystr(path)
    for leaf in jax.tree.leaves(of_memory):
        np.testing.assert_array_equal(leaf, 0)


@functools.cache
def start(bias):
    """A layer of a usual size, at its start."""
    return jax.jit(lambda key: Layer(64, 4, 64, bias, key=key))(jax.random.key(0))


@pytest.mark.parametrize(("bias", "low", "high"), [(2, 0.35, 0.45), (8, 2e-3, 4e-3)])
def test_a_layer_starts_near_the_identity(bias, low, high):
    """By the share of the stream that it changes; half-open gates change 0.85. Red for a bias of the wrong sign."""
    layer = start(bias)
    stream, attended = jax.random.normal(jax.random.key(1), (2, 50, 64))
    change = jnp.linalg.norm(layer(stream, attended) - stream) / jnp.linalg.norm(stream)
    assert low < change < high


def test_matrices_start_lecun_normal():
    """Of variance 1 / inputs, merged ones too; an integer as the gates' bias does not make it one that cannot learn."""
    layer = start(2)
    for leaf in jax.tree.leaves(layer):
        if leaf.shape[0] == 64 and leaf.ndim == 2:
            np.testing.assert_allclose(np.std(leaf) * 8, 1, rtol=0.05)
    np.testing.assert_array_equal(layer.attention.content_bias, 0)
    np.testing.assert_array_equal(layer.attention.position_bias, 0)
    np.testing.assert_array_equal(layer.attention_gate.bias, np.full(64, 2, np.float32), strict=True)


@pytest.mark.parametrize("field", ["embed_size", "num_layers", "num_heads", "memory_length", "feedforward_size"])
def test_refuses_what_is_empty(field):
    with pytest.raises(ConfigError, match=f"network.memory.{field} must be at least 1, got 0"):
        TransformerConfig(**{field: 0})


def test_refuses_heads_that_do_not_divide_the_embedding():
    with pytest.raises(ConfigError, match="num_heads must divide .* got 6 heads for 256. Change .* example to 2 heads"):
        TransformerConfig(num_heads=6)


@pytest.mark.parametrize("bias", [float("inf"), float("nan")])
def test_refuses_a_gate_bias_that_is_no_number(bias):
    with pytest.raises(ConfigError, match="network.memory.gate_bias must be a finite number, got"):
        TransformerConfig(gate_bias=bias)
