"""Which sequences make up the minibatches of an epoch."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key


def shuffled_minibatches(
    key: Key[Array, ""], blocks: Int[Array, " B"], num_sequences: int, sequences_per_env: int, num_minibatches: int
) -> Int[Array, "num_minibatches size"]:
    """The numbers of the sequences in each minibatch of an epoch.

    Sequences are numbered [T, N], as they lie in memory, with `sequences_per_env` as T; N splits into blocks of
    neighbours. Each block is shuffled by itself, with a key from its global number, and gives every minibatch as many
    sequences. So a minibatch is the same set however many devices hold the blocks.
    """
    num_envs = num_sequences // sequences_per_env
    block_envs = num_envs // len(blocks)

    def shuffled(block):
        order = jax.random.permutation(jax.random.fold_in(key, block), sequences_per_env * block_envs)
        time, env = order // block_envs, order % block_envs
        return (time * num_envs + env).reshape(num_minibatches, -1)

    first_env = jnp.arange(len(blocks)) * block_envs
    numbers = jax.vmap(shuffled)(blocks) + first_env[:, None, None]
    return jnp.swapaxes(numbers, 0, 1).reshape(num_minibatches, -1)
