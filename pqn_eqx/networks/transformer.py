"""A Transformer as memory: every step attends to the steps before it, of the same episode, in a sliding window.

GTrXL (arXiv 1910.06764), gates and order of its layers, on Transformer-XL (arXiv 1901.02860), memory and relative
positions. Letters of shapes: T steps of a window, L steps of memory, C = L + T steps of context, E size of the
embedding, H heads of D = E / H features.
"""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from pqn_eqx.config_groups import group_member
from pqn_eqx.errors import require, require_at_least
from pqn_eqx.networks.layers import Linear
from pqn_eqx.networks.memory import Memory
from pqn_eqx.networks.normalization import LayerNorm, standardize


def _lecun_normal(key: Key[Array, ""], shape: tuple[int, int]) -> Float[Array, "in out"]:
    return jax.nn.initializers.lecun_normal()(key, shape)


def sinusoids(distance: Float[Array, " J"], size: int) -> Float[Array, "J size"]:
    """[sin(d ω), cos(d ω)] of distances d, with frequencies ω from 1 down to 1 / 10000 (arXiv 1706.03762)."""
    angle = distance[:, None] * 10000.0 ** -(jnp.arange(0, size, 2, dtype=distance.dtype) / size)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=1)[:, :size]


def align(scores: Float[Array, "H T L+1"], num_context: int) -> Float[Array, "H T C"]:
    """Row t moved t places to the right, with zeros around: from "j-th oldest in sight" to "c-th of the context".

    Transformer-XL's trick: rows padded to C + 1 are read again as rows of C, and so move by one more place each.
    """
    num_heads, num_steps, num_distances = scores.shape
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, num_context + 1 - num_distances)))
    return padded.reshape(num_heads, -1)[:, : num_steps * num_context].reshape(num_heads, num_steps, num_context)


class Attention(eqx.Module):
    """Multi-head attention by content and distance (arXiv 1901.02860, section 3.3), after a layer normalisation.

    The weight of the step at distance d from a query is the softmax, over the steps in sight, of

        ((q + u)ᵀ k + (q + v)ᵀ r_d) / √D,   r_d = W_r [sin(d ω), cos(d ω)],

    with u and v learned, of their own for each head. Steps out of sight weigh exactly 0; a step always sees itself.

    Inputs come standardised (zero mean, unit variance), since no other property of theirs is read: of past steps that
    is what is kept. The layer normalisation's scale and shift are applied here.
    """

    norm: LayerNorm
    query: Float[Array, "E E"]
    key_value: Float[Array, "E 2*E"]
    position: Float[Array, "E E"]
    """W_r."""
    output: Float[Array, "E E"]
    content_bias: Float[Array, "H D"]
    """u."""
    position_bias: Float[Array, "H D"]
    """v."""

    def __init__(self, size: int, num_heads: int, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 4)
        self.norm = LayerNorm(size)
        self.query = _lecun_normal(keys[0], (size, size))
        self.key_value = _lecun_normal(keys[1], (size, 2 * size))
        self.position = _lecun_normal(keys[2], (size, size))
        self.output = _lecun_normal(keys[3], (size, size))
        self.content_bias = jnp.zeros((num_heads, size // num_heads))
        self.position_bias = jnp.zeros((num_heads, size // num_heads))

    def over_window(
        self, x: Float[Array, "T E"], memory: Float[Array, "L E"], in_sight: Bool[Array, "T C"]
    ) -> tuple[Float[Array, "T E"], Float[Array, "H T C"]]:
        """What T steps attend to, and the weights. The context is `memory`, oldest first, then the steps themselves."""
        context = jnp.concatenate([memory, x])
        keys, values = jnp.split(self._normalized(context) @ self.key_value, 2, axis=1)
        for_content, for_position = self._queries(x)
        scores = jnp.einsum("thd,chd->htc", for_content, self._by_head(keys))
        scores += align(self._position_scores(for_position, len(memory)), len(context))
        weights = jax.nn.softmax(jnp.where(in_sight, scores, -jnp.inf))
        attended = jnp.einsum("htc,chd->thd", weights, self._by_head(values))
        return attended.reshape(x.shape) @ self.output, weights

    def over_memory(
        self, x: Float[Array, " E"], memory: Float[Array, "L E"], in_sight: Bool[Array, " L+1"]
    ) -> Float[Array, " E"]:
        """`over_window` for one step.

        Neither keys nor values of the memory are formed: a query is taken back through the matrix of the keys, and
        that of the values is applied to the weighted mean of the inputs. That is 2 H L E multiplications where the
        keys and values alone would take 2 E L E.
        """
        memory_length, size = memory.shape
        key_matrix, value_matrix = jnp.moveaxis(self.key_value.reshape(size, 2, *self.content_bias.shape), 1, 0)
        for_content, for_position = self._queries(x[None])
        # The normalisation's shift adds the same to all scores of a query, so the softmax does not see it.
        backwards = jnp.einsum("hd,ehd->he", for_content[0], key_matrix) * self.norm.weight
        scores = jnp.concatenate([backwards @ memory.T, (backwards @ x)[:, None]], axis=1)
        scores += self._position_scores(for_position, memory_length)[:, 0]
        weights = jax.nn.softmax(jnp.where(in_sight, scores, -jnp.inf))
        pooled = self._normalized(weights[:, :-1] @ memory + weights[:, -1:] * x)
        return jnp.einsum("he,ehd->hd", pooled, value_matrix).reshape(size) @ self.output

    def _normalized(self, standardized: Float[Array, "*axes E"]) -> Float[Array, "*axes E"]:
        return standardized * self.norm.weight + self.norm.bias

    def _by_head(self, x: Float[Array, "T E"]) -> Float[Array, "T H D"]:
        return x.reshape(len(x), *self.content_bias.shape)

    def _queries(self, x: Float[Array, "T E"]) -> tuple[Float[Array, "T H D"], Float[Array, "T H D"]]:
        """(q + u) / √D and (q + v) / √D."""
        query = self._by_head(self._normalized(x) @ self.query)
        scale = self.content_bias.shape[1] ** -0.5
        return (query + self.content_bias) * scale, (query + self.position_bias) * scale

    def _position_scores(self, queries: Float[Array, "T H D"], memory_length: int) -> Float[Array, "H T L+1"]:
        """Of distances L, L - 1, ..., 0."""
        distance = jnp.arange(memory_length, -1, -1, dtype=queries.dtype)
        positions = self._by_head(sinusoids(distance, len(self.position)) @ self.position)
        return jnp.einsum("thd,jhd->htj", queries, positions)


class Gate(eqx.Module):
    """A gated recurrent unit in place of the sum x + y of a residual connection (arXiv 1910.06764, section 3.2).

    r = σ(W_r y + U_r x),  z = σ(W_z y + U_z x - b),  h = tanh(W_h y + U_h (r ⊙ x)),  g = (1 - z) ⊙ x + z ⊙ h.

    b starts above zero, so that a layer starts near the identity.
    """

    update: Float[Array, "E 3*E"]
    """W, of r, z and h."""
    stream: Float[Array, "E 2*E"]
    """U of r and z."""
    kept: Float[Array, "E E"]
    """U of h."""
    bias: Float[Array, " E"]

    def __init__(self, size: int, bias: float, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 3)
        self.update = _lecun_normal(keys[0], (size, 3 * size))
        self.stream = _lecun_normal(keys[1], (size, 2 * size))
        self.kept = _lecun_normal(keys[2], (size, size))
        self.bias = jnp.full(size, float(bias))

    def __call__(self, x: Float[Array, "*T E"], y: Float[Array, "*T E"]) -> Float[Array, "*T E"]:
        y_reset, y_move, y_new = jnp.split(y @ self.update, 3, axis=-1)
        x_reset, x_move = jnp.split(x @ self.stream, 2, axis=-1)
        reset, move = jax.nn.sigmoid(y_reset + x_reset), jax.nn.sigmoid(y_move + x_move - self.bias)
        new = jnp.tanh(y_new + (reset * x) @ self.kept)
        return (1 - move) * x + move * new


class Layer(eqx.Module):
    """Attention, then a feed-forward network; each reads a normalised input and is gated into the stream."""

    attention: Attention
    attention_gate: Gate
    norm: LayerNorm
    expand: Linear
    contract: Linear
    feedforward_gate: Gate

    def __init__(self, size: int, num_heads: int, feedforward_size: int, gate_bias: float, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 5)
        self.attention = Attention(size, num_heads, key=keys[0])
        self.attention_gate = Gate(size, gate_bias, key=keys[1])
        self.norm = LayerNorm(size)
        self.expand = Linear(size, feedforward_size, key=keys[2])
        self.contract = Linear(feedforward_size, size, key=keys[3])
        self.feedforward_gate = Gate(size, gate_bias, key=keys[4])

    def __call__(self, x: Float[Array, "*T E"], attended: Float[Array, "*T E"]) -> Float[Array, "*T E"]:
        """The stream after the layer, from the stream before it and what it attended to.

        Without the two outer ReLUs, linear maps would follow one another (arXiv 1910.06764, section 3.1).
        """
        x = self.attention_gate(x, jax.nn.relu(attended))
        y = self.contract(jax.nn.relu(self.expand(self.norm(x))))
        return self.feedforward_gate(x, jax.nn.relu(y))


class TransformerState(eqx.Module):
    """What the layers read at the last L steps."""

    inputs: tuple[Float[Array, "L E"], ...]
    """The standardised inputs of each layer, oldest first; zero before the present episode, and out of sight."""
    length: Int[Array, ""]
    """How many of the steps, the last ones, belong to the present episode."""


class Transformer(Memory):
    """A gated Transformer whose layers attend to the present step and the L before it, of the same episode.

    Through N layers an output depends on the last N L steps. No gradient flows into the state, as in Transformer-XL:
    within `unroll`, gradients reach back to its first step.

    All matrices start LeCun normal, of variance 1 / inputs, those of merged projections too; u, v and other biases
    start at zero, but for the gates'.
    """

    embed: Linear
    layers: tuple[Layer, ...]
    memory_length: int = eqx.field(static=True)
    num_features: int = eqx.field(static=True)

    def initial(self):
        inputs = tuple(jnp.zeros((self.memory_length, self.num_features)) for _ in self.layers)
        return TransformerState(inputs, jnp.zeros((), int))

    def step(self, state, features, reset):
        length = jnp.where(reset, 0, state.length)
        in_sight = jnp.arange(self.memory_length, -1, -1) <= length
        x, memories = self.embed(features), []
        for layer, memory in zip(self.layers, jax.lax.stop_gradient(state.inputs), strict=True):
            inputs = standardize(x)
            x = layer(x, layer.attention.over_memory(inputs, memory, in_sight))
            # A ring that writes one row is no faster: XLA copies it before the write.
            memories.append(jnp.concatenate([jnp.where(reset, 0, memory[1:]), inputs[None]]))
        return x, TransformerState(tuple(memories), jnp.minimum(length + 1, self.memory_length))

    def unroll(self, state, features, reset):
        x, state, _ = self._unroll(state, features, reset)
        return x, state

    def attention_weights(
        self, state: TransformerState, features: Float[Array, "T F"], reset: Bool[Array, " T"]
    ) -> Float[Array, "layers H T C"]:
        """What each layer, head and step of `unroll` attends to: the memory, oldest first, then the window."""
        return jnp.stack(self._unroll(state, features, reset)[2])

    def _unroll(self, state, features, reset):
        num_steps = len(reset)
        episode = self._episodes(state, reset)
        # A step sees, of the context, the L before it and itself, as far as they are of its episode.
        distance = self.memory_length + jnp.arange(num_steps)[:, None] - jnp.arange(len(episode))
        in_sight = (distance >= 0) & (distance <= self.memory_length)
        in_sight &= episode[self.memory_length :, None] == episode
        remembered = episode[num_steps:] == episode[-1]
        x, memories, weights = jax.vmap(self.embed)(features), [], []
        for layer, memory in zip(self.layers, jax.lax.stop_gradient(state.inputs), strict=True):
            inputs = standardize(x)
            attended, layer_weights = layer.attention.over_window(inputs, memory, in_sight)
            x = layer(x, attended)
            memories.append(jnp.where(remembered[:, None], jnp.concatenate([memory, inputs])[num_steps:], 0))
            weights.append(layer_weights)
        return x, TransformerState(tuple(memories), jnp.sum(remembered)), weights

    def _episodes(self, state: TransformerState, reset: Bool[Array, " T"]) -> Int[Array, " C"]:
        """The number of each step's episode in memory and window: 0 is that of the state, -1 any before it."""
        from_the_end = jnp.arange(self.memory_length, 0, -1)
        return jnp.concatenate([jnp.where(from_the_end <= state.length, 0, -1), jnp.cumsum(reset)])


@group_member("transformer")
@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A gated Transformer that attends to the past steps of the episode."""

    embed_size: int = 256
    """Length of the vectors that the layers exchange and return."""
    num_layers: int = 2
    """Layers one above the other."""
    num_heads: int = 8
    """Heads of attention; must divide embed_size."""
    memory_length: int = 128
    """Past steps that a layer attends to; each costs num_layers x embed_size numbers of state per environment."""
    feedforward_size: int = 256
    """Width of the hidden layer after each attention."""
    gate_bias: float = 2.0
    """How firmly the gates are closed at the start; 0 is half open."""

    def __post_init__(self):
        for field in ("embed_size", "num_layers", "num_heads", "memory_length", "feedforward_size"):
            require_at_least(1, **{f"network.memory.{field}": getattr(self, field)})
        require(
            self.embed_size % self.num_heads == 0,
            f"network.memory.num_heads must divide network.memory.embed_size, got {self.num_heads} heads for "
            f"{self.embed_size}. Change either, for example to {math.gcd(self.num_heads, self.embed_size)} heads.",
        )
        require(
            math.isfinite(self.gate_bias),
            f"network.memory.gate_bias must be a finite number, got {self.gate_bias}. The paper starts at 2.",
        )

    def build(self, num_features: int, *, key: Key[Array, ""]) -> Transformer:
        embed_key, *layer_keys = jax.random.split(key, self.num_layers + 1)
        layers = tuple(
            Layer(self.embed_size, self.num_heads, self.feedforward_size, self.gate_bias, key=layer_key)
            for layer_key in layer_keys
        )
        return Transformer(
            embed=Linear(num_features, self.embed_size, key=embed_key),
            layers=layers,
            memory_length=self.memory_length,
            num_features=self.embed_size,
        )
