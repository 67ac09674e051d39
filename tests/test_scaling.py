"""Rules for scale: the numbers by hand, and what is said of them."""

import dataclasses

import pytest

from pqn_eqx.config import TrainConfig
from pqn_eqx.errors import ConfigError
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.pqn import PQNConfig
from pqn_eqx.scaling import NoScalingConfig, ScalingRulesConfig

# 128 environments were the reference: minibatches of 128 x 32 / 16 = 256 steps.
ALGORITHM = PQNConfig(num_envs=2048, num_steps=32, num_minibatches=16, num_epochs=2, learning_rate=5e-4)
EXPLORATION = EpsilonGreedyConfig(decay_fraction=0.1)


def scaled(algorithm=ALGORITHM, **rules):
    return ScalingRulesConfig(reference_num_envs=128, **rules).apply(algorithm, EXPLORATION)


def test_none_changes_nothing():
    assert NoScalingConfig().apply(ALGORITHM, EXPLORATION) == (ALGORITHM, EXPLORATION, [])


def test_minibatch_size_held_means_more_minibatches():
    """16 times the environments: 16 times the minibatches of 256 steps, at the same learning rate."""
    algorithm, exploration, _ = scaled()
    assert algorithm == dataclasses.replace(ALGORITHM, num_minibatches=256)
    assert algorithm.steps_per_update // algorithm.num_minibatches == 256
    assert exploration == EXPLORATION


@pytest.mark.parametrize(("power", "factor"), [(0.0, 1), (0.5, 4), (1.0, 16), (0.25, 2)])
def test_learning_rate_grows_by_a_power_of_the_minibatch_size(power, factor):
    """Minibatches of 4096 instead of 256 steps: 16^p."""
    algorithm, _, _ = scaled(hold="num-minibatches", learning_rate_power=power)
    assert algorithm.num_minibatches == 16
    assert algorithm.learning_rate == pytest.approx(5e-4 * factor)


def test_it_works_downwards_too():
    algorithm, _, _ = scaled(dataclasses.replace(ALGORITHM, num_envs=32), hold="num-minibatches")
    assert algorithm.learning_rate == pytest.approx(5e-4 / 2)
    algorithm, _, _ = scaled(dataclasses.replace(ALGORITHM, num_envs=32))
    assert algorithm.num_minibatches == 4


def test_updates_per_batch_set_the_epochs():
    assert scaled(updates_per_batch=512)[0].num_epochs == 2
    assert scaled(updates_per_batch=512, hold="num-minibatches")[0].num_epochs == 32
    with pytest.raises(ConfigError, match=r"500 is none of 256. Nearby: 256"):
        scaled(updates_per_batch=500)


def test_epsilon_in_updates_takes_as_many_updates_as_at_the_reference():
    """0.1 of the run in steps is 16 times as long in updates of a sixteenth as many: 1.6 of the run."""
    _, exploration, _ = scaled(epsilon_schedule="updates")
    assert exploration.decay_fraction == pytest.approx(1.6)


def test_warm_up():
    assert scaled(warmup_updates=7)[0].warmup_updates == 7
    assert scaled(dataclasses.replace(ALGORITHM, warmup_updates=3))[0].warmup_updates == 3


def test_minibatches_that_are_no_whole_number_are_refused():
    with pytest.raises(ConfigError, match=r"16 x 100 / 128"):
        scaled(dataclasses.replace(ALGORITHM, num_envs=100))


def test_what_is_said_are_the_numbers_that_are_trained_with():
    _, _, lines = scaled(hold="num-minibatches", epsilon_schedule="updates", warmup_updates=5)
    assert lines == [
        "Scaling from 128 to 2,048 environments (x 16):",
        "  minibatches: 16 of 4,096 steps (num-minibatches held; 16 of 256 at the reference)",
        "  learning rate: 0.002 = 0.0005 x (4096 / 256)^0.5, after a warm-up of 5 updates",
        "  gradient steps per update: 32 (2 epochs)",
        "  ε falls over 1.6 of the run's steps (counted in updates)",
    ]


def test_a_run_trains_with_the_scaled_numbers_and_saves_those_given():
    """Red if the rules were told and not applied, or applied to what is written to config.json."""
    config = TrainConfig(
        algorithm=dataclasses.replace(ALGORITHM, num_envs=256),
        scaling=ScalingRulesConfig(128, hold="num-minibatches", learning_rate_power=1, epsilon_schedule="updates"),
        total_timesteps=256 * 32 * 10,
    )
    trainer = config.build()
    assert float(trainer.algorithms.learning_rate.start[0]) == pytest.approx(1e-3)
    assert float(trainer.algorithms.epsilon.duration[0]) == pytest.approx(0.4 * config.total_timesteps)
    assert "learning rate: 0.001" in "\n".join(trainer.plan.notes)
    assert config.algorithm.learning_rate == 5e-4


def test_what_does_not_fit_after_scaling_is_refused():
    """Red if only the numbers given were checked: 2 x 8 minibatches of 16 windows leave a memory none whole."""
    from pqn_eqx.networks.q_network import QNetworkConfig
    from pqn_eqx.networks.recurrent import GRUConfig

    with pytest.raises(ConfigError, match="num_minibatches must divide num_envs"):
        TrainConfig(
            network=QNetworkConfig(memory=GRUConfig()),
            algorithm=PQNConfig(num_envs=24, num_minibatches=12),
            scaling=ScalingRulesConfig(reference_num_envs=8),
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reference_num_envs": 0}, "scaling.reference_num_envs must be at least 1, got 0"),
        ({"learning_rate_power": float("nan")}, "scaling.learning_rate_power must be finite"),
        ({"updates_per_batch": 0}, "scaling.updates_per_batch must be at least 1"),
        ({"warmup_updates": -1}, "scaling.warmup_updates must be at least 0"),
    ],
)
def test_refuses_what_cannot_work(fields, message):
    with pytest.raises(ConfigError, match=message):
        ScalingRulesConfig(**({"reference_num_envs": 8} | fields))
