"""Memories against flax's cells and plain formulas; unrolling against stepping; resets; gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pqn_eqx.errors import ConfigError
from pqn_eqx.networks.memory import NoMemoryConfig
from pqn_eqx.networks.recurrent import GRU, LSTM, GRUConfig, LSTMConfig, MinGRU, MinGRUConfig

F, H, T = 5, 8, 7
MEMORIES = {
    "gru": GRUConfig(H),
    "lstm": LSTMConfig(H),
    "min-gru": MinGRUConfig(H),
    "gru-stack": GRUConfig(H, num_layers=2),
    "lstm-stack": LSTMConfig(H, num_layers=3),
    "min-gru-stack": MinGRUConfig(H, num_layers=2),
    "none": NoMemoryConfig(),
}
FEATURES = jax.random.normal(jax.random.key(1), (T, F))
RESET = jnp.asarray([0, 0, 1, 0, 0, 1, 0], bool)


@pytest.fixture(params=MEMORIES, ids=str)
def memory(request):
    return MEMORIES[request.param].build(F, key=jax.random.key(0))


def used(memory):
    """A state that is not the initial one."""
    return memory.unroll(memory.initial(), FEATURES, jnp.zeros(T, bool))[1]


def step_by_step(memory, state, features, reset):
    outputs = []
    for t in range(len(features)):
        output, state = memory.step(state, features[t], reset[t])
        outputs.append(output)
    return jnp.stack(outputs), state


def assert_same(a, b, **tolerances):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **{"rtol": 1e-5, "atol": 1e-6, **tolerances})


def test_unroll_equals_repeated_step(memory):
    """Red if one of both used the state, the reset or the order of layers in its own way."""
    assert_same(
        memory.unroll(used(memory), FEATURES, RESET), step_by_step(memory, used(memory), FEATURES, RESET), rtol=2e-5
    )


def test_a_reset_in_the_middle_equals_two_sequences(memory):
    """Red if the end that follows an observation, not the start it belongs to, emptied the memory."""
    reset = jnp.arange(T) == 3
    together, last = memory.unroll(used(memory), FEATURES, reset)
    first, _ = memory.unroll(used(memory), FEATURES[:3], jnp.zeros(3, bool))
    second, last_of_second = memory.unroll(memory.initial(), FEATURES[3:], jnp.zeros(T - 3, bool))
    assert_same((together, last), (jnp.concatenate([first, second]), last_of_second))


@pytest.mark.parametrize("name", [name for name in MEMORIES if name != "none"])
def test_the_past_matters_until_a_reset(name):
    memory = MEMORIES[name].build(F, key=jax.random.key(0))
    other = FEATURES.at[0].add(1)
    outputs, others = (memory.unroll(memory.initial(), f, RESET)[0] for f in (FEATURES, other))
    moved = jnp.max(jnp.abs(outputs - others), axis=1)
    assert (moved[:2] > 1e-4).all()
    np.testing.assert_array_equal(moved[2:], 0)


def test_gradients_by_finite_differences(memory):
    """In parameters, state and features; red for an error in the written-out gradient of the recurrent weights."""
    with jax.enable_x64(True):
        to_float64 = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float64), tree)  # noqa: E731

        def cost(memory, state, features):
            outputs, state = memory.unroll(state, features, RESET)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves((outputs, state)))

        arguments = to_float64((memory, used(memory), FEATURES))
        check_grads(cost, arguments, order=1, modes=["rev"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [GRU, LSTM])
def test_batches_give_the_gradients_of_their_members(kind):
    """The written-out gradient under `vmap`: that of a batch is the sum of its members'."""
    memory = kind(F, H, key=jax.random.key(0))
    features = jax.random.normal(jax.random.key(2), (3, T, F))

    def cost(memory, features):
        return jnp.sum(jnp.sin(memory.unroll(memory.initial(), features, RESET)[0]))

    together = jax.grad(lambda memory: jnp.sum(jax.vmap(cost, in_axes=(None, 0))(memory, features)))(memory)
    alone = [jax.grad(cost)(memory, f) for f in features]
    assert_same(together, jax.tree.map(lambda *leaves: sum(leaves), *alone))


@pytest.mark.parametrize(("kind", "gates"), [(GRU, "rzn"), (LSTM, "ifgo")])
def test_cells_equal_those_of_flax(kind, gates):
    """Red for a gate in another's place, or the reset gate on the wrong side of the product."""
    nn = pytest.importorskip("flax.linen")
    memory = kind(F, H, key=jax.random.key(0))
    bias = jax.random.normal(jax.random.key(3), memory.input.bias.shape)
    object.__setattr__(memory.input, "bias", bias)
    weights = {gate: [part[:, i * H : (i + 1) * H] for part in (memory.input.weight, memory.recurrent)]
               for i, gate in enumerate(gates)}  # fmt: skip
    biases = {gate: bias[i * H : (i + 1) * H] for i, gate in enumerate(gates)}
    if kind is LSTM:
        params = {f"i{gate}": {"kernel": weights[gate][0]} for gate in gates}
        params |= {f"h{gate}": {"kernel": weights[gate][1], "bias": biases[gate]} for gate in gates}
        cell, carry = nn.OptimizedLSTMCell(H), memory.initial()
    else:
        object.__setattr__(memory, "own", jax.random.normal(jax.random.key(4), (H,)))
        params = {f"i{gate}": {"kernel": weights[gate][0], "bias": biases[gate]} for gate in gates}
        params |= {f"h{gate}": {"kernel": weights[gate][1]} for gate in gates}
        params["hn"]["bias"] = memory.own
        cell, carry = nn.GRUCell(H), memory.initial()
    ours, _ = memory.unroll(memory.initial(), FEATURES, jnp.zeros(T, bool))
    for t in range(T):
        carry, output = cell.apply({"params": params}, carry, FEATURES[t])
        np.testing.assert_allclose(ours[t], output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [GRU, LSTM])
def test_recurrent_weights_start_orthogonal_for_each_gate(kind):
    memory = kind(F, H, key=jax.random.key(0))
    for gate in jnp.split(memory.recurrent, memory.recurrent.shape[1] // H, axis=1):
        np.testing.assert_allclose(gate.T @ gate, np.eye(H), atol=1e-5)


def test_min_gru_starts_with_the_timescales_it_is_given():
    """With no input, a unit of update gate 1/(1 + u) forgets over 1 + u steps, u in [1, max_timescale]."""
    memory = MinGRU(F, 1000, max_timescale=64.0, key=jax.random.key(0))
    update = np.asarray(jax.nn.sigmoid(memory.gate.bias))
    steps = 1 / update
    assert steps.min() >= 2 - 1e-5
    assert 60 < steps.max() <= 65.01
    assert steps.mean() == pytest.approx(1 + 32.5, rel=0.1)


def test_min_gru_by_hand():
    memory = MinGRUConfig(1).build(1, key=jax.random.key(0))
    object.__setattr__(memory.gate, "weight", jnp.zeros((1, 1)))
    object.__setattr__(memory.gate, "bias", jnp.asarray([-np.log(3.0)], jnp.float32))  # z = 1/4
    object.__setattr__(memory.candidate, "weight", jnp.ones((1, 1)))
    outputs, state = memory.unroll(jnp.asarray([8.0]), jnp.asarray([[0.0], [4.0], [4.0]]), jnp.asarray([0, 0, 1], bool))
    np.testing.assert_allclose(outputs[:, 0], [6, 5.5, 1], rtol=1e-6)
    np.testing.assert_allclose(state, [1], rtol=1e-6)


@pytest.mark.parametrize("config", [GRUConfig, LSTMConfig, MinGRUConfig])
@pytest.mark.parametrize("field", ["hidden_size", "num_layers"])
def test_refuses_empty_memories(config, field):
    with pytest.raises(ConfigError, match=f"network.memory.{field} must be at least 1, got 0"):
        config(**{field: 0})


def test_refuses_a_timescale_below_a_step():
    with pytest.raises(ConfigError, match="network.memory.max_timescale must be a finite number of at least 1 step"):
        MinGRUConfig(max_timescale=0.5)
