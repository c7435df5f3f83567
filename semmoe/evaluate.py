"""Every policy on equal terms: one table of held-out locality, load and time, as Markdown.

    semmoe evaluate policies --out results/policies.md

Traces: "gptoss" (published GPT-OSS-20B routes, ../shared/data/traces beside the checkout; used where it lies there),
"tiny" (shipped), or a trace file recorded on a model that --model names. Which rows there are: policy_tables.py; what one is
made from: trials.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .config import conf_dir, group_options
from .errors import UserError
from .files import check_writable, write_atomically
from .inputs import ASSETS, check_trace, load_cluster
from .placement.instances import small_cases
from .placement.objectives import OBJECTIVES, gaps
from .plugins import instantiate
from .policy_tables import BAR_ORDERS, ORDERS, bar_rows, table
from .sources.fingerprints import load_fingerprints
from .specs import ModelSpec
from .trace import RoutingTrace
from .trials import Bench, Policy, option

GPTOSS = conf_dir().parent.parent / "shared/data/traces/gptoss20b_mmlu_decode_routes.npz"
BUNDLED = ("gptoss", "tiny")  # traces with a model of their own
PLACEMENTS = [name for name in group_options("placement") if name != "exact"]  # that proves small cases only


def load(name: str, model: str | None) -> tuple[RoutingTrace, ModelSpec]:
    """The trace of this name and the spec of its model."""
    if name == "gptoss":
        trace, model = load_fingerprints(GPTOSS), "gpt-oss-20b"
    elif name == "tiny":
        trace, model = RoutingTrace.load(ASSETS / "traces/tiny_docs.npz"), "tiny"
    elif model is None:
        raise UserError(f"--trace {name} needs --model (one of {', '.join(group_options('model'))})")
    else:
        trace = RoutingTrace.load(name)
    spec: ModelSpec = instantiate(option("model", model), "model")
    check_trace(trace, spec)
    return trace, spec


def own_gaps(trace: RoutingTrace, placements: Sequence[str]) -> dict[str, float]:
    """Mean gap of each placement to the optimum of its own objective, on small cases cut from the trace."""
    cases = list(small_cases(trace, 10))
    policies = {name: Policy(name, {"load_weight": 0.0} if name == "semantic" else {}) for name in placements}
    return {
        name: float(gaps(policy.make("placement"), OBJECTIVES[name], cases)[:, 0].mean())
        for name, policy in policies.items()
        if name in OBJECTIVES
    }


def ints(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def check_options(options: argparse.Namespace) -> None:
    """UserError for what would fail only after a while."""
    for name, least in (("folds", 2), ("halves", 1), ("seed", 0), ("time_limit", 0)):
        if not getattr(options, name) >= least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least {least}")
    for name in options.placements:
        option("placement", name)
    if options.model and all(name in BUNDLED for name in options.trace):
        raise UserError(
            f"--model {options.model} needs a trace of it (--trace FILE); the bundled ones are routes of their own models"
        )
    if options.out:
        check_writable(options.out)


def report(options: argparse.Namespace, command: str) -> Iterator[str]:
    """The whole text each time that a section is done."""
    check_options(options)
    _, cluster = load_cluster(option("cluster", "h100x8"))
    loaded = {name: load(name, options.model) for name in options.trace}
    parts = [
        "# Policies on held-out routes",
        f"Made by `{command}`.",
        f"Attention-TP: {options.folds} folds by request, batches of 512 tokens shuffled over the held-out requests. "
        f"Attention-DP: {options.halves} seeded halves; a request runs its first 64 tokens where round robin put it, is "
        "re-homed once by the experts measured there (its KV cache moves), and all its tokens count; *LAR after head* "
        f"leaves the head out. Rows that name waiting requests are means of {ORDERS} arrival orders, {BAR_ORDERS} in the "
        "bars.",
        "*load*: expert rows of the fullest rank over the mean, over all held-out tokens; *home balance*: the same for "
        "tokens at home; *KB a token*: payload that leaves its rank, all layers, bf16; *KV KB a token*: KV cache of "
        "moved heads, spread over all tokens; *plan ms*: one batch and layer (TP) or all requests (DP), by the clock of "
        "a busy machine; *place CPU s*: placement of all layers, all threads; *gap*: mean distance from the optimum of "
        "the policy's own objective, on 20 small cases cut from the trace (placement_objectives.md). ± is the standard "
        f"deviation over folds or halves. Every placement could search for {options.time_limit:g} s.",
    ]
    for name, (trace, model) in loaded.items():
        about = f"{trace.num_requests} requests, {trace.num_tokens} tokens, {trace.num_layers} MoE layers, "
        about += f"{trace.num_experts} experts, top-{trace.top_k}."
        fits: dict[Any, Any] = {}
        limits: dict[str, Any] = {"time_limit_s": options.time_limit, "seed": options.seed, "fits": fits}
        benches = [
            Bench(trace, model, cluster, ep_size, options.folds, options.halves, **limits) for ep_size in options.ep
        ]
        gap_of = {} if options.bars else own_gaps(trace, options.placements)
        for bench in benches:
            if options.bars or name == "gptoss":
                parts.append(bar_rows(bench))
                yield "\n\n".join(parts) + "\n"
            if not options.bars:
                head, body = table(Path(name).stem, bench, options.placements, gap_of).split("\n", 1)
                parts.append(f"{head}\n\n{about}\n{body}")
                yield "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="semmoe evaluate policies", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="append", help="gptoss, tiny, or a trace file (repeatable; default: both)")
    parser.add_argument("--model", help="model of a trace file")
    parser.add_argument("--ep", type=ints, default=[4, 8], help="EP sizes, as in 4,8")
    parser.add_argument(
        "--placements",
        type=lambda text: text.split(","),
        default=PLACEMENTS,
        help="only these (default: all but exact)",
    )
    parser.add_argument("--bars", action="store_true", help="only the rows with a bar (set for gptoss)")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--halves", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a placement may search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Markdown file (default: standard output)")
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    options.trace = options.trace or (["gptoss"] if GPTOSS.is_file() else []) + ["tiny"]
    text = ""
    try:
        for text in report(options, " ".join(["semmoe evaluate policies", *words])):
            if options.out:
                write_atomically(options.out, text)  # a section at a time: hours of work survive a stop
    except UserError as error:
        print(f"semmoe evaluate: {error}", file=sys.stderr)
        return 2
    print(options.out or text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
