"""Which sequences make up a minibatch: by hand, and however many devices hold the blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.minibatches import shuffled_minibatches

T, N = 3, 8
KEY = jax.random.key(0)


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_an_epoch_uses_every_sequence_once(num_blocks):
    """Red if a block were shuffled into another's environments, or a sequence drawn twice."""
    order = shuffled_minibatches(KEY, jnp.arange(num_blocks), T * N, T, num_minibatches=3)
    assert order.shape == (3, 8)
    np.testing.assert_array_equal(np.sort(np.ravel(order)), np.arange(T * N))


def test_every_minibatch_has_as_many_sequences_of_every_block():
    """Environments 0 to 3 are block 0, 4 to 7 block 1; sequence number = time x N + environment."""
    order = np.asarray(shuffled_minibatches(KEY, jnp.arange(2), T * N, T, num_minibatches=3))
    assert ((order % N < 4).sum(axis=1) == 4).all()
    # Time is mixed as well as environments: the first minibatch is not the first step.
    assert len(set(order[0] // N)) > 1


def test_devices_hold_the_same_minibatches_between_them():
    """Red if a block's order came from where it lies: blocks 2 and 3 alone are numbered from 0 there."""
    whole = np.asarray(shuffled_minibatches(KEY, jnp.arange(4), T * N, T, num_minibatches=3))
    first, second = (
        np.asarray(shuffled_minibatches(KEY, jnp.asarray(blocks), T * N // 2, T, num_minibatches=3))
        for blocks in ([0, 1], [2, 3])
    )
    for minibatch in range(3):
        here = {(i // 4, i % 4) for i in first[minibatch].tolist()}
        there = {(i // 4, i % 4 + 4) for i in second[minibatch].tolist()}
        assert here | there == {(i // N, i % N) for i in whole[minibatch].tolist()}


def test_blocks_are_shuffled_differently_and_so_are_epochs():
    """Red if all blocks, or all epochs, shared one order."""
    order = np.asarray(shuffled_minibatches(KEY, jnp.arange(2), 128, 8, num_minibatches=1))[0]
    blocks = [order[(order % 16 < 8) == (block == 0)] for block in range(2)]
    assert (blocks[0] != blocks[1] - 8).any()
    other = np.asarray(shuffled_minibatches(jax.random.key(1), jnp.arange(2), 128, 8, num_minibatches=1))[0]
    assert (order != other).any()
