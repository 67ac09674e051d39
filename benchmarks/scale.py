"""What a program takes on many devices, without running it: compiled for emulated ones, looked at, thrown away.

    python -m benchmarks.scale                       # 204,800 environments of Craftax on 64 devices
    python -m benchmarks.scale --devices 8 -- cartpole --num-envs 16384

What stands after -- is a command line of pqn_eqx.train; by default the `craftax` preset with 204,800 environments.
Bytes are per device: what it holds between updates, and what an update needs beside it. Compiled for CPUs, whose
temporaries are not those of a GPU to the byte.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence

import tyro


@dataclasses.dataclass(frozen=True)
class Options:
    """Per device: bytes of state, bytes of temporaries, operations; in all: collectives of an update."""

    devices: int = 64
    """Devices to emulate."""
    memory_gb: float = 80.0
    """Memory of a device, to say how many it takes."""


DEFAULT = ("craftax", "--num-envs", "204800", "--eval.num-envs", "64")


def main(argv: Sequence[str]) -> None:
    argv = list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    options = tyro.cli(Options, prog="python -m benchmarks.scale", args=argv[:split])
    # Before JAX starts.
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={options.devices} {os.environ.get('XLA_FLAGS', '')}"
    )
    report(options, argv[split + 1 :] or DEFAULT)


def report(options: Options, arguments: Sequence[str]) -> None:
    import jax

    from benchmarks.programs import collectives, matrix_flops
    from pqn_eqx.cache import enable_compilation_cache
    from pqn_eqx.command_line import parse
    from pqn_eqx.sharding import describe

    enable_compilation_cache()
    config = parse(arguments)
    trainer = config.build()
    start = time.perf_counter()
    program = trainer.lower_update().compile()
    seconds = time.perf_counter() - start
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None
    assert text is not None
    inputs, state = trainer.abstract_update()
    flops = matrix_flops(jax.make_jaxpr(trainer.programs.advance_function)(inputs, state).jaxpr)
    learner, actors = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part)) for part in (state.learner, state.actors)
    )
    device_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    # Environments are split over devices; the network is not.
    split_bytes = device_bytes - learner
    needed = split_bytes * options.devices / (options.memory_gb * 1e9 - learner)
    print(f"{config.name}: {config.algorithm.num_envs:,} environments, {describe(trainer.mesh)}; {' '.join(arguments)}")
    print(f"  compiled in           {seconds:8.0f} s")
    print("  per device")
    print(f"    state               {memory.argument_size_in_bytes / 1e9:8.3f} GB")
    print(f"    temporaries, peak   {memory.temp_size_in_bytes / 1e9:8.3f} GB")
    print(f"    matrix products     {flops / 1e9:8.1f} GFLOP an update")
    print("  in all")
    print(f"    environments        {actors / 1e9:8.1f} GB ({actors / config.algorithm.num_envs / 1e3:.0f} kB each)")
    print(f"    network, optimiser  {learner / 1e6:8.1f} MB, on every device")
    print(f"    collectives in text {collectives(text)}")
    print(f"  devices of {options.memory_gb:g} GB that would hold it: {max(1, -(-needed // 1)):.0f}")


if __name__ == "__main__":
    main(sys.argv[1:])
