"""Presets: named configurations to start from.

Where a summary names no tuning, the hyperparameters are purejaxql's for the same task. Two things differ from it
throughout: targets bootstrap from the observation at a time limit, and the last step of a recurrent window is
trained on.
"""

import dataclasses

from pqn_eqx.config import TrainConfig
from pqn_eqx.envs.craftax import CraftaxConfig
from pqn_eqx.envs.gymnax import GymnaxConfig
from pqn_eqx.episodes import EvaluationConfig
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.networks.convolutions import MinAtarCNNConfig
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.q_network import QNetworkConfig
from pqn_eqx.networks.recurrent import GRUConfig, LSTMConfig
from pqn_eqx.networks.transformer import TransformerConfig
from pqn_eqx.pqn import PQNConfig


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named starting point: what it is for, and its configuration."""

    summary: str
    config: TrainConfig


def _minatar(game: str) -> TrainConfig:
    """purejaxql's values for MinAtar; planes of 0 and 1 are not divided by 255."""
    return TrainConfig(
        name=f"minatar-{game.removesuffix('-MinAtar').lower()}",
        total_timesteps=10_000_000,
        env=GymnaxConfig(game),
        network=QNetworkConfig(MinAtarCNNConfig()),
        algorithm=PQNConfig(
            num_envs=128,
            num_steps=32,
            num_epochs=2,
            num_minibatches=32,
            learning_rate=5e-4,
            td_lambda=0.65,
            reward_scale=1.0,
        ),
        exploration=EpsilonGreedyConfig(finish=0.05, decay_fraction=0.1),
    )


CRAFTAX_CLASSIC = TrainConfig(
    name="craftax-classic",
    total_timesteps=1_000_000,
    env=CraftaxConfig("Craftax-Classic-Symbolic-v1"),
    network=QNetworkConfig(MLPConfig(hidden_size=512)),
    algorithm=PQNConfig(
        num_envs=128,
        num_steps=32,
        num_epochs=2,
        num_minibatches=16,
        learning_rate=5e-4,
        td_lambda=0.65,
        reward_scale=1.0,
    ),
    exploration=EpsilonGreedyConfig(start=1.0, finish=0.05, decay_fraction=0.2),
    eval=EvaluationConfig(num_envs=256),
)

CRAFTAX_RNN = TrainConfig(
    name="craftax-rnn",
    total_timesteps=1_000_000_000,
    env=CraftaxConfig("Craftax-Symbolic-v1"),
    network=QNetworkConfig(
        MLPConfig(hidden_size=512, num_layers=1),
        LSTMConfig(hidden_size=512),
        input_normalization="batch-renorm",
        add_last_action=True,
    ),
    algorithm=PQNConfig(
        num_envs=1024,
        num_steps=128,
        num_epochs=4,
        num_minibatches=4,
        learning_rate=3e-4,
        td_lambda=0.5,
        max_grad_norm=0.5,
        reward_scale=1.0,
    ),
    exploration=EpsilonGreedyConfig(start=1.0, finish=0.005, decay_fraction=0.1),
    eval=EvaluationConfig(max_steps=10_000),
)

PRESETS: dict[str, Preset] = {
    "cartpole": Preset(
        "CartPole-v1 to its top score in half a million steps: about a minute on two cores. The default.",
        TrainConfig(),
    ),
    "cartpole-rnn": Preset(
        "CartPole-v1 with a GRU, and a window of four past steps trained on again.",
        TrainConfig(
            name="cartpole-rnn",
            network=QNetworkConfig(memory=GRUConfig(), add_last_action=True),
            algorithm=PQNConfig(memory_window=4, memory_window_use="train"),
        ),
    ),
    "acrobot": Preset(
        "Acrobot-v1 in half a million steps; tuned.",
        TrainConfig(
            name="acrobot",
            env=GymnaxConfig("Acrobot-v1"),
            algorithm=PQNConfig(learning_rate=5e-4),
            exploration=EpsilonGreedyConfig(finish=0.05),
        ),
    ),
    "memory-chain": Preset(
        "MemoryChain-bsuite of length 32, which only a memory solves: a GRU.",
        TrainConfig(
            name="memory-chain",
            total_timesteps=200_000,
            env=GymnaxConfig("MemoryChain-bsuite", params={"memory_length": 32.0}),
            network=QNetworkConfig(memory=GRUConfig(), add_last_action=True),
            algorithm=PQNConfig(
                num_steps=128,
                learning_rate=1e-3,
                anneal_learning_rate=False,
                reward_scale=1.0,
                memory_window=4,
                memory_window_use="train",
            ),
            exploration=EpsilonGreedyConfig(finish=0.01, decay_fraction=0.1),
            eval=EvaluationConfig(num_envs=256),
        ),
    ),
    "minatar-asterix": Preset("MinAtar's Asterix, ten million steps.", _minatar("Asterix-MinAtar")),
    "minatar-breakout": Preset("MinAtar's Breakout.", _minatar("Breakout-MinAtar")),
    "minatar-freeway": Preset("MinAtar's Freeway.", _minatar("Freeway-MinAtar")),
    "minatar-space-invaders": Preset(
        "MinAtar's Space Invaders.",
        dataclasses.replace(_minatar("SpaceInvaders-MinAtar"), name="minatar-space-invaders"),
    ),
    "craftax-classic": Preset("Craftax-Classic from symbols, tuned for a million steps.", CRAFTAX_CLASSIC),
    "craftax-classic-rnn": Preset(
        "Craftax-Classic with a GRU, otherwise as craftax-classic.",
        dataclasses.replace(
            CRAFTAX_CLASSIC,
            name="craftax-classic-rnn",
            network=QNetworkConfig(
                MLPConfig(hidden_size=512, num_layers=1), GRUConfig(hidden_size=512), add_last_action=True
            ),
        ),
    ),
    "craftax": Preset(
        "Craftax from symbols, feed-forward, for a billion steps on an accelerator.",
        TrainConfig(
            name="craftax",
            total_timesteps=1_000_000_000,
            env=CraftaxConfig("Craftax-Symbolic-v1"),
            network=QNetworkConfig(MLPConfig(hidden_size=1024, num_layers=4)),
            algorithm=PQNConfig(
                num_envs=1024,
                num_steps=1,
                num_epochs=1,
                num_minibatches=1,
                td_lambda=0.0,
                max_grad_norm=1.0,
                reward_scale=1.0,
            ),
            exploration=EpsilonGreedyConfig(start=0.1, finish=0.005, decay_fraction=0.2),
            eval=EvaluationConfig(max_steps=10_000),
        ),
    ),
    "craftax-rnn": Preset("Craftax from symbols with an LSTM, for a billion steps on an accelerator.", CRAFTAX_RNN),
    "craftax-transformer": Preset(
        "Craftax with a gated Transformer over the last 128 steps; not tuned.",
        dataclasses.replace(
            CRAFTAX_RNN,
            name="craftax-transformer",
            network=dataclasses.replace(CRAFTAX_RNN.network, memory=TransformerConfig()),
        ),
    ),
}
