"""pqn_eqx: Q-learning at scale in JAX and Equinox.

The package is a set of flat modules; import what you need from where it is defined (``from pqn_eqx.pqn import PQN``).
This file imports nothing, so that reading a run directory or drawing a figure never starts JAX; `pqn_eqx.load_policy`
is there all the same, from `pqn_eqx.policy` once it is asked for.
"""

__version__ = "0.1.0"


def __getattr__(name: str):
    if name == "load_policy":
        from pqn_eqx.policy import load_policy

        return load_policy
    raise AttributeError(f"module 'pqn_eqx' has no attribute {name!r}")
