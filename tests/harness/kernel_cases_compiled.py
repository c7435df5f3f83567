"""What the compiled kernels are made of, as JSON: run in a process without Triton's interpreter."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import unhinted_kernel

from harness.compile_kernels import Variant, compile_variant, variants


def unhinted() -> Variant:
    """Negative control: a peer's row read without the alignment hint."""
    return Variant("unhinted", unhinted_kernel.copy_row, {"C": 2048})


def main() -> None:
    found: dict[str, dict[str, Any]] = {}
    for variant in [*variants(), unhinted()]:
        for target in variant.targets if variant.name != "unhinted" else ("sm_90",):
            result = asdict(compile_variant(variant, target))
            result["peer"] = variant.peer
            if not variant.peer and variant.name != "unhinted":
                result.pop("assembly")
            found[f"{variant.name}-{target}"] = result
    print(json.dumps(found))


if __name__ == "__main__":
    main()
