"""Every encoder with every memory, head and loss: one update of each, in small sizes.

By default a selection in which every memory meets every loss, and every encoder both heads; all of them with
``pytest -m slow``.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pqn_eqx.envs.resets import FullReset
from pqn_eqx.envs.vectorized import VectorizedEnvironment
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.losses import HLGaussConfig, HuberConfig, MSEConfig
from pqn_eqx.networks.convolutions import HadamaxCNNConfig, ImpalaCNNConfig, MinAtarCNNConfig, NatureCNNConfig
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.heads import DuelingHeadConfig, LinearHeadConfig
from pqn_eqx.networks.memory import NoMemoryConfig
from pqn_eqx.networks.normalization import split_statistics
from pqn_eqx.networks.q_network import QNetworkConfig
from pqn_eqx.networks.recurrent import GRUConfig, LSTMConfig, MinGRUConfig
from pqn_eqx.networks.symbolic import TileEncoderConfig
from pqn_eqx.networks.transformer import TransformerConfig
from pqn_eqx.optimizers import RAdamConfig
from pqn_eqx.pqn import PQNConfig
from pqn_eqx.sharding import PER_ENV, REPLICATED, distribute, make_mesh
from tests.toys import Noise

ENCODERS = {
    "mlp": (MLPConfig(8, 1), (5,)),
    "minatar-cnn": (MinAtarCNNConfig(channels=2, hidden_size=8), (5, 5, 2)),
    "nature-cnn": (NatureCNNConfig(hidden_size=8), (36, 36, 2)),
    "impala-cnn": (ImpalaCNNConfig(channels=(4,), hidden_size=8), (4, 4, 2)),
    "hadamax-cnn": (HadamaxCNNConfig(channels=4, hidden_size=8), (8, 8, 2)),
    "tiles": (TileEncoderConfig(layout="craftax-classic", hidden_size=8), (1345,)),
}
MEMORIES = {
    "none": NoMemoryConfig(),
    "gru": GRUConfig(8),
    "lstm": LSTMConfig(8),
    "min-gru": MinGRUConfig(8),
    "transformer": TransformerConfig(embed_size=8, num_layers=1, num_heads=2, memory_length=3, feedforward_size=8),
}
HEADS = {"linear": LinearHeadConfig(), "dueling": DuelingHeadConfig("layer")}
LOSSES = {"mse": MSEConfig(), "huber": HuberConfig(), "hl-gauss": HLGaussConfig(-1, 1, 5)}


def choose() -> list:
    """All combinations; those that show no new pair of memory and loss, or of encoder and head, are marked slow."""
    every = list(itertools.product(ENCODERS, MEMORIES, HEADS, LOSSES))
    shown = {c: {(c[1], c[3]), (c[0], c[2])} for c in every}
    missing, chosen = set().union(*shown.values()), set()
    while missing:
        best = max(every, key=lambda c: len(shown[c] & missing))
        chosen.add(best)
        missing -= shown[best]
    return [pytest.param(*c, marks=() if c in chosen else pytest.mark.slow, id="-".join(c)) for c in every]


@pytest.mark.parametrize(("encoder", "memory", "head", "loss"), choose())
def test_one_update(encoder, memory, head, loss):
    """Every parameter is moved by it, and nothing becomes infinite."""
    encoder, obs_shape = ENCODERS[encoder]
    env = VectorizedEnvironment(Noise(obs_shape), FullReset())
    network = QNetworkConfig(encoder, MEMORIES[memory], HEADS[head])
    config = PQNConfig(num_envs=2, num_steps=4, num_minibatches=1, num_epochs=1, learning_rate=0.1, reward_scale=1.0)
    algorithm = config.build(env, network, LOSSES[loss], RAdamConfig(), EpsilonGreedyConfig(), total_timesteps=80)

    def run(index, key):
        before = algorithm.init(index, key)
        after, metrics = algorithm.update(before)
        return before.learner.network, after.learner.network, metrics

    program = distribute(run, make_mesh(jax.devices()[:1]), (PER_ENV, REPLICATED), REPLICATED)
    before, after, metrics = jax.jit(program)(jnp.arange(2), jax.random.key(0))
    assert np.isfinite(metrics.mean()["loss"])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), *(split_statistics(n)[0] for n in (before, after)))
    for path, size in jax.tree_util.tree_leaves_with_path(moved):
        assert np.isfinite(size), path
        assert size > 0, path
