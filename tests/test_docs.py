"""What the README and the guide show works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from semmoe import cli

ROOT = Path(__file__).resolve().parents[1]


def python_block(document: str) -> str:
    match = re.search(r"```python\n# (\w+\.py).*?\n(.*?)```", (ROOT / document).read_text(), re.S)
    assert match, f"{document} shows no Python file"
    return match.group(1), match.group(2)


@pytest.mark.parametrize(
    ("document", "target"),
    [
        ("README.md", "placement._target_=my_policy.Mine"),
        ("docs/plugins.md", "token_scheduler._target_=in_order.InOrder"),
    ],
)
def test_the_shown_policy_conforms_and_runs(document, target, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, code = python_block(document)
    (tmp_path / name).write_text(code)
    assert len(code.strip().splitlines()) <= 15
    assert cli.main(["check", target]) == 0
    assert cli.main(["simulate", target, "flow=tp_shuffled", "workload.max_batches=1", "planned_folds=0"]) == 0
    assert "simulated 1 configuration" in capsys.readouterr().out


def test_every_override_in_the_documents_is_a_key_that_exists():
    from semmoe.config import compose_all

    for document in ("README.md", "docs/guide.md", "docs/plugins.md"):
        for line in (ROOT / document).read_text().splitlines():
            match = re.match(r"\s{4}semmoe (simulate|measure|place|calibrate)( .*)?$", line.split("#")[0].rstrip())
            if not match or "..." in line or "NAME" in line:
                continue
            words = (match.group(2) or "").split()
            overrides = [w for w in words if "=" in w and not w.startswith("-")]
            assert compose_all(overrides, multirun="-m" in words), line


def test_every_document_that_is_named_exists():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"`((?:docs|conf|results|tests)/[\w/.]+\.(?:md|yaml|py))`", document.read_text()):
            if not name.startswith("results/runs/"):
                assert (ROOT / name).exists(), f"{document.name} names {name}"
