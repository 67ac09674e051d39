"""JAX's persistent compilation cache: a program is compiled once per machine and jax version, not once per run."""

import os
import sys
from pathlib import Path

import jax


def cache_directory() -> Path:
    """Where compiled programs are kept: ``$XDG_CACHE_HOME/pqn_eqx/jax``, by default below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pqn_eqx" / "jax"


def enable_compilation_cache() -> None:
    """Turn the cache on, unless the user already chose a folder for it (JAX_COMPILATION_CACHE_DIR).

    A folder that cannot be written costs the cache and nothing else; a line on stderr says so.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        directory = cache_directory()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK):
                raise PermissionError(f"{directory} is not writable")
        except OSError as error:
            print(f"Compiling without a cache: {error}", file=sys.stderr)
            return
        jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
