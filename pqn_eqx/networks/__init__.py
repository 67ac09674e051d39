"""Equinox modules that map an observation to the outputs of every action. They know no environment and no optimiser."""
