"""The configuration: what it refuses, and the sizes it plans."""

import dataclasses
import re

import jax
import pytest

from pqn_eqx import config as config_module
from pqn_eqx.callbacks import Plan
from pqn_eqx.config import TrainConfig
from pqn_eqx.envs.gymnax import GymnaxConfig
from pqn_eqx.envs.resets import FullReset, OptimisticReset, OptimisticResetConfig
from pqn_eqx.episodes import EvaluationConfig
from pqn_eqx.errors import ConfigError, UserError
from pqn_eqx.exploration import EpsilonGreedyConfig
from pqn_eqx.losses import HuberConfig
from pqn_eqx.networks.encoders import MLPConfig
from pqn_eqx.optimizers import AdamConfig, RAdamConfig, SGDConfig
from pqn_eqx.population import Member
from pqn_eqx.pqn import PQNConfig
from pqn_eqx.presets import PRESETS

NAN = float("nan")

TINY = PQNConfig(num_envs=4, num_steps=8, num_minibatches=2)
"""32 environment steps an update."""


def sizes(total: int, algorithm: PQNConfig = TINY, **fields) -> tuple[int, int, int]:
    """Updates, log interval and evaluation interval of a run."""
    plan = TrainConfig(total_timesteps=total, algorithm=algorithm, **fields).plan(time_limit=500)
    return plan.num_updates, plan.log_interval, plan.eval_interval


def test_plan_of_the_default_run():
    """Red where a size of the default run changes unnoticed. 500,000 / (32 x 64) = 244.1 updates."""
    assert TrainConfig().plan(time_limit=500) == Plan(
        members=(Member(0, 0),),
        population=1,
        num_envs=32,
        num_updates=244,
        steps_per_update=2048,
        log_interval=2,
        eval_interval=24,
        checkpoint_interval=24,
        checkpoint_seconds=float("inf"),
        eval_envs=128,
        eval_max_steps=500,
        eval_epsilon=0.0,
    )


@pytest.mark.parametrize(
    ("total", "fields", "expected"),
    [
        # The default intervals: 1 % and a tenth of the updates.
        (32 * 1000, {}, (1000, 10, 100)),
        # Rounded down to whole updates.
        (32 * 1000 + 31, {}, (1000, 10, 100)),
        # 1 % of the run is less than an update.
        (320, {}, (10, 1, 1)),
        (32, {}, (1, 1, 1)),
        # A tenth of the run is rounded to whole log intervals: 25.5 to 26.
        (32 * 255, {}, (255, 2, 26)),
        # Steps become updates, rounded to the nearest, and at least one.
        (32 * 100, {"log_interval": 32 * 7}, (100, 7, 7)),
        (32 * 100, {"log_interval": 32 * 4 + 17}, (100, 5, 10)),
        (32 * 100, {"log_interval": 1}, (100, 1, 10)),
        # More than the run: one interval, which is the run.
        (320, {"log_interval": 10**9}, (10, 10, 10)),
        # The evaluation interval is a multiple of the log interval, and at least one of it.
        (32 * 100, {"log_interval": 32 * 7, "eval": EvaluationConfig(interval=32 * 20)}, (100, 7, 21)),
        (32 * 100, {"log_interval": 32 * 7, "eval": EvaluationConfig(interval=1)}, (100, 7, 7)),
        (32 * 100, {"eval": EvaluationConfig(interval=32 * 10**6)}, (100, 1, 10**6)),
    ],
)
def test_plan_intervals(total, fields, expected):
    """Red where an interval is zero, exceeds the run, is no whole number of updates or rounds the wrong way."""
    assert sizes(total, **fields) == expected


def test_plan_intervals_fit_every_run():
    """Red where some length of run has an interval that the trainer cannot keep."""
    for updates in range(1, 400):
        for log_interval in (None, 32, 100, 10**4):
            num_updates, log, evaluation = sizes(32 * updates, log_interval=log_interval)
            assert num_updates == updates
            assert 1 <= log <= updates
            assert evaluation % log == 0
            assert evaluation >= log


def test_plan_seeds_and_evaluation():
    """Red where members do not take the seeds that follow, or a setting of the evaluation is dropped."""
    config = TrainConfig(seed=7, num_seeds=3, eval=EvaluationConfig(num_envs=5, max_steps=11, epsilon=0.5))
    plan = config.plan(time_limit=500)
    assert plan.members == (Member(0, 7), Member(1, 8), Member(2, 9))
    assert plan.num_members == 3
    assert (plan.eval_envs, plan.eval_max_steps, plan.eval_epsilon) == (5, 11, 0.5)


def test_environment_steps_do_not_overflow():
    """Red where steps are counted in 32 bits: a billion steps are within a factor of two of 2**31."""
    plan = TrainConfig(total_timesteps=10**13, algorithm=PQNConfig(num_envs=1024, num_steps=128)).plan(time_limit=1)
    steps = plan.env_steps(plan.num_updates)
    assert type(steps) is int
    assert steps == 76293945 * 131072 == 9999999959040
    assert steps > 2**31


REFUSED = {
    "num_envs": lambda: PQNConfig(num_envs=0),
    "num_envs ": lambda: PQNConfig(num_envs=NAN),
    "num_steps": lambda: PQNConfig(num_steps=0),
    "num_minibatches": lambda: PQNConfig(num_minibatches=0),
    "num_epochs": lambda: PQNConfig(num_epochs=-1),
    "gamma": lambda: PQNConfig(gamma=1.5),
    "gamma ": lambda: PQNConfig(gamma=NAN),
    "td_lambda": lambda: PQNConfig(td_lambda=-0.1),
    "learning_rate": lambda: PQNConfig(learning_rate=-1e-4),
    "learning_rate ": lambda: PQNConfig(learning_rate=NAN),
    "learning_rate  ": lambda: PQNConfig(learning_rate=float("inf")),
    "learning_rate   ": lambda: PQNConfig(learning_rate=0.0),
    "max_grad_norm": lambda: PQNConfig(max_grad_norm=NAN),
    "reward_scale": lambda: PQNConfig(reward_scale=0.0),
    "num_seeds": lambda: TrainConfig(num_seeds=0),
    "seed": lambda: TrainConfig(seed=-1),
    "seed ": lambda: TrainConfig(seed=2**31),
    "seed  ": lambda: TrainConfig(seed=2**31 - 1, num_seeds=2),
    "log_interval": lambda: TrainConfig(log_interval=0),
    "total_timesteps": lambda: TrainConfig(total_timesteps=2047),
    "total_timesteps ": lambda: TrainConfig(total_timesteps=-1),
    "eval.num_envs": lambda: EvaluationConfig(num_envs=0),
    "eval.interval": lambda: EvaluationConfig(interval=0),
    "eval.max_steps": lambda: EvaluationConfig(max_steps=0),
    "eval.epsilon": lambda: EvaluationConfig(epsilon=1.01),
    "exploration.start": lambda: EpsilonGreedyConfig(start=1.5),
    "exploration.finish": lambda: EpsilonGreedyConfig(finish=-0.5),
    "exploration.decay_fraction": lambda: EpsilonGreedyConfig(decay_fraction=NAN),
    "loss.delta": lambda: HuberConfig(delta=0.0),
    "optimizer.b1": lambda: RAdamConfig(b1=1.0),
    "optimizer.b2": lambda: AdamConfig(b2=-0.1),
    "optimizer.eps": lambda: AdamConfig(eps=0.0),
    "optimizer.momentum": lambda: SGDConfig(momentum=NAN),
    "env.reset.ratio": lambda: OptimisticResetConfig(ratio=0),
    "env.reset.block_size": lambda: OptimisticResetConfig(block_size=0),
    "network.encoder.hidden_size": lambda: MLPConfig(hidden_size=0),
    "network.encoder.num_layers": lambda: MLPConfig(num_layers=0),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_value_that_cannot_work_is_refused_by_name(field):
    """Red where a value that cannot work is let through, or the message does not say which field it was."""
    with pytest.raises(ConfigError, match=rf"^{re.escape(field.strip())} must ") as caught:
        REFUSED[field]()
    assert isinstance(caught.value, UserError)


def test_the_largest_values_that_work_are_taken():
    """Red where a bound refuses its own end."""
    assert PQNConfig(gamma=1.0, td_lambda=0.0).gamma == 1
    assert PQNConfig(gamma=0.0, td_lambda=1.0).td_lambda == 1
    assert TrainConfig(seed=2**31 - 1).plan(1).members == (Member(0, 2**31 - 1),)
    assert [m.seed for m in TrainConfig(seed=2**31 - 2, num_seeds=2).members] == [2**31 - 2, 2**31 - 1]
    assert TrainConfig(total_timesteps=2048).plan(1).num_updates == 1
    assert EvaluationConfig(epsilon=1.0, num_envs=1, interval=1, max_steps=1).epsilon == 1
    assert EpsilonGreedyConfig(start=0.0, finish=1.0, decay_fraction=0.0).finish == 1


def test_minibatches_that_do_not_divide_name_numbers_and_divisors():
    """Red where the message leaves the user to find a number that works."""
    with pytest.raises(ConfigError) as caught:
        PQNConfig(num_envs=10, num_steps=12, num_minibatches=7)
    message = str(caught.value)
    assert "7 does not divide 10 x 12 = 120" in message
    nearby = [int(number) for number in message.rpartition(":")[2].strip(" .").split(", ")]
    assert nearby == [5, 6, 8]
    for divisor in nearby:
        PQNConfig(num_envs=10, num_steps=12, num_minibatches=divisor)


def test_too_few_steps_name_the_numbers_and_the_mend():
    """Red where the message does not say how many steps an update takes."""
    with pytest.raises(ConfigError) as caught:
        TrainConfig(total_timesteps=31, algorithm=TINY)
    assert "31 is less than num_envs x num_steps = 4 x 8 = 32" in str(caught.value)
    assert "--num-envs" in str(caught.value)


def test_presets_are_named_after_themselves():
    """Red where a preset's runs go to another preset's folders, or its summary breaks the table in --help."""
    assert PRESETS["cartpole"].config == TrainConfig()
    for name, preset in PRESETS.items():
        assert preset.config.name == name
        assert preset.summary.endswith(".")
        assert "\n" not in preset.summary
        assert preset.config.plan(1).num_updates >= 40


@pytest.fixture
def built(monkeypatch):
    """What `TrainConfig.build` gives to the trainer, without making one."""
    monkeypatch.setattr(config_module, "Trainer", lambda **arguments: arguments)
    config = TrainConfig(
        num_seeds=2,
        total_timesteps=320,
        algorithm=TINY,
        env=GymnaxConfig("CartPole-v1", params={"max_steps_in_episode": 37}, reset=OptimisticResetConfig(ratio=2)),
    )
    return config, config.build(callbacks := [], should_stop := lambda: True), callbacks, should_stop


def test_build_evaluates_with_exact_resets_up_to_the_time_limit(built):
    """Red where evaluation shares worlds, lacks the environment's changes or stops before its episodes can end."""
    config, arguments, _, _ = built
    assert isinstance(arguments["eval_env"].reset_rule, FullReset)
    assert isinstance(arguments["algorithms"].env.reset_rule, OptimisticReset)
    assert arguments["eval_env"].time_limit == 37
    assert dataclasses.replace(arguments["plan"], notes=()) == config.plan(time_limit=37)
    assert arguments["plan"].eval_max_steps == 37


def test_build_respects_a_limit_on_evaluation(monkeypatch):
    """Red where `eval.max_steps` is overruled by the environment's time limit."""
    monkeypatch.setattr(config_module, "Trainer", lambda **arguments: arguments)
    arguments = TrainConfig(eval=EvaluationConfig(max_steps=20)).build()
    assert arguments["plan"].eval_max_steps == 20


def test_build_stacks_members_and_passes_listeners_on(built):
    """Red where the members are not the leading axis of every number, or callbacks and stop are dropped."""
    _, arguments, callbacks, should_stop = built
    assert {leaf.shape[0] for leaf in jax.tree.leaves(arguments["algorithms"])} == {2}
    assert arguments["callbacks"] is callbacks
    assert arguments["should_stop"] is should_stop
    assert dict(arguments["mesh"].shape) == {"member": 2, "env": 1}
    assert "2 along members" in arguments["plan"].notes[0]
