"""Configurations as JSON and back."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from pqn_eqx.checkpoint import CheckpointConfig
from pqn_eqx.config import TrainConfig
from pqn_eqx.envs.craftax import CraftaxConfig
from pqn_eqx.envs.gymnax import GymnaxConfig
from pqn_eqx.envs.resets import FullResetConfig, OptimisticResetConfig
from pqn_eqx.episodes import EvaluationConfig
from pqn_eqx.errors import ConfigError
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.hosts import HostsConfig
from pqn_eqx.losses import HLGaussConfig, HuberConfig
from pqn_eqx.networks.convolutions import HadamaxCNNConfig, ImpalaCNNConfig, MinAtarCNNConfig, NatureCNNConfig
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.heads import DuelingHeadConfig, LinearHeadConfig
from pqn_eqx.networks.q_network import QNetworkConfig
from pqn_eqx.networks.recurrent import GRUConfig, LSTMConfig, MinGRUConfig
from pqn_eqx.networks.symbolic import TileEncoderConfig
from pqn_eqx.networks.transformer import TransformerConfig
from pqn_eqx.optimizers import AdamConfig, SGDConfig
from pqn_eqx.pqn import PQNConfig
from pqn_eqx.presets import PRESETS
from pqn_eqx.scaling import ScalingRulesConfig
from pqn_eqx.serialization import config_from_dict, config_to_dict, load_config
from pqn_eqx.sharding import MeshConfig
from pqn_eqx.sweep import ExplorationSweep, LossSweep, SweepConfig
from pqn_eqx.wandb_logger import WandbConfig

CONFIGS = {name: preset.config for name, preset in PRESETS.items()} | {
    "huber": TrainConfig(loss=HuberConfig(delta=2.5)),
    "adam": TrainConfig(optimizer=AdamConfig(b1=0.8, b2=0.99, eps=1e-5)),
    "sgd": TrainConfig(optimizer=SGDConfig(momentum=0.9)),
    "optimistic resets": TrainConfig(env=GymnaxConfig(reset=OptimisticResetConfig(ratio=4, block_size=2))),
    "full resets of craftax": TrainConfig(env=CraftaxConfig(reset=FullResetConfig(block_size=3))),
    "parameters": TrainConfig(
        env=GymnaxConfig("DeepSea-bsuite", params={"max_steps_in_episode": 100.0, "x": -0.5}, options={"size": 16.0})
    ),
    "run_dir": TrainConfig(run_dir=Path("some/run dir"), name="a name"),
    "zipped": TrainConfig(sweep=SweepConfig(gamma=(0.9, 0.99), td_lambda=(0.1, 0.2)), sweep_zip=True),
    "sampled": TrainConfig(
        loss=HLGaussConfig(),
        sweep=SweepConfig(
            learning_rate=(1e-4, 1e-3),
            max_grad_norm=(1.0, 10.0),
            reward_scale=(0.1, 1.0),
            exploration=ExplorationSweep(start=(0.5, 1.0), finish=(0.0, 0.2), decay_fraction=(0.1, 0.5)),
            loss=LossSweep(v_min=(-3.0, -1.0), v_max=(1.0, 3.0), sigma_ratio=(0.5, 1.0)),
        ),
        sweep_samples=3,
    ),
    "swept": TrainConfig(loss=HuberConfig(), sweep=SweepConfig(loss=LossSweep(delta=(0.5, 1.0)))),
    "scaled": TrainConfig(scaling=ScalingRulesConfig(64, "num-minibatches", 1.0, 32, "updates", 5)),
    "everything else": TrainConfig(
        total_timesteps=10**10,
        members_per_group=2,
        mesh=MeshConfig(member=3, env=1),
        hosts=HostsConfig("host:1234", 2, 1, 60),
        wandb=WandbConfig("offline", "a project", "a team", "a group", ("a", "b")),
        seed=2**31 - 5,
        num_seeds=3,
        algorithm=PQNConfig(
            num_envs=10,
            num_steps=12,
            num_minibatches=5,
            num_epochs=3,
            gamma=0.9,
            td_lambda=0.3,
            learning_rate=1 / 3,
            anneal_learning_rate=False,
            num_env_blocks=2,
            warmup_updates=4,
            max_grad_norm=0.5,
            reward_scale=3.0,
            memory_window=4,
            memory_window_use="train",
            recompute_targets=True,
        ),
        exploration=EpsilonGreedyConfig(0.5, 0.1, 0.7),
        network=QNetworkConfig(
            encoder=MLPConfig(hidden_size=7, num_layers=3, normalization="rms"),
            memory=GRUConfig(5, 2),
            head=DuelingHeadConfig("layer"),
            input_normalization="running",
            add_last_action=True,
            add_last_reward=True,
        ),
        eval=EvaluationConfig(num_envs=3, interval=100, max_steps=7, epsilon=0.05),
        checkpoint=CheckpointConfig(interval=77, minutes=2.5, keep=4),
        log_interval=1234,
    ),
}
NETWORKS = [
    QNetworkConfig(encoder=MinAtarCNNConfig(3, 4, "none")),
    QNetworkConfig(encoder=NatureCNNConfig(3, "batch-renorm")),
    QNetworkConfig(encoder=ImpalaCNNConfig((4, 5), 3, "rms")),
    QNetworkConfig(encoder=HadamaxCNNConfig(4, 3, "rms")),
    QNetworkConfig(encoder=TileEncoderConfig("craftax-classic", 3, 2, "rms")),
    QNetworkConfig(memory=LSTMConfig(3, 2), head=LinearHeadConfig("rms")),
    QNetworkConfig(memory=MinGRUConfig(3, 2, 7.0)),
    QNetworkConfig(memory=TransformerConfig(12, 3, 4, 5, 6, 0.5)),
]
CONFIGS |= {f"network {number}": TrainConfig(network=network) for number, network in enumerate(NETWORKS)}
CONFIGS["hl-gauss"] = TrainConfig(loss=HLGaussConfig(-3.0, 4.0, 7, 1.5))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_round_trip_through_json(config):
    """Red where a field is lost, a group comes back as another member, or a value is of another type."""
    text = json.dumps(config_to_dict(config), allow_nan=False)
    found = config_from_dict(json.loads(text))
    assert found == config
    assert repr(found) == repr(config)


def test_the_round_trips_above_leave_no_field_at_its_default():
    """Red where a field is added to the configuration and no round trip tries it."""

    def untouched(kind: type, found: list) -> set[str]:
        return {
            field.name
            for field in dataclasses.fields(kind)
            if all(getattr(config, field.name) == getattr(kind(), field.name) for config in found)
        }

    configs = list(CONFIGS.values())
    parts = [
        configs,
        *([getattr(config, field.name) for config in configs] for field in dataclasses.fields(TrainConfig)),
    ]
    for name in ("encoder", "memory", "head"):
        parts.append([getattr(config.network, name) for config in configs])
    parts.append([config.env.reset for config in configs])
    for part in parts:
        for kind in {type(value) for value in part if dataclasses.is_dataclass(value)}:
            # Each of these alternatives has a case of its own for what it adds.
            found = [value for value in part if type(value) is kind]
            if kind.__name__ not in ("CraftaxConfig", "RAdamConfig", "QNetworkConfig", "ScalingRulesConfig"):
                assert untouched(kind, found) == set(), kind


def test_groups_are_named_as_on_the_command_line():
    """Red where a config.json no longer says which member of a group it means, or says it under another name."""
    data = config_to_dict(
        TrainConfig(loss=HuberConfig(), optimizer=SGDConfig(), env=GymnaxConfig(reset=OptimisticResetConfig()))
    )
    assert data["loss"] == {"type": "huber", "delta": 1.0}
    assert data["optimizer"] == {"type": "sgd", "momentum": 0.0}
    assert data["env"]["type"] == "gymnax"
    assert data["env"]["reset"] == {"type": "optimistic", "ratio": 16, "block_size": None}


def test_missing_fields_take_their_defaults():
    """Red where an older file, written before a field was there, can no longer be run."""
    assert config_from_dict({}) == TrainConfig()
    assert config_from_dict({"algorithm": {"gamma": 0.5}}) == TrainConfig(algorithm=PQNConfig(gamma=0.5))


def test_whole_numbers_pass_for_real_ones():
    """Red where 1 is refused for 1.0: many JSON writers drop the fraction."""
    config = config_from_dict({"algorithm": {"gamma": 1}})
    assert config.algorithm.gamma == 1.0
    assert type(config.algorithm.gamma) is float


def changed(path: str, value) -> dict:
    """The default configuration as JSON, with `value` at the dotted `path`."""
    data = copy.deepcopy(config_to_dict(TrainConfig()))
    *parents, last = path.split(".")
    part = data
    for parent in parents:
        part = part[parent]
    part[last] = value
    return data


WRONG = [
    # A misspelt name, at the top and below it.
    ("sede", 1, ["sede", "config"]),
    ("algorithm.learning_rat", 1e-3, ["learning_rat", "config.algorithm"]),
    ("env.reset.ratio", 3, ["ratio", "config.env.reset"]),
    ("loss.delta", 1.0, ["delta", "config.loss"]),
    # A value of another type.
    ("seed", 2.5, ["int", "config.seed"]),
    ("seed", True, ["int", "config.seed"]),
    ("seed", "3", ["int", "config.seed"]),
    ("seed", None, ["int", "config.seed"]),
    ("total_timesteps", 1e6, ["int", "config.total_timesteps"]),
    ("log_interval", 2.5, ["int", "config.log_interval"]),
    ("eval.interval", True, ["int", "config.eval.interval"]),
    ("eval.max_steps", "10", ["int", "config.eval.max_steps"]),
    ("env.reset.block_size", 1.5, ["int", "config.env.reset.block_size"]),
    ("algorithm.gamma", "0.9", ["float", "config.algorithm.gamma"]),
    ("algorithm.gamma", True, ["float", "config.algorithm.gamma"]),
    ("algorithm.anneal_learning_rate", 1, ["bool", "config.algorithm.anneal_learning_rate"]),
    ("algorithm.anneal_learning_rate", "false", ["bool", "config.algorithm.anneal_learning_rate"]),
    ("name", 3, ["str", "config.name"]),
    ("run_dir", 3, ["config.run_dir"]),
    ("env.name", 5, ["str", "config.env.name"]),
    ("env.params", {"length": "long"}, ["float", "config.env.params['length']"]),
    ("env.params", [1], ["mapping", "config.env.params"]),
    ("network.encoder.normalization", "batch", ["batch", "layer", "config.network.encoder.normalization"]),
    ("algorithm", [], ["config.algorithm"]),
    ("network", None, ["config.network"]),
    # A group without a member, or with one that is not there.
    ("loss", {"type": "hubber"}, ["config.loss"]),
    ("network.memory", {"type": "rnn"}, ["gru", "lstm", "min-gru", "transformer", "config.network.memory"]),
    ("loss", {}, ["config.loss"]),
    ("loss", "mse", ["config.loss"]),
    ("optimizer", {"type": ["adam"]}, ["config.optimizer"]),
    ("env.reset", {"type": "lazy"}, ["config.env.reset"]),
    # A value out of range.
    ("algorithm.num_envs", 0, ["config.algorithm"]),
    ("optimizer", {"type": "sgd", "momentum": 1.5}, ["config.optimizer"]),
]


@pytest.mark.parametrize(
    ("path", "value", "names"), WRONG, ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_a_file_that_does_not_fit_is_refused_by_file_and_field(tmp_path, path, value, names):
    """Red where a wrong file is half understood, or the message does not say what in which file is wrong."""
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    message = str(caught.value)
    assert message.startswith(f"--config: {file}: ")
    for name in names:
        assert name in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("algorithm.num_envs", 0, "num_envs must be at least 1, got 0"),
        ("algorithm.num_minibatches", 7, "7 does not divide 32 x 64 = 2048"),
        ("algorithm.learning_rate", -1.0, "learning_rate must be a finite number above 0, got -1.0"),
        ("seed", -1, "seed must lie in"),
        ("total_timesteps", 5, "total_timesteps must allow at least one update"),
        ("eval.num_envs", 0, "eval.num_envs must be at least 1, got 0"),
    ],
)
def test_a_value_out_of_range_keeps_its_reason(path, value, reason):
    """Red where the message is 'invalid value' and does not say which field of the group, or why."""
    with pytest.raises(ConfigError) as caught:
        config_from_dict(changed(path, value))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        ("loss", {"type": "hubber"}, ["type", "hubber", "mse", "huber"]),
        ("optimizer", {"type": "adamw"}, ["type", "adamw", "radam", "adam", "sgd"]),
        ("env.reset", {"type": "lazy"}, ["type", "lazy", "full", "optimistic"]),
        ("loss", {}, ["type", "mse", "huber"]),
        ("loss", "mse", ["type", "mse", "huber"]),
    ],
)
def test_an_unknown_group_member_names_the_known_ones(path, value, names):
    """Red where the message is 'required field missing', or an AttributeError, for a group type that is not there."""
    with pytest.raises(ConfigError) as caught:
        config_from_dict(changed(path, value))
    for name in names:
        assert name in str(caught.value)
    assert "attribute" not in str(caught.value)


def test_every_problem_is_named_at_once():
    """Red where a file with three mistakes takes three tries."""
    data = changed("seed", "x") | {"sede": 1}
    data["eval"]["num_envs"] = 2.5
    with pytest.raises(ConfigError) as caught:
        config_from_dict(data)
    for name in ("config.seed", "sede", "config.eval.num_envs"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("seed: 3", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("[1, 2]", "but a list"),
        ("null", "but a NoneType"),
        ("3", "but a int"),
    ],
)
def test_a_file_without_a_configuration_is_refused(tmp_path, text, words):
    """Red where broken JSON, a binary file or JSON of another kind gives a traceback."""
    file = tmp_path / "broken.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"--config: {file} ")
    assert words in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    """Red where a missing file or a folder gives a traceback."""
    with pytest.raises(ConfigError, match=r"--config: .*missing\.json cannot be read: No such file"):
        load_config(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match=r"--config: .* cannot be read: Is a directory"):
        load_config(tmp_path)
