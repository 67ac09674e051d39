"""Sweeps: the members they make, and that each of them is the run it would be alone."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from pqn_eqx.command_line import parse
from pqn_eqx.config import TrainConfig
from pqn_eqx.episodes import EvaluationConfig
from pqn_eqx.errors import ConfigError
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.losses import HLGaussConfig, HuberConfig, MSEConfig
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.networks.q_network import QNetworkConfig
from pqn_eqx.population import Member, stack_members
from pqn_eqx.pqn import PQNConfig
from pqn_eqx.serialization import config_from_dict, config_to_dict
from pqn_eqx.sharding import PER_MEMBER, place
from pqn_eqx.sweep import OPTIONS, ExplorationSweep, LossSweep, SweepConfig, members, settings

CONFIG = TrainConfig(
    total_timesteps=64 * 20,
    seed=3,
    algorithm=PQNConfig(num_envs=8, num_steps=8, num_minibatches=2, num_epochs=1, learning_rate=1e-3),
    exploration=EpsilonGreedyConfig(decay_fraction=0.5),
    network=QNetworkConfig(MLPConfig(hidden_size=16)),
    eval=EvaluationConfig(num_envs=4, max_steps=20),
)


def test_every_float_of_algorithm_loss_and_exploration_can_be_swept():
    """Red if a field is added that no sweep reaches, or one is lost."""
    assert set(OPTIONS) == {
        "learning_rate",
        "gamma",
        "td_lambda",
        "max_grad_norm",
        "reward_scale",
        "exploration.start",
        "exploration.finish",
        "exploration.decay_fraction",
        "loss.delta",
        "loss.v_min",
        "loss.v_max",
        "loss.sigma_ratio",
    }


def test_every_combination_with_every_seed():
    sweep = SweepConfig(learning_rate=(1e-4, 3e-4, 1e-3), td_lambda=(0.5, 0.9))
    population = dataclasses.replace(CONFIG, sweep=sweep, num_seeds=4).members
    assert len(population) == 24
    assert [member.number for member in population] == list(range(24))
    # Seeds of a setting side by side; options in the order of the algorithm's fields.
    assert population[5] == Member(5, 4, {"td_lambda": 0.5, "learning_rate": 3e-4})
    assert len({(m.seed, *m.values.values()) for m in population}) == 24


def test_zipped_values_belong_together():
    sweep = SweepConfig(learning_rate=(1e-4, 1e-3), loss=LossSweep(delta=(1.0, 1.0)))
    assert settings(sweep, True, 0, 0) == [
        {"learning_rate": 1e-4, "loss.delta": 1.0},
        {"learning_rate": 1e-3, "loss.delta": 1.0},
    ]
    with pytest.raises(ConfigError, match="sweep_zip needs as many values of each option, got 1 of gamma, 2 of"):
        settings(SweepConfig(learning_rate=(1e-4, 1e-3), gamma=(0.9,)), True, 0, 0)


def test_samples_are_log_uniform_between_the_ends():
    """Red if they were uniform: half of the draws between 1e-6 and 1e-2 are then above 5e-3, and not 1e-4."""
    sweep = SweepConfig(learning_rate=(1e-6, 1e-2), loss=LossSweep(v_min=(-10.0, 0.0)))
    drawn = settings(sweep, False, 2000, seed=1)
    rates = np.log10([values["learning_rate"] for values in drawn])
    assert rates.min() >= -6
    assert rates.max() <= -2
    np.testing.assert_allclose(np.quantile(rates, [0.25, 0.5, 0.75]), [-5, -4, -3], atol=0.15)
    np.testing.assert_allclose(np.mean([values["loss.v_min"] for values in drawn]), -5, atol=0.3)
    assert drawn == settings(sweep, False, 2000, seed=1)
    assert drawn != settings(sweep, False, 2000, seed=2)


@pytest.mark.parametrize(
    ("sweep", "zipped", "samples", "message"),
    [
        (SweepConfig(gamma=(0.9, 0.9)), False, 0, "sweep.gamma: a value is given twice: 0.9, 0.9"),
        (SweepConfig(gamma=(0.9, float("nan"))), False, 0, "sweep.gamma: every value must be finite"),
        (SweepConfig(gamma=(0.9, 0.99)), True, 3, "--sweep-zip or --sweep-samples, not both"),
        (SweepConfig(), False, 3, "sweep_samples needs ranges"),
        (SweepConfig(gamma=(0.9,)), False, 3, "sweep.gamma: --sweep-samples draws between two values.*got 1"),
    ],
)
def test_values_that_do_not_fit_are_refused(sweep, zipped, samples, message):
    with pytest.raises(ConfigError, match=message):
        settings(sweep, zipped, samples, 0)


def test_nothing_swept_is_one_setting():
    assert settings(SweepConfig(), False, 0, 0) == settings(SweepConfig(), True, 0, 0) == [{}]
    assert members([{}], range(5, 7)) == (Member(0, 5), Member(1, 6))


def test_every_value_is_held_to_the_rules_of_its_field():
    with pytest.raises(ConfigError, match="gamma must lie in .0, 1., got 1.5"):
        dataclasses.replace(CONFIG, sweep=SweepConfig(gamma=(0.9, 1.5)))
    with pytest.raises(ConfigError, match="sweep.loss.delta: loss:mse has no delta; choose loss:huber"):
        dataclasses.replace(CONFIG, sweep=SweepConfig(loss=LossSweep(delta=(0.5, 1.0))))


@pytest.mark.parametrize("flag", ["--sweep.num-envs", "--sweep.network.encoder.hidden-size", "--sweep.learning-rat"])
def test_what_shapes_the_program_cannot_be_swept(flag):
    """Red if tyro's own message, which knows no reason, were shown."""
    with pytest.raises(ConfigError, match="cannot be swept.*share one program.*Can be swept: gamma"):
        parse([flag, "1", "2"])


def test_on_the_command_line_and_in_a_file():
    config = parse(
        "loss:huber --sweep.learning-rate 1e-4 1e-3 --sweep.loss.delta 0.5 1 --num-seeds 3 "
        "--sweep.exploration.finish 0.1 0.2 --members-per-group 5".split()
    )
    assert config.sweep == SweepConfig(
        learning_rate=(1e-4, 1e-3), exploration=ExplorationSweep(finish=(0.1, 0.2)), loss=LossSweep(delta=(0.5, 1.0))
    )
    assert [len(group) for group in config.groups] == [5, 5, 5, 5, 4]
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def final_networks(trainer):
    """The parameters of every member after the run, each leaf with a leading M."""
    trainer.run()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state.learner.network)]


VALUES = {
    "learning_rate": 2e-3,
    "gamma": 0.5,
    "td_lambda": 0.3,
    "max_grad_norm": 0.1,
    "reward_scale": 0.7,
    "exploration.start": 0.6,
    "exploration.finish": 0.9,
    "exploration.decay_fraction": 0.1,
}
OF_LOSSES = {
    "huber": (HuberConfig(1.0), {"loss.delta": 0.01}),
    "hl-gauss": (
        HLGaussConfig(-5.0, 5.0, num_bins=11),
        {"loss.v_min": -4.0, "loss.v_max": 6.0, "loss.sigma_ratio": 1.5},
    ),
}


def zipped(config, values):
    """A population whose first member is the run as it is, and each of the others changes one option."""
    lists = {}
    for number, (option, value) in enumerate(values.items()):
        part, _, name = option.rpartition(".")
        owner = getattr(config, part or "algorithm")
        column = [getattr(owner, name)] * (1 + len(values))
        column[1 + number] = value
        lists.setdefault(part, {})[name] = tuple(column)
    parts = {"exploration": ExplorationSweep, "loss": LossSweep}
    nested = {part: kind(**lists[part]) for part, kind in parts.items() if part in lists}
    return dataclasses.replace(config, sweep=SweepConfig(**lists.get("", {}), **nested), sweep_zip=True)


@pytest.mark.parametrize("loss", ["mse", *OF_LOSSES])
def test_a_member_is_the_run_alone(loss):
    """Every field that can be swept, in float64: after 20 updates the parameters of each member are those of the run
    with its values alone, to 1e-10, and differ from those of the member that changes nothing.

    Red if a value were taken from the first member, written where training does not read it, or baked into the program.
    """
    loss_config, values = OF_LOSSES.get(loss, (MSEConfig(), VALUES))
    with jax.enable_x64(True):
        population = zipped(dataclasses.replace(CONFIG, loss=loss_config), values)
        together = final_networks(population.build())
        lonely = population.of_member(population.members[0]).build()
        for number, member in enumerate(population.members):
            config = population.of_member(member)
            alone = config.build()
            # One program serves all: it is built once.
            lonely.algorithms = alone.algorithms
            parameters = final_networks(lonely)
            for of_population, of_run in zip(together, parameters, strict=True):
                np.testing.assert_allclose(of_population[number], of_run[0], rtol=1e-10, atol=1e-10)
            if number:
                gap = max(np.abs(leaf[number] - leaf[0]).max() for leaf in together)
                assert gap > 1e-6, f"{list(values)[number - 1]} changes nothing"


def test_first_update_of_a_member_in_float32():
    """One update to 1e-5, with seeds and a swept field at once."""
    config = dataclasses.replace(
        CONFIG, total_timesteps=64, num_seeds=2, sweep=SweepConfig(learning_rate=(1e-3, 3e-3), td_lambda=(0.5, 0.9))
    )
    together = final_networks(config.build())
    for number in (0, 3, 7):
        alone = final_networks(config.of_member(config.members[number]).build())
        for of_population, of_run in zip(together, alone, strict=True):
            np.testing.assert_allclose(of_population[number], of_run[0], rtol=1e-5, atol=1e-5)


def test_stacking_keeps_each_members_numbers():
    config = dataclasses.replace(CONFIG, sweep=SweepConfig(gamma=(0.9, 0.99)))
    trainer = config.build()
    np.testing.assert_allclose(trainer.algorithms.gamma, [0.9, 0.99])
    assert place(stack_members([1.0, 2.0]), trainer.mesh, PER_MEMBER).shape == (2,)
