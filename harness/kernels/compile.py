"""Every kernel compiled for GPUs that need not be here: machine code, registers, spills.

    python -m harness.kernels.compile --out results/kernels.md

One `Variant` is a kernel with the sizes it has in a run (rows of 2,048 bf16, 8 ranks, experts of Qwen3-30B-A3B).
Registers and spills come from the compiled code itself: cuobjdump on NVIDIA's, the metadata of AMD's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import align, barrier, counting, exchange, grouped, home, rank_tokens, sag, scores, srs
from .peers import step_rows

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
INT64 = "x_table z_table o_table ids_table pad_table perm slot owner starts counts start_1 token earlier_row chain_row"
INT32 = (
    "pulled epochs status table sorted_places block_slot blocks entries_list tokens_list limit_1 slots score row keys "
    "row_of token_score chain_score held"
)
BF16 = "residual norm_weight out normed x w"
INT32_VALUES = "rank tokens span assignments entries capacity weight drop"
TYPES = {
    **dict.fromkeys(INT64.split(), "*i64"),
    **dict.fromkeys(INT32.split(), "*i32"),
    **dict.fromkeys(BF16.split(), "*bf16"),
    **dict.fromkeys(INT32_VALUES.split(), "i32"),
    "eps": "fp32",
    "ids_out": "*i16",
    **dict.fromkeys(["weights", "token_sure", "chain_sure"], "*fp32"),
}
OTHER_TYPES = {"align_kernel": {"slot": "*i32", "counts": "*i32"}, "score_kernel": {"slots": "*i16"}}


@dataclass(frozen=True)
class Variant:
    """A kernel with its compile-time constants, for the targets where it is launched.

    rows: one row of 256 x 16 bytes at a time; peer: of peers, by address, behind the fused barrier.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int = 8
    stages: int = 3
    rows: bool = False
    peer: bool = False
    targets: tuple[str, ...] = tuple(TARGETS)


@dataclass(frozen=True)
class Compiled:
    """registers of a thread, spilled registers or bytes, shared_bytes; assembly: PTX, or AMD's."""

    registers: int
    spills: int
    shared_bytes: int
    assembly: str


def pulls(name: str, kernel: Any, constants: dict[str, Any]) -> Variant:
    """A variant that waits for its peers, then reads their rows."""
    return Variant(name, kernel, constants, rows=True, peer=True)


def variants() -> list[Variant]:
    """Each kernel, with and without what can be switched."""
    wide = {"H": 2048, "BLOCK_H": 2048}
    waits = {"W": 8, "W_PADDED": 8, "SYNC": True, "SPIN_LIMIT": 0}
    shuffle = {**waits, "EXIT": False}
    sort = {"TILE": counting.TILE_ELEMENTS // 8, "BINS": 8, "ROWS": 8, "COUNTED": False}
    aligned = {"S": 128, "BLOCK_M": 128, "TILE": counting.TILE_ELEMENTS // 128, "BINS": 128, "ROWS": 64}
    served = {"SLOTS_PER_RANK": 16, "K": 8, **wide, **waits}
    up, down = {"K": 2048, "N": 768, "GATED": True}, {"K": 768, "N": 2048, "GATED": False}
    rows, rows_of_all = {"ROWS": step_rows(4096)}, {"ROWS": step_rows(4096, peers=8)}
    sag_row = {"C": 2048, "BLOCK_C": 2048, **rows, **shuffle}
    by_assignment, by_token = (
        {**served, "DEDUP": False, "OWN_ONLY": False},
        {**served, "DEDUP": True, "OWN_ONLY": False},
    )
    own = {**served, "DEDUP": False, "OWN_ONLY": True, "SYNC": False}
    looked_up = {"K": 8, "W": 8, "W_PADDED": 8, "TILE": scores.TILE, "LOOKS_BACK": True}
    made = [
        pulls("srs", srs.srs_kernel, {**wide, **rows_of_all, **shuffle, "RESIDUAL": False, "NORM": False}),
        pulls(
            "srs, residual and norm", srs.srs_kernel, {**wide, **rows_of_all, **shuffle, "RESIDUAL": True, "NORM": True}
        ),
        pulls("sag", sag.sag_kernel, {**sag_row, "IDS": 0, "IDS_PADDED": 1}),
        pulls("sag, 8 ids", sag.sag_kernel, {**sag_row, "IDS": 8, "IDS_PADDED": 8}),
        Variant("barrier", barrier.barrier_kernel, {"W": 8, "W_PADDED": 8, "SPIN_LIMIT": 1 << 24}, warps=4),
        pulls("pull", exchange.pull_kernel, {"LIMIT_TIMES": 128, "CHOICES": 8, **wide, **rows, **waits}),
        pulls("combine by assignment", exchange.combine_kernel, by_assignment),
        pulls("combine by token", exchange.combine_kernel, by_token),
        Variant("sum of own answers", exchange.combine_kernel, own, rows=True),
        Variant("count keys", counting.count_kernel, {"TILE": sort["TILE"], "BINS": 8}),
        Variant("rank tokens, one launch", rank_tokens.rank_kernel, {"W": 8, **sort}),
        Variant("rank tokens, second launch", rank_tokens.rank_kernel, {"W": 8, **sort, "ROWS": 64, "COUNTED": True}),
        Variant("align blocks", align.align_kernel, {**aligned, "COUNTED": True}),
        Variant("look up scores", scores.score_kernel, looked_up, warps=4),
        Variant("assign homes", home.home_kernel, home.constants(8, 4096)),
    ]
    tilings = {
        "128 x 256": grouped.WIDE,
        "128 x 128": grouped.PREFILL,
        "64 x 128": grouped.MIDDLE,
        "16 x 128": grouped.DECODE,
    }
    for kind, tiling in tilings.items():
        targets = ("sm_90", "sm_100") if tiling is grouped.WIDE else tuple(TARGETS)
        for name, sizes in (("gate and up", {**up, "ROWS": True}), ("down", {**down, "ROWS": False})):
            constants = {**sizes, **tiling.blocks(bool(sizes["GATED"])), "UPCAST": False}
            named = f"{name}, {kind}"
            made.append(Variant(named, grouped.grouped_kernel, constants, tiling.warps, tiling.stages, targets=targets))
    return made


def source_of(variant: Variant) -> ASTSource:
    """The kernel with its constants; pointers begin at multiples of 16 bytes."""
    kernel = variant.kernel
    names = kernel.arg_names
    types = TYPES | OTHER_TYPES.get(kernel.fn.__name__, {})
    signature = {name: "constexpr" if name in variant.constants else types[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    return ASTSource(fn=kernel, signature=signature, constexprs=variant.constants, attrs=aligned)


def compile_variant(variant: Variant, target: str) -> Compiled:
    """Compile for one of TARGETS; needs no GPU. Not in a process that chose Triton's interpreter."""
    source = source_of(variant)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    if target == "sm_89":  # 99 KiB of shared memory: as Tiling.fitting
        options["num_stages"] -= 1
    if target.startswith("gfx"):  # 64 KiB of shared memory; 64 lanes a warp, so that half as many move a row
        options = {"num_warps": variant.warps // 2 if variant.rows else variant.warps, "num_stages": 2}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    if target.startswith("gfx"):
        return _amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    return _nvidia(compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata.shared)


def _amd(assembly: str, shared: int) -> Compiled:
    def of(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly).group(1))  # type: ignore[union-attr]

    return Compiled(of("vgpr_count"), of("vgpr_spill_count") + of("sgpr_spill_count"), shared, assembly)


def _nvidia(ptx: str, cubin: bytes, shared: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [str(_tool("cuobjdump")), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK", "LOCAL"))  # type: ignore[union-attr]
    return Compiled(registers, stack + local, shared, ptx)


def _tool(name: str) -> Path:
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name


def table() -> str:
    """The committed table: registers / spills / shared KiB of every variant and target."""
    made = variants()
    lines = [
        "# Kernels compiled",
        "",
        f"`python -m harness.kernels.compile --out results/kernels.md`, Triton {triton.__version__}, no GPU needed.",
        "Rows of 2,048 bf16, 8 ranks, experts of 2,048 x 768. Each cell: registers of a thread / spilled (bytes on NVIDIA,",
        "registers on AMD) / shared memory in KiB. Products by the rows and columns of a block, see `tiling_of`.",
        "",
        "| kernel | warps | " + " | ".join(TARGETS) + " |",
        "| --- | --- |" + " --- |" * len(TARGETS),
    ]
    for variant in made:
        cells = []
        for target in TARGETS:
            if target not in variant.targets:
                cells.append("not used")
                continue
            result = compile_variant(variant, target)
            cells.append(f"{result.registers} / {result.spills} / {result.shared_bytes / 1024:.1f}")
        lines.append(f"| {variant.name} | {variant.warps} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m harness.kernels.compile",
        description="Compile every kernel and write the table of registers and spills.",
    )
    parser.add_argument("--out", type=Path, default=Path("results/kernels.md"))
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(table())
    print(out)


if __name__ == "__main__":
    main()
