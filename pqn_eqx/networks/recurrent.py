"""Recurrent memories: GRU, LSTM, and a linear recurrence that runs in parallel over time."""

import abc
import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from pqn_eqx.config_groups import group_member
from pqn_eqx.errors import require, require_at_least
from pqn_eqx.networks.layers import Linear
from pqn_eqx.networks.memory import Memory, MemoryState, stack


def _orthogonal_blocks(key: Key[Array, ""], size: int, num_blocks: int) -> Float[Array, "size blocks*size"]:
    keys = jax.random.split(key, num_blocks)
    return jnp.concatenate([jax.nn.initializers.orthogonal()(k, (size, size)) for k in keys], axis=1)


class Cell(Memory):
    """A cell whose gates read x W + b and h U: `input` is x ↦ x W + b, `recurrent` is U.

    Starts as flax.linen's cells do: W LeCun normal, U orthogonal for each gate, biases zero.
    """

    input: eqx.AbstractVar[Linear]
    recurrent: eqx.AbstractVar[Float[Array, "H G*H"]]
    own: eqx.AbstractVar[Any]
    """Further parameters of `update`."""

    @staticmethod
    @abc.abstractmethod
    def hidden(state: MemoryState) -> Float[Array, " H"]:
        """h, the part of the state that is returned and that the gates read."""

    @staticmethod
    @abc.abstractmethod
    def update(own: Any, state: MemoryState, x: Float[Array, " G*H"], h: Float[Array, " G*H"]) -> MemoryState:
        """The next state, from x W + b and h U."""

    def step(self, state, features, reset):
        hidden, state = scan_cell(type(self), self.recurrent, self.own, state, self.input(features)[None], reset[None])
        return hidden[0], state

    def unroll(self, state, features, reset):
        # The product with W does not wait for the state: one matrix product for all steps.
        return scan_cell(type(self), self.recurrent, self.own, state, jax.vmap(self.input)(features), reset)


def _scan(cell, recurrent, own, state, x, nudge, reset):
    """Hidden states after each step, the last state, and the hidden states before each step."""

    def step(state, inputs):
        x, nudge, reset = inputs
        state = jax.tree.map(lambda leaf: jnp.where(reset, 0, leaf), state)
        before = cell.hidden(state)
        product = before @ recurrent
        state = cell.update(own, state, x, product if nudge is None else product + nudge)
        return state, (cell.hidden(state), before)

    state, (after, before) = jax.lax.scan(step, state, (x, nudge, reset))
    return (after, state), before


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan_cell(
    cell: type[Cell],
    recurrent: Float[Array, "H G*H"],
    own: Any,
    state: MemoryState,
    x: Float[Array, "T G*H"],
    reset: Float[Array, " T"],
) -> tuple[Float[Array, "T H"], MemoryState]:
    """Hidden states after each of T steps, and the last state.

    The gradient in U is written out: dU = Σ_t h_{t-1}ᵀ d(h_{t-1} U), one matrix product after the backward scan, where
    JAX would add a product of the size of U to an accumulator in each of its steps. The d(h U) come from the backward
    scan as the gradient in an addend of zero.
    """
    return _scan(cell, recurrent, own, state, x, None, reset)[0]


def _scan_forward(cell, recurrent, own, state, x, reset):
    def run(own, state, x, nudge):
        return _scan(cell, recurrent, own, state, x, nudge, reset)

    nudge = jnp.zeros((x.shape[0], recurrent.shape[1]), x.dtype)
    outputs, pull_back, before = jax.vjp(run, own, state, x, nudge, has_aux=True)
    return outputs, (pull_back, before)


def _scan_backward(cell, residuals, gradient):
    pull_back, before = residuals
    own, state, x, product = pull_back(gradient)
    return jnp.einsum("th,tg->hg", before, product), own, state, x, None


scan_cell.defvjp(_scan_forward, _scan_backward)


class GRU(Cell):
    """The gated recurrent unit (arXiv 1406.1078), in the form of flax.linen.GRUCell.

    r = σ(W_r x + b_r + U_r h),  z = σ(W_z x + b_z + U_z h),  n = tanh(W_n x + b_n + r ⊙ (U_n h + c)),
    h' = (1 - z) ⊙ n + z ⊙ h.
    """

    input: Linear
    recurrent: Float[Array, "H 3*H"]
    own: Float[Array, " H"]
    """c, the bias within the reset gate's reach."""

    def __init__(self, num_inputs: int, hidden_size: int, *, key: Key[Array, ""]):
        input_key, recurrent_key = jax.random.split(key)
        self.input = Linear(num_inputs, 3 * hidden_size, key=input_key)
        self.recurrent = _orthogonal_blocks(recurrent_key, hidden_size, 3)
        self.own = jnp.zeros(hidden_size)

    def initial(self):
        return jnp.zeros(self.recurrent.shape[0])

    @staticmethod
    def hidden(state):
        return state

    @staticmethod
    def update(own, state, x, h):
        x_reset, x_keep, x_new = jnp.split(x, 3)
        h_reset, h_keep, h_new = jnp.split(h, 3)
        reset, keep = jax.nn.sigmoid(x_reset + h_reset), jax.nn.sigmoid(x_keep + h_keep)
        new = jnp.tanh(x_new + reset * (h_new + own))
        return (1 - keep) * new + keep * state


class LSTM(Cell):
    """Long short-term memory (Hochreiter and Schmidhuber 1997), in the form of flax.linen.OptimizedLSTMCell.

    i, f, o = σ(W x + b + U h),  g = tanh(W_g x + b_g + U_g h),  c' = f ⊙ c + i ⊙ g,  h' = o ⊙ tanh(c').
    """

    input: Linear
    recurrent: Float[Array, "H 4*H"]
    own: tuple[()]

    def __init__(self, num_inputs: int, hidden_size: int, *, key: Key[Array, ""]):
        input_key, recurrent_key = jax.random.split(key)
        self.input = Linear(num_inputs, 4 * hidden_size, key=input_key)
        self.recurrent = _orthogonal_blocks(recurrent_key, hidden_size, 4)
        self.own = ()

    def initial(self):
        hidden_size = self.recurrent.shape[0]
        return jnp.zeros(hidden_size), jnp.zeros(hidden_size)

    @staticmethod
    def hidden(state):
        return state[1]

    @staticmethod
    def update(own, state, x, h):
        write, keep, new, read = jnp.split(x + h, 4)
        cell = jax.nn.sigmoid(keep) * state[0] + jax.nn.sigmoid(write) * jnp.tanh(new)
        return cell, jax.nn.sigmoid(read) * jnp.tanh(cell)


class MinGRU(Memory):
    """The minimal GRU (arXiv 2410.01201, its plain form): a recurrence linear in h, so parallel over time.

    h_t = (1 - z_t) ⊙ h_{t-1} + z_t ⊙ h̃_t,  z_t = σ(W_z x_t + b_z),  h̃_t = W_h x_t + b_h.

    b_z starts at -log u with u uniform in [1, max_timescale]: units forget over 2 to about `max_timescale` steps
    (chrono initialisation, arXiv 1804.11188), where a zero bias would have all of them forget within two.
    """

    gate: Linear
    candidate: Linear

    def __init__(self, num_inputs: int, hidden_size: int, *, max_timescale: float, key: Key[Array, ""]):
        gate_key, candidate_key, time_key = jax.random.split(key, 3)
        times = jax.random.uniform(time_key, (hidden_size,), minval=1.0, maxval=max_timescale)
        gate = Linear(num_inputs, hidden_size, key=gate_key)
        self.gate = eqx.tree_at(lambda layer: layer.bias, gate, -jnp.log(times))
        self.candidate = Linear(num_inputs, hidden_size, key=candidate_key)

    def initial(self):
        return jnp.zeros(self.gate.bias.shape)

    def _coefficients(self, features, reset):
        """(a, b) of h ↦ a h + b for one step."""
        update = jax.nn.sigmoid(self.gate(features))
        return jnp.where(reset, 0, 1 - update), update * self.candidate(features)

    def step(self, state, features, reset):
        decay, addend = self._coefficients(features, reset)
        state = decay * state + addend
        return state, state

    def unroll(self, state, features, reset):
        def chain(first, second):
            return first[0] * second[0], second[0] * first[1] + second[1]

        decay, addend = jax.lax.associative_scan(chain, jax.vmap(self._coefficients)(features, reset))
        hidden = decay * state + addend
        return hidden, hidden[-1]


def _require_sizes(config) -> None:
    require_at_least(
        1, **{"network.memory.hidden_size": config.hidden_size, "network.memory.num_layers": config.num_layers}
    )


@group_member("gru")
@dataclasses.dataclass(frozen=True)
class GRUConfig:
    """Gated recurrent units."""

    hidden_size: int = 256
    """Length of the state."""
    num_layers: int = 1
    """Memories one above the other."""

    def __post_init__(self):
        _require_sizes(self)

    def build(self, num_features: int, *, key: Key[Array, ""]) -> Memory:
        return stack(GRU, self.num_layers, num_features, self.hidden_size, key)


@group_member("lstm")
@dataclasses.dataclass(frozen=True)
class LSTMConfig:
    """Long short-term memory."""

    hidden_size: int = 256
    """Length of the hidden state, and of the cell state."""
    num_layers: int = 1
    """Memories one above the other."""

    def __post_init__(self):
        _require_sizes(self)

    def build(self, num_features: int, *, key: Key[Array, ""]) -> Memory:
        return stack(LSTM, self.num_layers, num_features, self.hidden_size, key)


@group_member("min-gru")
@dataclasses.dataclass(frozen=True)
class MinGRUConfig:
    """The minimal GRU: a linear recurrence, parallel over time."""

    hidden_size: int = 256
    """Length of the state."""
    num_layers: int = 1
    """Memories one above the other."""
    max_timescale: float = 128.0
    """Steps over which the slowest units forget at the start of training."""

    def __post_init__(self):
        _require_sizes(self)
        require(
            1 <= self.max_timescale < float("inf"),
            f"network.memory.max_timescale must be a finite number of at least 1 step, got {self.max_timescale}.",
        )

    def build(self, num_features: int, *, key: Key[Array, ""]) -> Memory:
        return stack(
            partial(MinGRU, max_timescale=self.max_timescale), self.num_layers, num_features, self.hidden_size, key
        )
