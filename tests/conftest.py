"""What every test shares: emulated devices, the compilation cache and small environments with known values."""

import os

# Before JAX starts: eight devices on one CPU, so that distribution is tested on any machine.
# Programs here run for moments and compile for seconds, so the compiler is told not to try hard.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        os.environ.get("XLA_FLAGS", ""),
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gc

import jax
import pytest

from pqn_eqx.cache import enable_compilation_cache
from pqn_eqx.envs.craftax import CraftaxConfig, CraftaxSimulator

enable_compilation_cache()


@pytest.fixture(scope="module", autouse=True)
def programs_of_a_module():
    """Every module leaves its compiled programs behind it: a thousand of them in one process make XLA fall over."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def craftax_classic() -> CraftaxSimulator:
    """Craftax-Classic's simulator: it compiles for most of a minute, so all tests share it and its programs."""
    return CraftaxConfig(name="Craftax-Classic-Symbolic-v1").simulator()
