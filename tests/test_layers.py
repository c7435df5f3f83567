"""The layers of the design: the core knows neither backend, and the backends do not know each other."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
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


def test_planning_and_simulation_import_no_torch():
    for path in [*files("semmoe"), *files("simulator")]:
        assert not imports(path, top_level_only=True) & LAZY_TORCH, f"{path} imports torch when it is loaded"
    code = "import sys; import semmoe.session, semmoe.run, simulator.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_rule_would_be_seen_to_fail(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("def f():\n    from simulator.layer import x\n")
    assert imports(path, top_level_only=False) == {"simulator"}


def test_every_package_of_the_tree_is_in_the_wheel_and_nothing_else():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for package in ("semmoe", "simulator", "harness")
        for path in (ROOT / package).rglob("*.py")
    }
    assert listed == present | {"semmoe.assets", "semmoe.conf"}
