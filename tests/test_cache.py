"""The persistent compilation cache."""

from pathlib import Path

import jax
import pytest

from pqn_eqx import cache


@pytest.fixture
def jax_cache_settings(monkeypatch):
    """The settings as in a new process with no folder chosen; put back afterwards. Nothing compiles in between."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_directory_follows_the_desktop_standard(monkeypatch):
    """Red where $XDG_CACHE_HOME is not heard, or an empty one puts the cache into the working directory."""
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast/cache")
    assert cache.cache_directory() == Path("/fast/cache/pqn_eqx/jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache.cache_directory() == Path("/home/someone/.cache/pqn_eqx/jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_directory() == Path("/home/someone/.cache/pqn_eqx/jax")


def test_enabling_makes_the_folder_and_tells_jax(monkeypatch, tmp_path, capsys, jax_cache_settings):
    """Red where the cache stays off, or most programs are too quick to compile to be kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "pqn_eqx" / "jax")
    assert (tmp_path / "pqn_eqx" / "jax").is_dir()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.5
    assert capsys.readouterr().err == ""


def test_the_users_own_folder_is_kept(monkeypatch, tmp_path, jax_cache_settings):
    """Red where the folder of JAX_COMPILATION_CACHE_DIR is replaced by ours."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    cache.enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")
    assert not (tmp_path / "ours").exists()


def test_a_folder_that_cannot_be_made_costs_a_line(monkeypatch, tmp_path, capsys, jax_cache_settings):
    """Red where a read-only home stops training, or the user is not told why every run compiles."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache.enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    error = capsys.readouterr().err
    assert error.startswith("Compiling without a cache: ")
    assert error.count("\n") == 1


def test_a_folder_that_cannot_be_written_costs_a_line(monkeypatch, tmp_path, capsys, jax_cache_settings):
    """Red where a folder that exists and is read-only is given to JAX, which then warns at every program."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache.os, "access", lambda path, mode: False)
    cache.enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    assert "is not writable" in capsys.readouterr().err
