"""How near each placement comes to the optimum of its own objective, on small cases cut from routes, as a table.

python -m semmoe.placement.objective_report --out results/placement_objectives.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..evaluate import load
from ..files import write_atomically
from ..trace import RoutingTrace
from ..trials import Policy
from .instances import CHOICES, LAYERS, REQUESTS, SHAPES, problem_of, small_cases
from .objectives import OBJECTIVES, gaps


def rows(trace: RoutingTrace, count: int) -> list[str]:
    lines = []
    cases = list(small_cases(trace, count))
    for name, objective in OBJECTIVES.items():
        option = name.split(",")[0]
        policy = Policy(option, {"load_weight": 0.0} if option == "semantic" else {}).make("placement")
        for nodes in (1, 2) if name == "moetuner, tail" else (1,):
            given = [
                problem_of(case.profile.trace, case.ep_size, "request", case.seed, nodes=nodes)
                for case in cases
                if case.ep_size % nodes == 0
            ]
            found = gaps(policy, objective, given)
            near = int((found[:, 0] <= 0.01).sum())
            label = name + (f", {nodes} nodes" if nodes > 1 else "")
            lines.append(
                f"| {label} | {objective.name} | {found[:, 0].mean():.2%} | {found[:, 0].max():.2%} | {near} of {len(given)} | "
                f"{found[:, 1].mean():.1%} | {int((found[:, 1] > found[:, 0]).sum())} of {len(given)} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m semmoe.placement.objective_report", description=__doc__)
    parser.add_argument("--trace", action="append", help="tiny, gptoss (may be repeated; default: tiny)")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/placement_objectives.md"))
    options = parser.parse_args()
    names = options.trace or ["tiny"]
    text = [
        "# Every placement against the optimum of its own objective",
        "",
        "Made by `python -m semmoe.placement.objective_report "
        + " ".join(f"--trace {name}" for name in names)
        + f" --cases {options.cases}`.",
        "",
        "Gap = (value - optimum) / optimum of what the policy itself minimises, the optimum by enumeration;",
        f"{options.cases} cases each of "
        + " and ".join(f"{experts} experts on {ranks} ranks" for experts, ranks in SHAPES)
        + f", {LAYERS} layers, {REQUESTS} requests, top-{CHOICES}, cut from the routes named.",
        "`eplb` is the published algorithm, whose output is fixed; `load_balanced` stands for the same aim. `semantic` runs",
        "without its load term. The tail of `moetuner` is that of the clusters which its first program made.",
    ]
    head = "| policy | minimises | mean gap | worst | within 1 % | random: mean gap | beats random |"
    for name in names:
        text += ["", f"## {name}", "", head, "|" + " --- |" * 7, *rows(load(name, None)[0], options.cases)]
    write_atomically(options.out, "\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
