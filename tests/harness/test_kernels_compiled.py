"""Every kernel compiled for GPUs that are not here: nothing spilled, peers read with 128 bits, barriers at system scope."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
NVIDIA, AMD = ("sm_80", "sm_89", "sm_90", "sm_100"), "gfx942"
SHARED_KIB = {
    "sm_80": 163,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "gfx942": 64,
}  # of one block, as the vendors state
if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
    pytest.skip("targets are compiled with Triton 3.6 or newer", allow_module_level=True)


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    """Of a process of its own without the interpreter, which another test may have chosen."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    here = str(Path(__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), here, environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "kernel_cases_compiled"], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def compiled(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By "kernel-target"."""
    return cases["compiled"]


def peers(compiled: dict[str, dict[str, Any]], target: str) -> dict[str, str]:
    found = {k: v["assembly"] for k, v in compiled.items() if k.endswith(target) and v["peer"]}
    assert len(found) >= 7
    return found


def waiting(compiled: dict[str, dict[str, Any]], target: str) -> dict[str, str]:
    """What waits for its peers: those, and the barrier alone."""
    return peers(compiled, target) | {"barrier": compiled[f"barrier-{target}"]["assembly"]}


def test_every_kernel_fits_every_target_without_a_spill(compiled: dict[str, dict[str, Any]]) -> None:
    names = {k.rsplit("-", 1)[0] for k in compiled} - {"unhinted"}
    assert len(names) >= 17
    for name in names:
        for target, most in SHARED_KIB.items():
            result = compiled.get(f"{name}-{target}")
            if result is None:
                assert "128 x 256" in name and target not in ("sm_90", "sm_100")
                continue
            assert result["spills"] == 0, (name, target)
            assert result["shared_bytes"] <= most * 1024, (name, target)
            assert 0 < result["registers"] <= (512 if target == AMD else 255), (name, target)


@pytest.mark.parametrize("target", NVIDIA)
def test_nvidia_reads_and_writes_peer_rows_with_128_bits(compiled: dict[str, dict[str, Any]], target: str) -> None:
    for name, ptx in peers(compiled, target).items():
        # 8 warps x 32 lanes x 16 bytes are a row of 2,048 bf16; a step reads 8: one of each peer, or of anybody's
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= 8, name
        written = 1 if name.startswith(("srs", "combine")) else 8
        assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) >= written, name
        if "ids" not in name:  # k int16 ids have lanes of their own
            assert not re.search(r"(ld|st)\.global\S*\.b16", ptx), name


@pytest.mark.parametrize("target", NVIDIA)
def test_nvidia_barriers_release_and_acquire_at_system_scope(compiled: dict[str, dict[str, Any]], target: str) -> None:
    for name, ptx in waiting(compiled, target).items():
        assert "atom.global.sys.release.exch.b32" in ptx, name
        assert "atom.global.sys.acquire.add.u32" in ptx, name


def test_amd_reads_rows_with_128_bits_and_flushes_to_the_system_at_the_barrier(
    compiled: dict[str, dict[str, Any]],
) -> None:
    for name, assembly in peers(compiled, AMD).items():
        assert "load_dwordx4" in assembly and "store_dwordx4" in assembly, name
        assert "store_short" not in assembly or "ids" in name, name
    for name, assembly in waiting(compiled, AMD).items():
        assert "buffer_wbl2 sc0 sc1" in assembly and "buffer_inv sc0 sc1" in assembly, name  # sc0 sc1: system scope
        assert re.search(r"global_atomic_swap .* sc1", assembly), name


def test_without_the_alignment_hint_reads_fall_apart(compiled: dict[str, dict[str, Any]]) -> None:
    """Negative control: the same row read through an address without the hint."""
    assert not re.search(r"ld\.global\S*\.v4\.b32", compiled["unhinted-sm_90"]["assembly"])


def test_arguments_that_a_launch_compiles_in_as_constants_are_taken(cases: dict[str, Any]) -> None:
    """Triton makes a constant of an integer argument that is 1; a tensor's methods are missing there."""
    assert len(cases["ones"]) >= 17
    assert {name: fault for name, fault in cases["ones"].items() if fault} == {}


def test_the_committed_table_lists_every_kernel(compiled: dict[str, dict[str, Any]]) -> None:
    rows = [line.split("|")[1].strip() for line in (ROOT / "results" / "kernels.md").read_text().splitlines()[8:]]
    assert set(rows) == {k.rsplit("-", 1)[0] for k in compiled} - {"unhinted"}
