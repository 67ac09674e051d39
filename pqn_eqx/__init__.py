"""pqn_eqx: Q-learning at scale in JAX and Equinox.

The package is a set of flat modules; import what you need from where it is defined (``from pqn_eqx.pqn import PQN``).
This file imports nothing, so that reading a run directory or drawing a figure never starts JAX.
"""

__version__ = "0.1.0"
