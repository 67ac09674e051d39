"""A trained policy to act with, outside of training."""

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, Shaped

from pqn_eqx.checkpoint import find_checkpoint, name_arrays, put_arrays
from pqn_eqx.config import TrainConfig
from pqn_eqx.envs.base import Environment
from pqn_eqx.errors import ConfigError, UserError
from pqn_eqx.exploration import epsilon_greedy
from pqn_eqx.losses import Loss
from pqn_eqx.networks.memory import MemoryState
from pqn_eqx.networks.q_network import Inputs, QNetwork
from pqn_eqx.serialization import config_from_dict, config_to_dict, load_run


class PolicyMemory(eqx.Module):
    """What a policy keeps from step to step of an episode."""

    network: MemoryState
    last_action: Int[Array, ""]


class Policy:
    """ε-greedy in the values of a trained network, for one environment.

    memory = None                                      # at the start of every episode
    action, memory = policy(obs, memory, key)
    """

    def __init__(self, network: QNetwork, loss: Loss, obs_shape: tuple[int, ...], config: TrainConfig, epsilon: float):
        self.network, self.loss, self.obs_shape = network, loss, obs_shape
        self.config, self.epsilon = config, epsilon

    def __call__(
        self,
        obs: Shaped[Array, "..."],
        memory: PolicyMemory | None = None,
        key: Key[Array, ""] | None = None,
        reward: float = 0.0,
    ) -> tuple[int, PolicyMemory]:
        """The action after `obs`, and the memory for the next call.

        `memory` is None at the start of an episode; `reward` is that which came with `obs`, for networks that are told
        it; `key` is needed where ε > 0. Raises `ValueError` for an observation of another shape.
        """
        obs = jnp.asarray(obs)
        if obs.shape != self.obs_shape:
            raise ValueError(f"An observation of this policy has shape {self.obs_shape}, got {obs.shape}.")
        if key is None:
            if self.epsilon > 0:
                raise ValueError(f"With ε {self.epsilon} the policy draws random actions: give it a key.")
            key = jax.random.key(0)
        first = memory is None
        if memory is None:
            memory = PolicyMemory(self.network.initial_memory(), jnp.zeros((), int))
        inputs = Inputs(obs, memory.last_action, jnp.asarray(float(reward)), jnp.asarray(first))
        action, remembered = _act(self.network, self.loss, memory.network, inputs, key, self.epsilon)
        return int(action), PolicyMemory(remembered, action)

    def values(self, obs: Shaped[Array, "..."], memory: PolicyMemory | None = None) -> Float[np.ndarray, " A"]:
        """The values of all actions after `obs`."""
        start = PolicyMemory(self.network.initial_memory(), jnp.zeros((), int)) if memory is None else memory
        inputs = Inputs(jnp.asarray(obs), start.last_action, jnp.zeros(()), jnp.asarray(memory is None))
        return np.asarray(self.loss.value(self.network.step(start.network, inputs)[0]))


@eqx.filter_jit
def _act(network, loss, memory, inputs, key, epsilon):
    outputs, memory = network.step(memory, inputs)
    return epsilon_greedy(key, loss.value(outputs), epsilon), memory


def load_policy(run_directory: str | Path, step: str | int = "last", member: int = 0, epsilon: float = 0.0) -> Policy:
    """The policy of a member of a run at a checkpoint: `step` is last, best, or environment steps.

    Raises `UserError` where there is no such run, member or checkpoint, or it is damaged.
    """
    directory = Path(run_directory)
    config = load_run(directory)
    groups = config.groups
    for number, group in enumerate(groups):
        for place, found in enumerate(group):
            if found.number == member:
                checkpoints, steps = find_checkpoint(directory, number, len(groups), str(step))
                alone, env = _alone(config, member)
                like = _abstract_network(alone, env, len(group))
                networks = checkpoints.restore(steps, "network", like)
                network = jax.tree.map(lambda leaf, m=place: leaf[m], networks)
                return Policy(network, alone.loss.build(), env.obs_shape, alone, epsilon)
    raise ConfigError(f"member {member}: the run has members 0 to {len(config.members) - 1}.")


def _alone(config: TrainConfig, member: int) -> tuple[TrainConfig, Environment]:
    alone = config.of_member(config.members[member])
    return alone, alone.env.build(1)


def _abstract_network(config: TrainConfig, env: Environment, num_members: int) -> Any:
    """The shapes of the networks of a group."""

    def build(key):
        outputs = config.loss.build().num_outputs
        return config.network.build(env.obs_shape, env.num_actions, outputs, key=key)

    keys = jax.vmap(jax.random.key)(jnp.arange(num_members))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    networks = eqx.filter_eval_shape(jax.vmap(build), keys)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), networks)


def export_policy(policy: Policy, path: str | Path) -> None:
    """Write the parameters as safetensors, and beside them (``.json``) what they belong to.

    Raises `UserError` where the files cannot be written.
    """
    from safetensors.numpy import save_file

    path = Path(path)
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in name_arrays(policy.network).items()}
    described = {
        "format": "pqn_eqx policy",
        "obs_shape": policy.obs_shape,
        "num_actions": policy.network.num_actions,
        "config": config_to_dict(policy.config),
        "arrays": {name: {"shape": leaf.shape, "dtype": str(leaf.dtype)} for name, leaf in arrays.items()},
    }
    try:
        save_file(arrays, path)
        path.with_suffix(".json").write_text(json.dumps(described, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}.") from error


def import_policy(path: str | Path, epsilon: float = 0.0) -> Policy:
    """The policy that `export_policy` wrote. Raises `UserError` where the files are damaged or something else."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = Path(path)
    description = path.with_suffix(".json")
    try:
        described = json.loads(description.read_text())
        config = config_from_dict(described["config"])
        arrays = load_file(path)
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{path} and {description} are no policy of pqn_eqx, or damaged: {error}.") from error
    env = config.env.build(1)
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), _abstract_network(config, env, 1)
    )
    wanted = {name: tuple(leaf.shape) for name, leaf in name_arrays(like).items()}
    found = {name: leaf.shape for name, leaf in arrays.items()}
    if wanted != found:
        different = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise UserError(f"{path} does not fit {description}: {', '.join(different[:5])}.")
    network = put_arrays({name: jnp.asarray(leaf) for name, leaf in arrays.items()}, like)
    return Policy(network, config.loss.build(), env.obs_shape, config, epsilon)
