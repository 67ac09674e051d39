"""Environments, batched, with their reset rules. They know no algorithm."""
