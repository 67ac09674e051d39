"""Which module may import which: the direction in which the package is read and changed."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import pqn_eqx

ROOT = Path(pqn_eqx.__file__).parent


def module_name(path: Path) -> str:
    parts = ("pqn_eqx", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def imported(node: ast.AST, module: str) -> set[str]:
    """The full names in the import statements below `node`: of `from a import b`, both a and a.b."""
    found = set()
    for statement in ast.walk(node):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            base = statement.module or ""
            if statement.level:
                package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
                parents = package.split(".")[: len(package.split(".")) - statement.level + 1]
                base = ".".join([*parents, *filter(None, [base])])
            found |= {base} | {f"{base}.{alias.name}" for alias in statement.names}
    return found


def own_imports(module: str) -> set[str]:
    """The modules of the package that `module` names, anywhere in its file."""
    return {name for name in imported(tree(module), module) if name in FILES and name not in ("pqn_eqx", module)}


def reachable(module: str) -> set[str]:
    """Everything of the package that is imported with `module`, however far away."""
    found, waiting = set(), [module]
    while waiting:
        new = own_imports(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def within(names: set[str], *parts: str) -> set[str]:
    """Those of `names` that are, or lie below, one of `parts` of the package."""
    return {n for n in names for part in parts if n == f"pqn_eqx.{part}" or n.startswith(f"pqn_eqx.{part}.")}


def below(package: str) -> list[str]:
    return [module for module in FILES if module.startswith(f"pqn_eqx.{package}.")]


def test_the_package_is_read():
    """Red where the tests below pass because they look at nothing."""
    assert len(FILES) > 25
    assert "pqn_eqx.config" in own_imports("pqn_eqx.serialization")
    assert "pqn_eqx.episodes" in own_imports("pqn_eqx.trainer")
    assert "pqn_eqx.plot" in own_imports("pqn_eqx.loggers")
    assert "pqn_eqx.run_directory" in reachable("pqn_eqx.train")
    assert len(below("envs")) >= 5
    assert len(below("networks")) >= 5


@pytest.mark.parametrize("name", ["returns", "losses", "exploration", "control_flow", "minibatches"])
def test_functions_of_arrays_import_nothing_else(name):
    """Red where a formula comes to depend on the environments or the training that use it."""
    allowed = {"pqn_eqx.errors", "pqn_eqx.config_groups"}
    assert own_imports(f"pqn_eqx.{name}") - allowed == set()


@pytest.mark.parametrize("module", below("networks"))
def test_networks_know_nothing_of_training(module):
    """Red where a network can no longer be used without environments, or by another algorithm."""
    forbidden = (
        "envs",
        "optimizers",
        "rollout",
        "losses",
        "pqn",
        "trainer",
        "evaluate",
        "metrics",
        "config",
        "sharding",
    )
    assert within(reachable(module), *forbidden) == set()


@pytest.mark.parametrize("module", below("envs"))
def test_environments_know_nothing_of_agents(module):
    """Red where an environment comes to depend on what acts in it."""
    forbidden = ("networks", "pqn", "rollout", "losses", "optimizers", "trainer", "evaluate", "config")
    assert within(reachable(module), *forbidden) == set()


def test_the_algorithm_does_not_know_who_runs_it():
    """Red where PQN can no longer be run by another loop, or without files."""
    forbidden = (
        "trainer",
        "loggers",
        "callbacks",
        "config",
        "run_directory",
        "command_line",
        "serialization",
        "train",
        "evaluate",
    )
    assert within(reachable("pqn_eqx.pqn"), *forbidden) == set()


def test_the_trainer_knows_neither_algorithm_nor_configuration():
    """Red where the loop can run PQN alone."""
    forbidden = ("pqn", "config", "loggers", "run_directory", "command_line", "serialization", "train", "optimizers")
    assert within(reachable("pqn_eqx.trainer"), *forbidden) == set()


def test_events_do_not_know_their_listeners():
    """Red where the interface between loop and listeners comes to depend on either."""
    assert within(reachable("pqn_eqx.callbacks"), "trainer", "loggers", "run_directory", "pqn", "config") == set()


@pytest.mark.parametrize("name", ["plot", "run_directory"])
def test_readers_of_runs_import_no_jax(name):
    """Red where a reader of run directories reaches a module that imports JAX, by any way."""
    for module in {f"pqn_eqx.{name}"} | reachable(f"pqn_eqx.{name}"):
        names = {imported_name.partition(".")[0] for imported_name in imported(tree(module), module)}
        assert names & {"jax", "jaxlib", "equinox", "optax", "jaxtyping"} == set()


def test_the_package_imports_nothing_on_its_own():
    """Red where `import pqn_eqx` starts JAX."""
    statements = [n for n in at_import(tree("pqn_eqx")) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert statements == []


def test_only_the_command_imports_the_command():
    """Red where the entry points are imported by what they start."""
    for module in FILES:
        if module != "pqn_eqx.submit":
            assert within(own_imports(module), "train", "submit") == set()
        if module not in ("pqn_eqx.train", "pqn_eqx.submit"):
            assert within(own_imports(module), "command_line") == set()


def test_nothing_imports_what_lies_outside_the_package():
    """Red where the package needs an experiment, a benchmark or a test to be there."""
    outside = {"experiments", "benchmarks", "tests"}
    for module in FILES:
        parts = {part for name in imported(tree(module), module) for part in name.split(".")[:2]}
        assert parts & outside == set(), module


def test_imports_have_no_cycle():
    """Red where two modules need one another, even inside a function: neither can be understood first."""
    for module in FILES:
        assert module not in reachable(module), module


def test_one_file_names_mesh_axes():
    """Red where a collective or a layout is written outside sharding.py, so that distribution is in two places."""
    collectives = {
        "psum",
        "pmean",
        "pmax",
        "pmin",
        "all_gather",
        "all_to_all",
        "ppermute",
        "psum_scatter",
        "pbroadcast",
    }
    layouts = {"PartitionSpec", "NamedSharding", "shard_map", "pmap", "pbroadcast", "pvary", "pcast"}
    axes = {"axis_index", "axis_size", "axis_name", "spmd_axis_name", "MEMBER", "ENV"}
    words = collectives | layouts | axes
    for module in FILES:
        nodes = list(ast.walk(tree(module)))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        used |= {node.arg for node in nodes if isinstance(node, ast.keyword)}
        used |= {name.rpartition(".")[2] for name in imported(tree(module), module)}
        if module == "pqn_eqx.sharding":
            assert {"psum", "pmean", "PartitionSpec", "shard_map"} <= used
        elif module == "pqn_eqx.control_flow":
            # The axis of a vmap of its own, which is none of the mesh's.
            assert used & words == {"pmean", "axis_name"}
        else:
            assert used & words == set(), module


def at_import(node: ast.AST) -> list[ast.AST]:
    """The statements that run when a module is imported: all but those inside functions."""
    found = []
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found += [child, *at_import(child)]
    return found


def test_optional_packages_are_imported_when_chosen():
    """Red where every run imports every optional package, or cannot start without one."""
    optional = {"gymnax", "craftax", "flax", "wandb", "submitit"}
    for module in FILES:
        for node in at_import(tree(module)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                tops = {name.partition(".")[0] for name in imported(node, module)}
                assert tops & optional == set(), module


def test_starting_the_command_imports_no_optional_package():
    """Red where some way round, such as a dependency's, the command waits for packages that it may not need."""
    code = "import sys, pqn_eqx.train; print(sorted({'gymnax', 'craftax', 'matplotlib', 'wandb'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"
