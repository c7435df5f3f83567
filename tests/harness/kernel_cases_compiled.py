"""What the compiled kernels are made of, as JSON: run in a process without Triton's interpreter."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import unhinted_kernel
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend

from harness.kernels.compile import TARGETS, Variant, compile_variant, source_of, variants


def unhinted() -> Variant:
    """Negative control: a peer's row read without the alignment hint."""
    return Variant("unhinted", unhinted_kernel.copy_row, {"C": 2048})


def fault_with_ones(variant: Variant) -> str | None:
    """What Triton says of the kernel where every integer argument is 1, which a launch then compiles in as a constant: rank
    1, one token, room for one. Its own IR only, so that all kernels take a second."""
    integers = [name for name, kind in source_of(variant).signature.items() if kind == "i32"]
    source = source_of(replace(variant, constants={**variant.constants, **dict.fromkeys(integers, 1)}))
    target = TARGETS["sm_90"]
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options({"num_warps": variant.warps, "num_stages": variant.stages})
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    except Exception as error:
        return str(error)
    return None


def main() -> None:
    found: dict[str, dict[str, Any]] = {}
    for variant in [*variants(), unhinted()]:
        for target in variant.targets if variant.name != "unhinted" else ("sm_90",):
            result = asdict(compile_variant(variant, target))
            result["peer"] = variant.peer
            if not variant.peer and variant.name not in ("barrier", "unhinted"):
                result.pop("assembly")
            found[f"{variant.name}-{target}"] = result
    ones = {variant.name: fault_with_ones(variant) for variant in variants()}
    print(json.dumps({"compiled": found, "ones": ones}))


if __name__ == "__main__":
    main()
