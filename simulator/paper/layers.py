"""Pages about one MoE layer: share of communication, locality per policy, what the paper leaves out, ablation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pandas as pd

from semmoe.evaluate import GPTOSS

from . import published
from .book import Book, Page, Table, kept, markdown, named

PUBLISHED = "Sem-MoE as published"
LEAST_GAIN_PCT = 1.0  # predictions closer than this are not told apart (semmoe/verdict.py)


def communication(book: Book) -> Page:
    """Share of dispatch and combine in a layer without policies, by cluster, dispatcher and tokens."""
    rows = book.rows("communication")
    rows["share_pct"] = 100 * (rows.dispatch_ms + rows.combine_ms) / rows.layer_ms
    claim = published.COMMUNICATION_SHARE_PCT
    lines = []
    for (model, cluster), group in rows.groupby(["model", "cluster"], sort=False):
        line = {"model": model, "cluster": cluster}
        for (dispatcher, tokens), cell in group.groupby(["dispatcher", "batch_tokens"], sort=True):
            line[f"{dispatcher}, {tokens // 8} a rank"] = f"{cell.share_pct.iloc[0]:.0f} %"
        lines.append(line)
    largest = rows[rows.model == "deepseek-v2-lite"].groupby("cluster").share_pct.max()
    there = [f"{name} ({share:.0f} %)" for name, share in largest.items() if share >= claim]
    below = [f"{name} ({share:.0f} %)" for name, share in largest.items() if share < claim]
    verdict = (
        f"Paper: up to {claim} % (V2-Lite, 8 devices, over 400 GB/s of links). Here, in the worst of the "
        f"columns, it is reached on {', '.join(there) or 'no cluster'}, and not on {', '.join(below) or 'none'}: "
        "the claim needs links that are slow beside the compute (the paper's class is nearest to h800x8), not NVLink as such."
    )
    text = (
        "Dispatch and combine over the forward time of one MoE layer (gate, exchange, experts), contiguous experts.\n\n"
    )
    return Page("communication", "Communication share of an MoE layer", text + markdown(pd.DataFrame(lines)),
                kept(rows).assign(share_pct=rows.share_pct), verdict)  # fmt: skip


def locality(book: Book) -> Page:
    """LAR, imbalance and latency per policy; the paper's Fig. 5 with the honest baseline beside it."""
    rows = named(book.rows("locality"))
    parts, said = [], []
    for (model, ep), group in rows.groupby(["model", "ep_size"], sort=False):
        for flow, names in (("dp", ["dp"]), ("attention-TP", ["tp_replicated", "tp_scattered", "tp_shuffled"])):
            cell = group[group.flow.isin(names)]
            if cell.empty:
                continue
            best = cell[cell.policy.isin(["vanilla", "two all-reduces"])].layer_ms.min()
            table = pd.DataFrame([_layer_line(row, cell, best) for _, row in cell.iterrows()])
            parts.append(f"## {model}, EP{ep}, {flow}\n\n{markdown(table)}")
            said += _locality_said(model, ep, flow, cell, best)
    recorded, real_parts, real_said = _recorded(book)
    parts += real_parts
    said += real_said
    rows = pd.concat([rows, recorded], ignore_index=True)
    text = (
        "Routes are drawn from the affinity profile, fitted with the paper's policies to EP4 LAR on five layers; the rest is "
        "predicted. Recorded routes follow at the end. "
        "*vs vanilla*: same flow and dispatcher without policies, as the paper counts. *vs better baseline*: the fastest "
        "without policies in any dispatcher, two all-reduces included.\n\n" + "\n\n".join(parts)
    )
    return Page("locality", "LAR and latency of one MoE layer, by policy", text, kept(rows).assign(policy=rows.policy),
                "\n".join(f"- {s}" for s in said))  # fmt: skip


def _recorded(book: Book) -> tuple[Table, list[str], list[str]]:
    """(rows, tables, sentences) of recorded routes: the tiny model's, and public ones where they lie beside the checkout."""
    sources = {"tiny": ["model=tiny"]}
    if GPTOSS.is_file():
        sources["gpt-oss-20b"] = ["model=gpt-oss-20b", "trace=file", f"trace.path={GPTOSS}",
                                  "+trace._target_=semmoe.sources.fingerprints.load_fingerprints"]  # fmt: skip
    every, parts, said = [], [], []
    for name, words in sources.items():
        rows = named(replace(book, extra=[*book.extra, *words]).rows("recorded"))
        every.append(rows)
        for (ep, dp), cell in rows.groupby(["ep_size", rows.flow == "dp"]):
            flow = "dp, homes after 64 tokens" if dp else "attention-TP"
            lines = [{"policy": r.policy, "LAR": f"{r.lar_replayed:.3f}", "fan-out": f"{r.fan_out_replayed:.2f}",
                      "imbalance": f"{r.imbalance_step:.2f}"} for r in cell.itertuples()]  # fmt: skip
            parts.append(f"## recorded routes of {name}, EP{ep}, {flow}\n\n{markdown(pd.DataFrame(lines))}")
            lar = cell.set_index("policy").lar_replayed
            gains = [f"{p} {100 * (lar[p] - lar['vanilla']):+.0f}" for p in (PUBLISHED, "semantic + semantic")]
            said.append(f"recorded routes of {name}, EP{ep}, {flow}: LAR points over vanilla: {', '.join(gains)}.")
    if not GPTOSS.is_file():
        said.append(f"no rows on the public routes of gpt-oss-20b: {GPTOSS.name} is not here (shared/data/traces).")
    return pd.concat(every, ignore_index=True), parts, said


def _layer_line(row: Table, cell: Table, best_ms: float) -> dict[str, str]:
    vanilla = cell[(cell.policy == "vanilla") & (cell.dispatcher == row.dispatcher)].layer_ms
    return {
        "policy": row.policy,
        "dispatcher": row.dispatcher,
        "LAR": "" if pd.isna(row.lar_replayed) else f"{row.lar_replayed:.3f}",
        "fan-out": "" if pd.isna(row.fan_out_replayed) else f"{row.fan_out_replayed:.2f}",
        "imbalance": f"{row.imbalance_step:.2f}",
        "communication ms": f"{_communication(row):.3f}",
        "experts ms": f"{row.experts_ms:.3f}",
        "layer ms": f"{row.layer_ms:.3f}",
        "vs vanilla": "" if vanilla.empty else f"{100 * (row.layer_ms / vanilla.iloc[0] - 1):+.1f} %",
        "vs better baseline": f"{100 * (row.layer_ms / best_ms - 1):+.1f} %",
    }


def _locality_said(model: str, ep: int, flow: str, cell: Table, best_ms: float) -> list[str]:
    said = []
    for policy in ("moetuner", PUBLISHED, "semantic + semantic"):
        found, base = cell[cell.policy == policy], cell[cell.policy == "vanilla"]
        if found.empty or base.empty:
            continue
        row = found.loc[found.layer_ms.idxmin()]
        same = base[base.dispatcher == row.dispatcher].iloc[0]
        points, pct = 100 * (row.lar_replayed - same.lar_replayed), 100 * (row.layer_ms / same.layer_ms - 1)
        honest = 100 * (row.layer_ms / best_ms - 1)
        words = f"{model}, EP{ep}, {flow}, {policy}: LAR {points:+.0f} points, layer {pct:+.1f} % against vanilla, "
        words += f"{honest:+.1f} % against the better baseline"
        if policy == "moetuner":
            words += ", by balance alone"
        elif flow != "dp" and ep == 4:
            points, pct = published.LAR_GAIN_POINTS[model], published.LAYER_LATENCY_PCT[model]
            fitted = ", which the drawn routes are fitted to under these policies" if policy == PUBLISHED else ""
            words += f" (paper: {points:+.0f} points{fitted}; {pct} % against vanilla{', predicted' if fitted else ''})"
        elif ep == 8 and model == "deepseek-v2-lite" and flow == "dp":
            others = cell[cell.policy.isin(["vanilla", "moetuner", "eplb"])].lar_replayed.max()
            low, high = published.DP_LAR_PCT
            words += (
                f"; LAR {100 * (row.lar_replayed / others - 1):+.1f} % over the best baseline (paper: {low} or {high} %"
            )
            words += (
                f", no more than {(1 + high / 100) * others:.2f} where a baseline has {others:.2f}; read as points, "
            )
            words += f"{low:+} or {high:+} beside {100 * (row.lar_replayed - others):+.1f})"
        said.append(words + ".")
    return said


def left_out(book: Book) -> Page:
    """Every flow and dispatcher, on NVLink, PCIe and two nodes, from decode to prefill: does it pay?"""
    rows = named(book.rows("left_out"))
    gains = gains_over_better_baseline(rows, ["model", "cluster", "batch_tokens"])
    shown = gains.assign(
        tokens=(gains.batch_tokens // gains.ep_size).astype(int),
        ours=[f"{r.layer_ms:.3f}" for r in gains.itertuples()],
        base=[f"{r.baseline_ms:.3f} ({r.baseline})" for r in gains.itertuples()],
        gain=[f"{r.gain_pct:+.1f} %" for r in gains.itertuples()],
        LAR=[f"{v:.2f}" for v in gains.lar_replayed],
    )
    columns = ["model", "cluster", "tokens", "flow", "dispatcher", "LAR", "ours", "base", "gain", "verdict"]
    renamed = {"tokens": "tokens a rank", "ours": "layer ms", "base": "better baseline ms"}
    table = markdown(shown[columns].rename(columns=renamed))
    pays = gains[gains.gain_pct >= LEAST_GAIN_PCT]
    where = pays.groupby("cluster").gain_pct.max()
    verdict = (
        f"Against the better baseline co-scheduling pays in {len(pays)} of {len(gains)} cells; most on each cluster: "
        + (", ".join(f"{c} {g:.0f} %" for c, g in where.items()) or "nowhere")
        + ". The paper compares with one all-to-all without policies on one node, which is not the better baseline everywhere."
    )
    text = (
        "One MoE layer under `semantic` placement and scheduling against the fastest configuration without policies on the "
        "same cluster and batch: any dispatcher of the flow, and for attention-TP two all-reduces.\n\n" + table
    )
    return Page("left_out", "What the paper leaves out: dispatchers, PCIe, two nodes, batch sizes", text,
                kept(rows).assign(policy=rows.policy), verdict)  # fmt: skip


def gains_over_better_baseline(rows: Table, setting: Iterable[str]) -> Table:
    """Lines of policies with columns baseline, baseline_ms, gain_pct and verdict: the better baseline of their setting."""
    keys = list(setting)
    made = []
    for _, group in rows.groupby(keys, sort=False):
        bare = group[group.policy.isin(["vanilla", "two all-reduces"])]
        for _, row in group[~group.index.isin(bare.index)].iterrows():
            rivals = bare[bare.flow.str.startswith("tp_") if row.flow.startswith("tp_") else bare.flow == "dp"]
            if rivals.empty:
                continue
            best = rivals.loc[rivals.layer_ms.idxmin()]
            gain = published.reduction_pct(row.layer_ms, [best.layer_ms])
            verdict = "no gain" if abs(gain) < LEAST_GAIN_PCT else "slower" if gain < 0 else "pays"
            what = best.dispatcher if best.dispatcher != "none" else best.policy
            made.append(
                row.to_dict() | {"baseline": what, "baseline_ms": best.layer_ms, "gain_pct": gain, "verdict": verdict}
            )
    return pd.DataFrame(made)


def ablation(book: Book) -> Page:
    """Model only, data only, both, and replicas."""
    rows = named(book.rows("ablation"))
    lines, said = [], []
    for flow, names in (("dp", ["dp"]), ("attention-TP", ["tp_shuffled", "tp_replicated"])):
        cell = rows[rows.flow.isin(names)]
        if cell.empty:
            continue
        base = cell[cell.policy == "vanilla"].layer_ms.iloc[0]
        lines += [
            {
                "flow": flow,
                "policy": r.policy,
                "slots": r.slots,
                "LAR": "" if pd.isna(r.lar_replayed) else f"{r.lar_replayed:.3f}",
                "fan-out": "" if pd.isna(r.fan_out_replayed) else f"{r.fan_out_replayed:.2f}",
                "imbalance": f"{r.imbalance_step:.2f}",
                "layer ms": f"{r.layer_ms:.3f}",
                "vs vanilla": f"{100 * (r.layer_ms / base - 1):+.1f} %",
            }
            for _, r in cell.iterrows()
        ]
        by_policy = cell.set_index("policy").layer_ms
        single = {
            "placement only": "semantic",
            "scheduling only": "contiguous + semantic",
            "both": "semantic + semantic",
        }
        parts = [
            f"{word} {100 * (by_policy[key] / base - 1):+.1f} %" for word, key in single.items() if key in by_policy
        ]
        said.append(f"{flow}: {', '.join(parts)} of a layer")
    verdict = "Layer time against vanilla with the same dispatcher. " + "; ".join(said) + "."
    text = "DeepSeek-V2-Lite on h100x8, EP8, a2a_dedup, 1,024 tokens a rank.\n\n" + markdown(pd.DataFrame(lines))
    return Page(
        "ablation",
        "Ablation: placement, scheduling, both, replicas",
        text,
        kept(rows).assign(policy=rows.policy),
        verdict,
    )


def _communication(row: Table) -> float:
    return float(
        sum(row[f"{name}_ms"] for name in ("dispatch", "combine", "srs", "sag") if pd.notna(row[f"{name}_ms"]))
    )
