"""The layers of the design: the core knows neither backend, and the backends do not know each other."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAZY_TORCH = {"torch", "triton", "transformers", "safetensors", "tokenizers"}


def imports(path: Path, top_level_only: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("semmoe", {"simulator", "harness"}), ("simulator", {"harness"}), ("harness", {"simulator"})],
)
def test_no_package_imports_what_lies_above_or_beside_it(package, forbidden):
    assert files(package)
    for path in files(package):
        if path.relative_to(ROOT).as_posix() == "semmoe/cli.py":
            continue
        assert not imports(path, top_level_only=False) & forbidden, path


ABOVE_THE_LAYER = {  # rooms of the harness that stand above the layer, and who may open their doors
    "harness.bench": [],
    "harness.blocks": ["harness.measure", "harness.preflight", "harness.calibration", "harness.serving"],
    "harness.calibration": ["harness.app", "harness.bench"],
    "harness.serving": ["harness.measure", "harness.calibration"],
}


@pytest.mark.parametrize("room", ABOVE_THE_LAYER)
def test_rooms_above_the_layer_are_imported_by_few(room):
    graph = modules_imported("harness")
    inside = {name for name in graph if name.startswith(f"{room}.")}
    importers = {name for name, imported in graph.items() if imported & inside} - inside
    assert inside
    for allowed in ABOVE_THE_LAYER[room]:
        mine = {name for name in importers if f"{name}.".startswith(f"{allowed}.")}
        assert mine, f"{allowed} does not import {room} any more: take it off the list"
        importers -= mine
    assert not importers, f"{room} is imported by {importers}"


def test_no_modules_of_the_harness_import_each_other_in_a_circle():
    """Imports inside functions count too; those for types alone do not."""
    graph = modules_imported("harness")
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(graph | {"harness.timing": {"harness.layer"}}).prepare()


def modules_imported(package: str) -> dict[str, set[str]]:
    """Of every module of the package those of the package that it imports, anywhere in it but for types alone."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files(package)
    }
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text())
        guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        typed = {id(node) for guard in guards for body in guard.body for node in ast.walk(body)}
        here = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        graph[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & paths.keys()
            if not isinstance(node, ast.ImportFrom) or id(node) in typed:
                continue
            above = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            named = {f"{source}.{alias.name}" for alias in node.names}
            graph[name] |= (named & paths.keys()) or ({source} & paths.keys())
    return graph


def test_planning_and_simulation_import_no_torch():
    for path in [*files("semmoe"), *files("simulator")]:
        assert not imports(path, top_level_only=True) & LAZY_TORCH, f"{path} imports torch when it is loaded"
    code = "import sys; import semmoe.session, semmoe.run, simulator.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_rule_would_be_seen_to_fail(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("def f():\n    from simulator.layer import x\n")
    assert imports(path, top_level_only=False) == {"simulator"}


def test_no_test_imports_another_test_and_helpers_have_names_of_their_own():
    """Which of two files of one name is found depends on the order in which tests are collected."""
    paths = files("tests")
    helpers = [path.stem for path in paths if not path.stem.startswith("test_") and path.stem != "conftest"]
    assert len(paths) > 100 and len(set(helpers)) == len(helpers)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            named += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            tests = [name for name in named if name.split(".")[-1].startswith("test_")]
            assert not tests, f"{path} imports {tests}: what tests share belongs in a file that is no test"


def test_every_package_of_the_tree_is_in_the_wheel_and_nothing_else():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for package in ("semmoe", "simulator", "harness")
        for path in (ROOT / package).rglob("*.py")
    }
    assert listed == present | {"semmoe.assets", "semmoe.conf"}


def test_pytest_finds_the_packages_without_the_working_folder_on_the_path():
    """`pytest`, unlike `python -m pytest`, does not put it there; folders of tests bear the names of the packages."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", "tests/semmoe/test_conformance.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
