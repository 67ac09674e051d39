"""What a reset rule costs: environment steps per second with random actions, as a share of the bare step's.

    python -m benchmarks.resets --env Craftax-Classic-Symbolic-v1 --num-envs 128

The bare step never resets (its worlds go on past their end). All programs of a line run alternately in one process;
the ratio is the median over the rounds.
"""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import tyro

from pqn_eqx.cache import enable_compilation_cache
from pqn_eqx.envs.craftax import CraftaxConfig, CraftaxName
from pqn_eqx.envs.resets import FullResetConfig, OptimisticResetConfig, ResetRule
from pqn_eqx.envs.vectorized import VectorizedEnvironment


class NoReset(ResetRule):
    """The bare step: finished worlds go on."""

    def __call__(self, make, done, worlds, keys):
        return worlds


@dataclasses.dataclass(frozen=True)
class Options:
    """Ratios of environment steps per second: reset rules against the bare step."""

    env: CraftaxName = "Craftax-Classic-Symbolic-v1"
    """The environment."""
    num_envs: int = 128
    """Environments of a member."""
    members: tuple[int, ...] = (1, 4)
    """Sizes of the population to measure."""
    num_steps: int = 200
    """Steps of one timed call."""
    warmup_steps: int = 500
    """Steps taken first, so that episodes end at their usual rate."""
    rounds: int = 5
    """Alternating rounds; the median counts."""
    block_size: int | None = None
    """Worlds built at once; the rules' default if not given."""


def program(env: VectorizedEnvironment, num_members: int, num_envs: int):
    """Compiled functions (reset, advance) of a population; `advance` takes a number of steps and random actions."""
    index = jnp.arange(num_envs)

    def member_keys(key):
        return jax.vmap(lambda i: jax.random.fold_in(key, i))(index)

    def advance(num_steps, key, state):
        def step(i, state):
            action_key, env_key = jax.random.split(jax.random.fold_in(key, i))
            actions = jax.random.randint(action_key, (num_envs,), 0, env.num_actions)
            return env.step(state, actions, member_keys(env_key))[0]

        return jax.lax.fori_loop(0, num_steps, step, state)

    keys = jax.random.split(jax.random.key(0), num_members)
    state = jax.jit(jax.vmap(lambda key: env.reset(member_keys(key))[0]))(keys)
    compiled = jax.jit(jax.vmap(advance, in_axes=(None, 0, 0)), donate_argnums=2).lower(1, keys, state).compile()
    return keys, state, compiled


def main(options: Options) -> None:
    enable_compilation_cache()
    simulator = CraftaxConfig(name=options.env).simulator()
    rules = {
        "none": NoReset(),
        "full": FullResetConfig(options.block_size).build(options.num_envs),
        "optimistic": OptimisticResetConfig(block_size=options.block_size).build(options.num_envs),
    }
    for num_members in options.members:
        runs = {}
        for name, rule in rules.items():
            keys, state, advance = program(VectorizedEnvironment(simulator, rule), num_members, options.num_envs)
            state = jax.block_until_ready(advance(options.warmup_steps, keys, state))
            runs[name] = (keys, state, advance)
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, (keys, state, advance) in runs.items():
                start = time.perf_counter()
                state = jax.block_until_ready(advance(options.num_steps, keys, state))
                steps = num_members * options.num_envs * options.num_steps
                rates[name].append(steps / (time.perf_counter() - start))
                keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
                runs[name] = (keys, state, advance)
        print(f"{options.env}, {num_members} members x {options.num_envs} environments")
        for name in rules:
            ratios = [a / b for a, b in zip(rates[name], rates["none"], strict=True)]
            print(
                f"  {name:<10} {statistics.median(rates[name]):>9,.0f} steps/s   "
                f"{statistics.median(ratios):.2f} x bare ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main(tyro.cli(Options))
