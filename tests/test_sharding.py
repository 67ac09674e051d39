"""The mesh, what crosses devices, and what each of them holds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.programs import collectives, matrix_flops
from pqn_eqx.config import TrainConfig
from pqn_eqx.episodes import EvaluationConfig
from pqn_eqx.errors import ConfigError
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.q_network import QNetworkConfig
from pqn_eqx.networks.recurrent import GRUConfig
from pqn_eqx.pqn import PQNConfig
from pqn_eqx.sharding import (
    PER_ENV,
    PER_MEMBER,
    PER_MEMBER_AND_ENV,
    MeshConfig,
    blocks_here,
    describe,
    distribute,
    everywhere,
    make_mesh,
    place,
    place_own,
)


@pytest.mark.parametrize(
    ("members", "blocks", "evaluations", "devices", "expected"),
    [
        (1, 1, 128, 1, (1, 1)),
        (1, 8, 128, 8, (1, 8)),
        (1, 64, 128, 64, (1, 64)),
        # Members first where both use as many devices.
        (8, 8, 128, 8, (8, 1)),
        (4, 8, 128, 8, (4, 2)),
        # But not where environments use more of them.
        (3, 8, 128, 8, (1, 8)),
        (3, 2, 128, 8, (3, 2)),
        # Evaluation environments are split as well.
        (1, 8, 4, 8, (1, 4)),
        (1, 8, 3, 8, (1, 1)),
        (5, 1, 1, 4, (1, 1)),
        (24, 64, 128, 64, (8, 8)),
    ],
)
def test_default_mesh_uses_the_most_devices(members, blocks, evaluations, devices, expected):
    assert MeshConfig().shape(members, blocks, evaluations, devices) == expected


def test_explicit_mesh():
    assert MeshConfig(member=2).shape(4, 8, 128, 8) == (2, 4)
    assert MeshConfig(env=2).shape(4, 8, 128, 8) == (4, 2)
    assert MeshConfig(member=1, env=1).shape(4, 8, 128, 8) == (1, 1)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (MeshConfig(member=3), r"mesh.member must divide the number of members: 3 does not divide 4. Possible: \[1, 2"),
        (MeshConfig(env=3), r"mesh.env must divide num_env_blocks and eval.num_envs: 3 does not divide 8 and 128"),
        (MeshConfig(member=4, env=4), r"mesh needs 4 x 4 devices .* there are 8"),
    ],
)
def test_impossible_meshes_are_refused_with_the_numbers(mesh, message):
    with pytest.raises(ConfigError, match=message):
        mesh.shape(4, 8, 128, 8)


def test_describe_tells_what_is_not_used():
    assert describe(make_mesh(jax.devices()[:1])) == "1 cpu device (7 not used)"
    expected = "8 cpu devices: 2 along members x 4 along environments"
    assert describe(make_mesh(jax.devices(), 2)) == expected


def test_blocks_are_numbered_over_all_devices():
    """Red if every device called its first block 0."""
    mesh = make_mesh(jax.devices()[:8], 2)
    numbers = jax.jit(distribute(lambda x: blocks_here(8) + 0 * x[0], mesh, (PER_ENV,), PER_ENV))
    np.testing.assert_array_equal(numbers(jnp.zeros(4, int)), np.arange(8))


def test_place_and_everywhere_keep_the_numbers():
    mesh = make_mesh(jax.devices()[:8], 2)
    values = np.arange(32.0).reshape(4, 8)
    placed = place({"a": values}, mesh, PER_MEMBER_AND_ENV)
    np.testing.assert_array_equal(placed["a"], values)
    assert {shard.data.shape for shard in placed["a"].addressable_shards} == {(2, 2)}
    assert everywhere(mesh)(placed) is placed
    np.testing.assert_array_equal(place_own(np.asarray([3, 4]), mesh), np.tile([3, 4], (8, 1)))
    assert place(np.arange(4), mesh, PER_MEMBER).dtype == jnp.zeros((), int).dtype


def config(num_envs, num_blocks, network=None, **fields):
    return TrainConfig(
        total_timesteps=num_envs * 8 * 10,
        algorithm=PQNConfig(num_envs=num_envs, num_steps=8, num_minibatches=4, num_epochs=2, num_env_blocks=num_blocks),
        network=network or QNetworkConfig(MLPConfig(hidden_size=16), input_normalization="running"),
        eval=EvaluationConfig(num_envs=8, max_steps=8),
        **fields,
    )


RECURRENT = QNetworkConfig(MLPConfig(hidden_size=16), GRUConfig(hidden_size=8), input_normalization="running")


def compiled_update(config):
    return config.build().lower_update().compile()


@pytest.mark.parametrize("network", [None, RECURRENT], ids=["feed-forward", "recurrent"])
def test_one_reduction_crosses_devices_per_gradient_step(network):
    """In the compiled text: one in the loop over minibatches; for an update the metrics, and mean and variance of the
    observations. Nothing is gathered or exchanged.

    Red if the gradient of each parameter were reduced by itself, or a state lay on the wrong devices.
    """
    found = collectives(compiled_update(config(64, 8, network)).as_text())
    assert found == {"all-reduce": 1 + 1 + 2}


def test_members_exchange_nothing():
    """Red if members on different devices waited for each other."""
    found = collectives(compiled_update(config(64, 1, num_seeds=8)).as_text())
    assert found == {}


def test_what_a_device_holds_does_not_grow_with_their_number():
    """State and temporaries of a device, where devices and environments grow together from 1 to 8.

    Red if a state were copied to every device, or gathered on the way.
    """

    def bytes_per_device(num_devices):
        mesh = MeshConfig(env=num_devices)
        memory = compiled_update(config(64 * num_devices, num_devices, mesh=mesh)).memory_analysis()
        return np.asarray([memory.argument_size_in_bytes, memory.temp_size_in_bytes])

    np.testing.assert_allclose(bytes_per_device(8), bytes_per_device(1), rtol=0.05)


def test_first_state_is_made_where_it_lives():
    """Red if it were made on one device and sent from there: every device holds its share alone."""
    trainer = config(64, 8, num_seeds=2, mesh=MeshConfig(member=2, env=4)).build()
    state = trainer.programs.init(trainer.algorithms, trainer.init_keys, trainer.env_index)
    assert {shard.data.shape for shard in state.actors.current.inputs.obs.addressable_shards} == {(1, 16, 4)}
    assert {shard.data.shape[0] for shard in state.learner.network.head.layer.weight.addressable_shards} == {1}


def test_flops_are_counted_through_loops():
    """Two products of 2 x 4 x 3 x 5 operations in a loop of 6 turns, and one outside."""

    def function(a, b):
        def turn(carry, _):
            return carry + jnp.sum(a @ b) + jnp.sum(a @ b), None

        return jax.lax.scan(turn, jnp.zeros(()), None, length=6)[0] + jnp.sum(a @ b)

    jaxpr = jax.make_jaxpr(function)(jnp.zeros((4, 3)), jnp.zeros((3, 5)))
    assert matrix_flops(jaxpr.jaxpr) == (2 * 6 + 1) * 2 * 4 * 3 * 5


def test_collectives_are_counted_by_kind():
    text = "%a = f32[2] all-reduce(%x)\n%b = (f32[2], f32[3]) all-reduce-start(%x)\n%c = f32[4] all-gather(%x), dims"
    assert collectives(text) == {"all-reduce": 2, "all-gather": 1}


def test_updates_of_a_sharded_population_run():
    """Red if a mesh along both axes could be built and not run."""
    small = dataclasses.replace(config(16, 4, num_seeds=2), mesh=MeshConfig(member=2, env=4))
    outcome = small.build().run()
    assert outcome.status == "finished"
    assert outcome.num_members == 2
