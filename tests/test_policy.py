"""Trained policies outside of training: loaded, exported, and the same as in training."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pqn_eqx
from pqn_eqx.errors import ConfigError, UserError
from pqn_eqx.export import main as export
from pqn_eqx.networks.q_network import Inputs
from pqn_eqx.policy import import_policy, load_policy
from pqn_eqx.run_directory import read_rows
from tests.test_train import TINY, command

RECURRENT = [
    *("network.memory:gru", "--network.memory.hidden-size", "8", "--network.add-last-action"),
    *("--network.add-last-reward", "--network.input-normalization", "running"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A recurrent population of two losses' parameters, in groups of one."""
    path = tmp_path_factory.mktemp("policy") / "run"
    arguments = [*RECURRENT, "loss:huber", "--sweep.loss.delta", "0.5", "2", "--members-per-group", "1"]
    finished = command(*TINY, *arguments, "--run-dir", path)
    assert finished.status == 0, finished.err
    return path


def test_memory_and_last_action_are_carried_as_in_training(run):
    """Three steps by hand. Red if the first step were no reset, or the last action or reward were not told."""
    policy = pqn_eqx.load_policy(run, member=1)
    network, memory, last_action = policy.network, policy.network.initial_memory(), 0
    carried, reward = None, 0.0
    for step in range(3):
        obs = jnp.asarray([0.1, -0.2, 0.3, 0.4]) * (step + 1)
        inputs = Inputs(obs, jnp.asarray(last_action), jnp.asarray(reward), jnp.asarray(step == 0))
        outputs, memory = network.step(memory, inputs)
        action, carried = policy(obs, carried, reward=reward)
        last_action, reward = int(jnp.argmax(outputs[:, 0])), float(step)
        assert action == last_action
        np.testing.assert_allclose(carried.network, memory, rtol=1e-5, atol=1e-6)
        assert carried.last_action == action


def test_members_and_steps_are_told_apart(run):
    obs = np.asarray([0.1, -0.2, 0.3, 0.4], np.float32)
    values = [load_policy(run, member=member).values(obs) for member in (0, 1)]
    assert np.abs(values[0] - values[1]).max() > 0
    earlier = load_policy(run, step=288, member=0).values(obs)
    assert np.abs(values[0] - earlier).max() > 0
    np.testing.assert_array_equal(load_policy(run, "last", 0).values(obs), values[0])
    assert load_policy(run, member=1).config.loss.delta == 2


def test_epsilon_draws_from_the_key(run):
    policy = load_policy(run, epsilon=1.0)
    obs = np.zeros(4, np.float32)
    actions = {policy(obs, key=jax.random.key(seed))[0] for seed in range(20)}
    assert actions == {0, 1}
    with pytest.raises(ValueError, match="give it a key"):
        policy(obs)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"member": 7}, ConfigError, "member 7: the run has members 0 to 1"),
        ({"step": 5}, ConfigError, r"has no checkpoint '5'. There are .*320, last and best"),
        ({"step": "first"}, ConfigError, "has no checkpoint 'first'"),
    ],
)
def test_what_is_not_there_is_refused(run, arguments, error, message):
    with pytest.raises(error, match=message):
        load_policy(run, **arguments)


def test_an_observation_of_another_shape_is_refused(run):
    with pytest.raises(ValueError, match=r"has shape \(4,\), got \(1, 4\)"):
        load_policy(run)(np.zeros((1, 4)))


def test_without_checkpoints_it_says_why(tmp_path):
    path = tmp_path / "run"
    assert command(*TINY, "--checkpoint.interval", "0", "--run-dir", path).status == 0
    with pytest.raises(ConfigError, match="holds no checkpoint; runs write them unless --checkpoint.interval is 0"):
        load_policy(path)
    with pytest.raises(ConfigError, match="is no run directory"):
        load_policy(tmp_path)


def test_an_exported_policy_is_the_same(run, tmp_path):
    file = tmp_path / "policy.safetensors"
    finished = command(run, file, "--member", "1", main=export)
    assert finished.status == 0, finished.err
    described = json.loads(file.with_suffix(".json").read_text())
    assert described["obs_shape"] == [4]
    assert described["arrays"]["head.layer.weight"]["dtype"] == "float32"
    found, expected = import_policy(file), load_policy(run, member=1)
    obs, memories = np.asarray([0.1, -0.2, 0.3, 0.4], np.float32), [None, None]
    for _ in range(3):
        (a, memories[0]), (b, memories[1]) = (p(obs, m) for p, m in zip((found, expected), memories, strict=True))
        assert a == b
        np.testing.assert_array_equal(found.values(obs, memories[0]), expected.values(obs, memories[1]))


@pytest.mark.parametrize("damage", ["truncated", "missing", "no description", "another description"])
def test_a_damaged_export_is_refused(run, tmp_path, damage):
    file = tmp_path / "policy.safetensors"
    assert command(run, file, main=export).status == 0
    description = file.with_suffix(".json")
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "missing":
        file.unlink()
    elif damage == "no description":
        description.write_text("{}")
    else:
        other = json.loads(description.read_text())
        other["config"]["network"]["memory"]["hidden_size"] = 9
        description.write_text(json.dumps(other))
    with pytest.raises(UserError, match="policy"):
        import_policy(file)


def test_export_says_what_is_wrong(tmp_path):
    finished = command(tmp_path, tmp_path / "a.safetensors", main=export)
    assert finished.status == 2
    assert finished.err == f"error: {tmp_path} is no run directory: it has no config.json.\n"


def test_the_run_was_evaluated(run):
    """Red if the fixture's runs had no evaluation to be the best of."""
    assert {row["member"] for row in read_rows(run / "eval.jsonl")} == {0, 1}
    assert load_policy(run, "best").config.seed == 0
