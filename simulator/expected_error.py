"""How far routing=expected is from per-token routing: the same configuration simulated both ways.

    python -m simulator.expected_error [key=value ...]

Prints a table of the served (or batched) figures with the relative error of the expected ones, and the seconds that
each simulation took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from semmoe.builder import RunBuilder
from semmoe.errors import UserError

from .app import simulate

SHOWN = (
    "throughput_rps",
    "ttft_ms",
    "ttft_ms_p90",
    "tpot_ms",
    "tpot_ms_p90",
    "e2e_ms",
    "step_ms",
    "layer_ms",
    "dispatch_ms",
    "experts_ms",
    "combine_ms",
    "lar_replayed",
    "fan_out_replayed",
    "active_experts",
    "imbalance_step",
)


def both(overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], float, float]:
    """Rows of the configuration with traced and with expected routing, and the seconds that each took after a warm-up."""
    from semmoe.config import compose_one

    builder, rows, seconds = RunBuilder(), [], []
    for routing in ("traced", "expected"):
        config = compose_one([*overrides, "planned_folds=0", f"routing={routing}"])
        run = builder.build(config)
        simulate(run)  # compiles
        start = time.perf_counter()
        rows.append(simulate(run))
        seconds.append(time.perf_counter() - start)
    return rows[0], rows[1], seconds[0], seconds[1]


def table(traced: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table: figure, traced, expected, error in percent."""
    lines = ["| figure | traced | expected | error |", "| --- | --- | --- | --- |"]
    for name in SHOWN:
        if traced.get(name) is not None and expected.get(name) is not None and traced[name]:
            error = 100 * (expected[name] / traced[name] - 1)
            lines.append(f"| {name} | {traced[name]:.4g} | {expected[name]:.4g} | {error:+.1f} % |")
    return lines


def main(argv: Sequence[str]) -> int:
    """Print the comparison of one configuration."""
    traced, expected, traced_s, expected_s = both(argv)
    print("\n".join(table(traced, expected)))
    print(
        f"\ntraced {traced_s:.2f} s, expected {expected_s:.2f} s for {traced['tokens']} tokens in {traced['steps']} steps"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"expected_error: {error}", file=sys.stderr)
        sys.exit(2)
