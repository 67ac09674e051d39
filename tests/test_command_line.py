"""The command line of a run."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest

from pqn_eqx.command_line import parse, split_base
from pqn_eqx.config import TrainConfig
from pqn_eqx.envs.craftax import CraftaxConfig
from pqn_eqx.envs.gymnax import GymnaxConfig
from pqn_eqx.envs.resets import FullResetConfig, OptimisticResetConfig
from pqn_eqx.episodes import EvaluationConfig
from pqn_eqx.errors import ConfigError
from pqn_eqx.losses import HLGaussConfig, HuberConfig, MSEConfig
from pqn_eqx.networks.convolutions import ImpalaCNNConfig
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.heads import DuelingHeadConfig
from pqn_eqx.networks.q_network import QNetworkConfig
from pqn_eqx.networks.recurrent import LSTMConfig
from pqn_eqx.optimizers import AdamConfig, RAdamConfig, SGDConfig
from pqn_eqx.pqn import PQNConfig
from pqn_eqx.presets import PRESETS
from pqn_eqx.serialization import config_to_dict


@pytest.fixture
def config_file(tmp_path) -> Path:
    """The file of a run that differs from every preset."""
    config = TrainConfig(seed=9, name="earlier", loss=HuberConfig(3.0), run_dir=Path("earlier/run"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_to_dict(config)))
    return path


def test_default_is_the_cartpole_preset():
    """Red where the command without arguments runs anything else."""
    assert parse([]) == PRESETS["cartpole"].config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_first_argument(name):
    """Red where tyro changes a preset on the way: its groups, its nested defaults."""
    assert parse([name]) == PRESETS[name].config


def test_flags_change_what_they_name_and_nothing_else():
    """Red where a flag resets its neighbours to their defaults, or goes unheard."""
    config = parse(["acrobot", "--seed", "5", "--gamma", "0.5", "--no-anneal-learning-rate", "--run-dir", "a/b"])
    data = config_to_dict(PRESETS["acrobot"].config)
    data["seed"], data["run_dir"] = 5, "a/b"
    data["algorithm"] |= {"gamma": 0.5, "anneal_learning_rate": False}
    assert config_to_dict(config) == data
    assert config.run_dir == Path("a/b")


def test_networks_are_put_together_from_groups():
    """In any order, with the flags of each before or after; what is not named stays the preset's."""
    flags = (
        "cartpole-rnn --network.memory.hidden-size 64 network.head:dueling loss:hl-gauss --loss.v-min -1 "
        "network.memory:lstm --loss.num-bins 21"
    )
    config = parse(flags.split())
    expected = PRESETS["cartpole-rnn"].config
    network = dataclasses.replace(expected.network, memory=LSTMConfig(64), head=DuelingHeadConfig())
    assert config == dataclasses.replace(expected, network=network, loss=HLGaussConfig(v_min=-1, num_bins=21))
    config = parse("minatar-breakout network.encoder:impala-cnn --network.encoder.channels 8 16".split())
    assert config.network.encoder == ImpalaCNNConfig(channels=(8, 16))


def test_nested_flags():
    """Red where a nested field moves to another flag: these stand in the documentation."""
    flags = (
        "--network.encoder.hidden-size 16 --network.encoder.normalization none --eval.num-envs 4 --eval.max-steps 20 "
        "--exploration.decay-fraction 0.5 --log-interval 100 --num-seeds 2 --env.options size 16"
    )
    config = parse(flags.split())
    assert (config.network.encoder.hidden_size, config.network.encoder.normalization) == (16, "none")
    assert (config.eval.num_envs, config.eval.max_steps) == (4, 20)
    assert config.exploration.decay_fraction == 0.5
    assert (config.log_interval, config.num_seeds) == (100, 2)
    assert config.env.options == {"size": 16.0}


GROUPS = (
    ["loss:huber", "--loss.delta", "2"],
    ["optimizer:sgd"],
    ["env:gymnax", "--env.name", "Acrobot-v1", "--env.params", "max_steps_in_episode", "100"],
)
RESET = ["env.reset:optimistic"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_groups_come_in_any_order(order):
    """Red where a group is heard only before, or only after, another one."""
    config = parse([argument for i in order for argument in GROUPS[i]] + RESET)
    assert config == TrainConfig(
        loss=HuberConfig(2.0),
        optimizer=SGDConfig(),
        env=GymnaxConfig("Acrobot-v1", params={"max_steps_in_episode": 100.0}, reset=OptimisticResetConfig()),
    )


def test_a_nested_group_may_come_before_the_group_it_is_in():
    """Red where `env.reset:...` must follow `env:...`: the help says that groups come in any order."""
    assert parse(["env.reset:optimistic", "env:gymnax"]) == TrainConfig(env=GymnaxConfig(reset=OptimisticResetConfig()))


def test_a_nested_group_needs_no_mention_of_the_group_it_is_in():
    """Red where the reset rule of a preset's environment cannot be changed on its own."""
    config = parse(["acrobot", "env.reset:optimistic", "--env.reset.ratio", "8"])
    assert config.env == GymnaxConfig("Acrobot-v1", reset=OptimisticResetConfig(ratio=8))
    assert parse(["craftax", "env.reset:full"]).env == CraftaxConfig(reset=FullResetConfig())


def test_flags_may_stand_between_groups():
    """Red where a flag of the run is heard only before the first group."""
    config = parse(["--seed", "3", "optimizer:sgd", "loss:huber", "--num-envs", "64", "--loss.delta", "2"])
    assert (config.seed, config.algorithm.num_envs) == (3, 64)
    assert (config.loss, config.optimizer) == (HuberConfig(2.0), SGDConfig())


@pytest.mark.parametrize(
    ("argument", "field", "expected"),
    [
        ("loss:mse", "loss", MSEConfig()),
        ("loss:huber", "loss", HuberConfig()),
        ("optimizer:radam", "optimizer", RAdamConfig()),
        ("optimizer:adam", "optimizer", AdamConfig()),
        ("optimizer:sgd", "optimizer", SGDConfig()),
        ("env:gymnax", "env", GymnaxConfig()),
        ("env:craftax", "env", CraftaxConfig()),
    ],
)
def test_every_member_of_a_group_is_there(argument, field, expected):
    """Red where a member of a group is renamed or left out."""
    assert getattr(parse([argument]), field) == expected


def test_a_groups_flags_keep_the_bases_values():
    """Red where naming the group that the base already has throws its values away."""
    assert parse(["acrobot", "env:gymnax", "env.reset:optimistic"]).env.name == "Acrobot-v1"


def test_a_file_is_a_base_too(config_file):
    """Red where a file is read as defaults of its own, or the rerun would go to the folder of the first run."""
    for argv in (["--config", str(config_file)], [f"--config={config_file}"]):
        assert parse(argv) == TrainConfig(seed=9, name="earlier", loss=HuberConfig(3.0), run_dir=None)


def test_flags_change_a_file_wherever_it_stands(config_file):
    """Red where `--config` is only heard as the first argument, or swallows a neighbour."""
    for argv in (
        ["--config", str(config_file), "--seed", "4", "--run-dir", "x"],
        ["--seed", "4", "--config", str(config_file), "--run-dir", "x"],
        ["--seed", "4", "--run-dir", "x", f"--config={config_file}"],
    ):
        config = parse(argv)
        assert config == TrainConfig(seed=4, name="earlier", loss=HuberConfig(3.0), run_dir=Path("x"))


def test_a_preset_and_a_file_are_refused_together(config_file):
    """Red where one of two bases is dropped without a word."""
    with pytest.raises(ConfigError, match=r"from a preset, --config or --resume, not both: got a preset .acrobot. and"):
        parse(["acrobot", "--seed", "3", "--config", str(config_file)])


@pytest.mark.parametrize("argv", [["--config"], ["--config="], ["--seed", "3", "--config"]])
def test_config_needs_a_path(argv):
    """Red where a forgotten path starts the default run."""
    with pytest.raises(ConfigError, match=r"--config needs the path"):
        parse(argv)


def test_a_missing_file_is_refused(tmp_path):
    """Red where a path that is not there gives a traceback, or the default run."""
    with pytest.raises(ConfigError, match=r"--config: .*gone\.json cannot be read"):
        parse(["--config", str(tmp_path / "gone.json")])


@pytest.mark.parametrize(
    ("given", "meant"), [("cartpol", "cartpole"), ("acrobat", "acrobot"), ("Craftax", "craftax"), ("classic", None)]
)
def test_an_unknown_preset_names_the_nearest_and_all(given, meant):
    """Red where a misspelt preset runs something else, or the message does not say what there is."""
    with pytest.raises(ConfigError) as caught:
        parse([given])
    message = str(caught.value)
    assert repr(given) in message
    assert f"Presets: {', '.join(PRESETS)}." in message
    if meant is not None:
        assert f"Did you mean {meant}?" in message


@pytest.mark.parametrize(
    ("argv", "config"),
    [
        (["--num-envs=4", "--num-envs", "64"], TrainConfig(algorithm=PQNConfig(num_envs=64))),
        (
            ["--num-envs", "4", "--network.encoder.hidden-size", "8", "--eval.num-envs=3", "--num_envs=64"],
            TrainConfig(
                algorithm=PQNConfig(num_envs=64),
                network=QNetworkConfig(encoder=MLPConfig(hidden_size=8)),
                eval=EvaluationConfig(num_envs=3),
            ),
        ),
        (["--no-anneal-learning-rate", "--seed", "1", "--anneal-learning-rate"], TrainConfig(seed=1)),
        (["--seed=1", "loss:huber", "--seed", "2"], TrainConfig(seed=2, loss=HuberConfig())),
    ],
)
def test_of_a_flag_given_twice_the_last_one_counts(argv, config):
    """Red where a script cannot append to its flags, or a flag takes a namesake's place (``--eval.num-envs``)."""
    assert parse(argv) == config


def test_a_preset_that_is_not_the_first_argument_is_told_where_it_goes():
    """Red where tyro's "unrecognized option" is all that a user hears."""
    with pytest.raises(ConfigError, match=r"A preset is the first argument: .* acrobot \[flags\]; got it after '5'"):
        parse(["--num-seeds", "5", "acrobot"])


def test_nothing_near_suggests_nothing():
    """Red where any word is 'corrected' to a preset."""
    with pytest.raises(ConfigError) as caught:
        parse(["zzz"])
    assert "Did you mean" not in str(caught.value)


def test_the_base_is_taken_off_the_arguments():
    """Red where a flag's value is taken for a preset, or the arguments change under the caller."""
    argv = ["acrobot", "--name", "craftax"]
    assert split_base(argv) == (PRESETS["acrobot"].config, ["--name", "craftax"], False)
    assert argv == ["acrobot", "--name", "craftax"]
    assert split_base(["loss:huber"]) == (PRESETS["cartpole"].config, ["loss:huber"], False)
    assert split_base(["--name", "craftax"]) == (PRESETS["cartpole"].config, ["--name", "craftax"], False)


@pytest.mark.parametrize(
    "argv",
    [
        ["--learning-rat", "1"],
        ["--frobnicate"],
        ["--seed", "2.5"],
        ["--seed"],
        ["loss:hubber"],
        ["--loss.delta", "2"],
        ["env:craftax", "--env.name", "Craftax-Textual-v1"],
        ["--env.params", "length"],
    ],
)
def test_what_is_not_understood_ends_with_a_failure(argv, capsys):
    """Red where an unknown flag, group or value is passed over: the run would not be the one that was asked for."""
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code not in (0, None)
    captured = capsys.readouterr()
    assert captured.err.strip()
    assert "Traceback" not in captured.err


@pytest.fixture
def help_of(capsys, monkeypatch):
    """The help page of a command, without its frames."""
    # At this width tyro sets one column; a page of two would be read across.
    monkeypatch.setenv("COLUMNS", "100")

    def page(*argv: str) -> str:
        with pytest.raises(SystemExit) as caught:
            parse([*argv, "--help"])
        assert caught.value.code == 0
        return re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out)

    return page


def test_help_lists_presets_and_groups(help_of):
    """Red where a preset or a group is not to be found from the command line."""
    text = " ".join(help_of().split())
    assert "python -m pqn_eqx.train" in text
    for name, preset in PRESETS.items():
        assert f"{name} {preset.summary}" in text
    for words in ("--config FILE", "env:craftax", "loss:huber", "optimizer:adam", "--run-dir", "--eval.num-envs"):
        assert words in text


def test_help_of_a_preset_shows_its_defaults(help_of):
    """Red where the defaults shown are not those that would run."""
    text = " ".join(help_of("acrobot").split())
    assert re.search(r"--learning-rate FLOAT [^()]*\(default: 0\.0005\)", text)
    assert re.search(r"--env\.name STR [^()]*\(default: Acrobot-v1\)", text)


def undocumented(page: str) -> tuple[list[str], int]:
    """The flags and group members of a help page that nothing is said about, and how many there are in all.

    An item starts with its name, and its text stands behind at least two spaces or further in on the next lines.
    """
    items: list[list[str]] = []
    for line in page.splitlines():
        if re.match(r" {2}(--?[a-zA-Z]| {2}• )", line) and not re.search("--config FILE|--resume DIR", line):
            name, _, text = line.strip().partition("  ")
            items.append([name, text])
        elif items and line.startswith(" " * 7):
            items[-1][1] += " " + line.strip()
    said = [re.sub(r"\(default:[^)]*\)", "", text) for _, text in items]
    return [name for (name, _), text in zip(items, said, strict=True) if not re.search(r"[a-z]{2}", text)], len(items)


@pytest.mark.parametrize(
    ("argv", "at_least"),
    [([], 35), (["env:craftax", "env.reset:optimistic", "loss:huber", "optimizer:sgd"], 28), (["optimizer:adam"], 30)],
)
def test_everything_in_help_is_explained(argv, at_least, help_of):
    """Red where a field of the configuration has no docstring, and so no help."""
    silent, count = undocumented(help_of(*argv))
    assert silent == []
    assert count >= at_least


def test_the_check_of_help_finds_a_flag_without_text():
    """Red where the reader of help pages above sees text where there is none."""
    page = (
        "  --seed INT             A seed. (default: 0)\n"
        "  --gamma FLOAT          (default: 0.9)\n"
        "  --run-dir {None}|PATH\n"
        "                         (default: None)\n"
        "  --delta FLOAT\n"
        "                         Where it bends.\n"
        "    • loss:mse\n"
    )
    assert undocumented(page) == (["--gamma FLOAT", "--run-dir {None}|PATH", "• loss:mse"], 5)
