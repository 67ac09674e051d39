"""Missing packages: what the user is told."""

import sys

import pytest

from pqn_eqx.errors import ConfigError
from pqn_eqx.packages import import_or_explain


def test_import_gives_the_module():
    """Red if the package instead of the module is given."""
    assert import_or_explain("os.path", extra=None, field="env") is sys.modules["os.path"]
    assert import_or_explain("xml.dom", extra=None, field="env").__name__ == "xml.dom"


def test_missing_package_names_the_extra():
    """Red if a missing package ends in a bare ImportError, or the extra that brings it is not named."""
    with pytest.raises(
        ConfigError, match=r"^env: the package no_such_package is not installed.*pip install 'pqn-eqx\[worlds\]'"
    ):
        import_or_explain("no_such_package.worlds", extra="worlds", field="env")
    with pytest.raises(ConfigError, match=r"no_such_package is not installed.*--force-reinstall pqn-eqx$"):
        import_or_explain("no_such_package", extra=None, field="env")


def test_missing_dependency_of_a_package_is_named(tmp_path, monkeypatch):
    """Red if the package is called missing where it is one that it imports itself."""
    (tmp_path / "half_installed.py").write_text("import no_such_dependency.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="half_installed cannot be imported because no_such_dependency is missing"):
        import_or_explain("half_installed", extra="worlds", field="env")


def test_an_error_inside_the_package_keeps_its_traceback(tmp_path, monkeypatch):
    """Red if every failure of an import is reported as a missing package."""
    (tmp_path / "broken_package.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        import_or_explain("broken_package", extra=None, field="env")
