"""Page of verdicts: cells of model x cluster x flow x dispatcher, among them nulls that public reports confirm."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import pandas as pd

from semmoe.config import compose_all

from ..advise.desk import Desk, Layer, serve
from ..advise.judge import judge
from .book import Book, Page, Table, markdown

QWEN, V2_LITE = "qwen3-30b-a3b", "deepseek-v2-lite"
CELLS = (  # model, cluster, flow, dispatcher, tokens a rank, what public reports say
    (QWEN, "h100x8", "dp", "allgather_rs", 256, "null: a better placement saves no bytes (sglang#36820; vllm#33728)"),
    (QWEN, "h100x8", "dp", "a2a_dedup", 16, "null: on one NVLink node EP width hardly moves decode (self-spec-moe)"),
    (QWEN, "h100x8", "dp", "low_latency", 16, "null, likewise"),
    (QWEN, "h100x8", "dp", "a2a_dedup", 256, ""),
    (V2_LITE, "h100x8", "dp", "a2a_dedup", 512, ""),
    (V2_LITE, "h100x8", "dp", "a2a_assignment", 512, ""),
    (V2_LITE, "l40sx8", "dp", "a2a_dedup", 512, ""),
    (V2_LITE, "h100x16", "dp", "a2a_dedup", 512, ""),
    (V2_LITE, "h20x8", "tp_shuffled", "a2a_dedup", 512, "paper: -41.8 % of the layer against vanilla at four groups"),
    (V2_LITE, "l40sx8", "tp_shuffled", "a2a_dedup", 512, ""),
)
ASCEND_ITL_MS = (25.02, 25.45)  # contiguous, integer program: sgl-project/sgl-kernel-npu#799, Qwen3-30B-A3B, EP8, A2
ASCEND_REQUESTS = 128  # all at once, so that 16 decode on every rank; the report gives no batch size
SHARED = ("trace=profile", "trace.requests=48", "trace.prompt_len=128", "trace.output_len=32", "workload=batches",
          "cost.allow_roofline=true", "planned_folds=0")  # fmt: skip


CONFIRMED, LOSS, GAIN = "confirmed", "a loss predicted", "a gain predicted"  # of a null; only the first agrees with it


def desk(model: str, cluster: str, book: Book, *more: str) -> Desk:
    (config,) = compose_all([f"model={model}", f"cluster={cluster}", *SHARED, *more])
    return Desk(config, book.builder)


def against_null(low_pct: float, high_pct: float) -> str:
    """Whether a predicted gain (ends of its interval, percent) confirms a report of no change, and where it errs if not."""
    return GAIN if low_pct > 0 else LOSS if high_pct < 0 else CONFIRMED


def verdicts(book: Book) -> Page:
    """Every cell as `semmoe advise` judges it, and the published null on Ascend."""
    desks: dict[tuple[str, str], tuple[Desk, dict[Any, Layer]]] = {}
    rows = []
    for model, cluster, flow, dispatcher, tokens, public in CELLS:
        if (model, cluster) not in desks:
            desks[model, cluster] = (desk(model, cluster, book), {})
        at, known = desks[model, cluster]
        phase = "decode" if tokens < 64 else "prefill"
        rows.append(
            {"model": model, "cluster": cluster}
            | asdict(judge(at, flow, dispatcher, phase, tokens, known))
            | {"public": public}
        )
    table: Table = pd.DataFrame(rows)
    shown: Table = pd.DataFrame(
        {
            "cell": [
                f"{r.model}, {r.cluster}, {r.flow}, {r.dispatcher}, {r.tokens_a_rank} tokens a rank"
                for r in table.itertuples()
            ],
            "LAR": [f"{r.lar_before:.2f} to {r.lar:.2f}" for r in table.itertuples()],
            "gain, 80 % interval": [
                f"{r.gain_pct:+.1f} % ({r.low_pct:+.1f} to {r.high_pct:+.1f})" for r in table.itertuples()
            ],
            "better baseline": table.baseline,
            "verdict": [f"{r.verdict}: {r.reason}" for r in table.itertuples()],
            "public report": [
                f"{r.public} -> {against_null(r.low_pct, r.high_pct)}" if _is_null(r) else r.public
                for r in table.itertuples()
            ],
        }
    )
    verdict = f"{_nulls_said(table)} {_ascend(book)}"
    text = (
        "Co-scheduling (semantic placement and scheduling) against the better configuration without policies, as `semmoe "
        "advise` judges: gain of one MoE layer, drawn routes.\n\n" + markdown(shown)
    )
    return Page("verdicts", "Verdicts, and nulls that public reports confirm", text, table, verdict)


def _is_null(row: Any) -> bool:
    return str(row.public).startswith("null")


def _nulls_said(table: Table) -> str:
    """How many published nulls are predicted as what they are: no change."""
    nulls = [row for row in table.itertuples() if _is_null(row)]
    found = Counter(against_null(row.low_pct, row.high_pct) for row in nulls)
    off = ", ".join(f"{row.gain_pct:+.1f} %" for row in nulls if against_null(row.low_pct, row.high_pct) == LOSS)
    words = (
        f"Of {len(nulls)} published nulls {found[CONFIRMED]} are confirmed: the interval of the predicted gain holds 0"
    )
    if found[LOSS]:
        words += (
            f"; in {found[LOSS]} a loss is predicted where none was reported ({off}): that it does not pay agrees, the size "
            "does not"
        )
    return f"{words}; in {found[GAIN] or 'none'} a gain is predicted, which would contradict the report."


def _ascend(book: Book) -> str:
    """Placement alone by an integer program, on a mesh without a locality-aware dispatcher: the served inter-token latency."""
    served = ["workload=serve", "workload.arrivals=all_at_once", f"workload.num_requests={ASCEND_REQUESTS}"]
    at, said = desk(QWEN, "ascend910bx8", book, *served), []
    for dispatcher in ("allgather_rs", "a2a_assignment"):
        plain, placed = (
            float(serve(at.run("dp", dispatcher, placement=name))[0]["itl_ms_p50"])
            for name in ("contiguous", "moetuner")
        )
        said.append(f"{plain:.1f} to {placed:.1f} ms ({100 * (placed / plain - 1):+.1f} %) under {dispatcher}")
    measured = 100 * (ASCEND_ITL_MS[1] / ASCEND_ITL_MS[0] - 1)
    return (
        "Qwen3-30B-A3B on 8 Ascend A2 with an integer-program placement and no locality-aware dispatcher: inter-token latency "
        f"was measured at {ASCEND_ITL_MS[0]} to {ASCEND_ITL_MS[1]} ms ({measured:+.1f} %, sgl-kernel-npu#799); predicted for "
        f"{ASCEND_REQUESTS} requests served at once (median; link and compute of this preset are partly assumed, so the change "
        f"is the prediction, not the level): {', '.join(said)}."
    )
