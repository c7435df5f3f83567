"""Fused MoE layers and attention: held-out token counts and lengths through the simulator's own tables and laws."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..cost.attention_table import AttentionTable
from ..cost.expert_table import ExpertTable
from ..cost.experts import ExpertLaw, fit_expert_law
from .collectives import curve
from .row import Float, Model, Row, held_out, read, scored

MOE_SERIES = ("system", "backend", "backend_version", "kernel_source", "moe_dtype", "distribution")
MOE_COLUMNS = (*MOE_SERIES, "moe_ep_size", "num_tokens", "latency_us")
ATTENTION_SERIES = ("system", "source", "kernel_source")
ATTENTION_COLUMNS = (*ATTENTION_SERIES, "phase", "batch_size", "kv_len", "latency_us")
HIDDEN, FFN, EXPERTS, TOP_K = 2048, 768, 128, 8  # of every row of the fused-MoE file
EXPERT_BYTES = 6.0 * HIDDEN * FFN  # three BF16 matrices
MIXED_DECODE = 2.5  # median over the public mixed calls of (time - prefill alone) / decodes alone
PEAK = {  # memory GB/s and BF16 TFLOPS of the datasheets
    "a100_sxm": (2039.0, 312.0),
    "h100_sxm": (3350.0, 989.0),
    "b200_sxm": (7700.0, 2250.0),
    "gb200": (8000.0, 2500.0),
    "l40s": (864.0, 362.0),
    "rtx_pro_6000_server": (1792.0, 468.0),
}


def moe_rows(fused: object, by_active: object) -> list[Row]:
    """Held-out token counts: the closed form that presets price with, and tables by (tokens, active experts) and by tokens."""
    table = read(by_active, ("tokens", "activated_experts", "time_us"))
    rows = [_by_active(table)]
    every = read(fused, MOE_COLUMNS)
    series = every[every.moe_ep_size == 1]
    error = held_out(series, MOE_SERIES, "num_tokens", "latency_us", curve)
    note = "a curve over tokens, which no simulation reads; reported"
    rows.append(scored("moe.fused", "fused MoE by tokens, 6 GPUs, balanced and power law", error.error, note=note))
    even = every[(every.distribution == "balanced") & (every.moe_dtype == "bfloat16")]
    law = pd.concat(_closed_form(part) for _, part in even[even.moe_ep_size == 1].groupby(list(MOE_SERIES)))
    note = "what presets price with: rows and active experts (balanced routing, BF16), fitted on the kept half"
    rows.append(scored("moe.law", "fused MoE, closed form of the presets", law.error, 5, 15, note))
    return [*rows, _shares_of_experts(even)]


def _shares_of_experts(even: pd.DataFrame) -> Row:
    """Ranks that hold a part of the experts, by the closed form fitted where one rank holds all."""
    found = []
    for (system, *_, kernel, _, _), part in even.groupby(list(MOE_SERIES)):
        whole, shares = part[part.moe_ep_size == 1], part[part.moe_ep_size > 1]
        law = _law(str(system), whole.num_tokens.to_numpy(np.float64), whole.latency_us.to_numpy(np.float64))
        ranks = shares.moe_ep_size.to_numpy(np.float64)
        rows = TOP_K * shares.num_tokens.to_numpy(np.float64) / ranks
        guess = law.time_us(rows, np.minimum(rows, EXPERTS / ranks), HIDDEN, FFN, EXPERT_BYTES)
        found.append(pd.DataFrame({"kernel": f"{system} {kernel}", "error": guess / shares.latency_us - 1}))
    error = pd.concat(found)
    means = (100 * error.error).groupby(error.kernel).mean()
    note = (
        "law of EP1; Triton kernels of a rank mask the experts that it does not own and get all rows, as after an all-gather, "
        "which the law does not know; mean signed error: "
        + ", ".join(f"{name} {mean:+.0f} %" for name, mean in means.items())
    )
    return scored("moe.law.shares", "fused MoE, closed form, 2 to 32 ranks share the experts", error.error, note=note)


def _by_active(table: pd.DataFrame) -> Row:
    tokens = np.sort(table.tokens.unique())
    error = []
    for active, part in table.groupby("activated_experts"):
        inside = part.sort_values("tokens").reset_index(drop=True)
        held = (np.searchsorted(tokens, inside.tokens) % 2 == 1) & (inside.index > 0) & (inside.index < len(inside) - 1)
        kept = inside[~held]
        model = ExpertTable(zip(kept.tokens, kept.activated_experts, kept.time_us, strict=True))
        test = inside[held]
        guess = model.time_us(test.tokens, np.full(len(test), float(str(active))))
        error.append(guess / test.time_us.to_numpy() - 1)
    what = "fused MoE by (tokens, active experts), RTX PRO 6000"
    return scored("moe.by_active", what, np.concatenate(error), 5, 15)


def _closed_form(part: pd.DataFrame) -> pd.DataFrame:
    def fit(tokens: Float, us: Float) -> Model:
        law = _law(str(part.system.iloc[0]), tokens, us)
        return lambda t: law.time_us(TOP_K * t, np.minimum(TOP_K * t, EXPERTS), HIDDEN, FFN, EXPERT_BYTES)

    return held_out(part, MOE_SERIES, "num_tokens", "latency_us", fit)


def _law(system: str, tokens: Float, us: Float) -> ExpertLaw:
    """The closed form of a rank that holds all experts."""
    points = list(zip(TOP_K * tokens, np.minimum(TOP_K * tokens, EXPERTS), us, strict=True))
    return fit_expert_law(points, HIDDEN, FFN, *PEAK[system])


def attention_rows(name: str, path: object) -> list[Row]:
    """Prefill and decode of one attention kind, every other length held out at every batch size."""
    table = read(path, ATTENTION_COLUMNS)
    rows = []
    for phase, word, power in (("context", "prefill", 2), ("generation", "decode", 1)):
        part = table[table.phase == phase]
        error = pd.concat(_attention_errors(group, power) for _, group in part.groupby(list(ATTENTION_SERIES)))
        worst = (100 * error.error.abs()).groupby(error.system).median()
        note = "median by system: " + ", ".join(f"{system} {value:.1f}" for system, value in worst.items())
        rows.append(scored(f"attention.{name}.{word}", f"attention {name.upper()}, {word}", error.error, 5, 0, note))
    return rows


def mixed_rows(path: object) -> list[Row]:
    """One call with a prefill chunk and decodes, from the calls with either alone: added up, and decodes times a factor."""
    table = read(path, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"))
    chunk, decode = ["prefill_chunk", "kv_prefill"], ["n_decode", "kv_decode"]
    mean = table.groupby([*chunk, *decode]).time_us.mean().reset_index()
    both = mean[(mean.prefill_chunk > 0) & (mean.n_decode > 0)]
    both = both.merge(mean[mean.n_decode == 0][[*chunk, "time_us"]], on=chunk, suffixes=("", "_prefill"))
    both = both.merge(mean[mean.prefill_chunk == 0][[*decode, "time_us"]], on=decode, suffixes=("", "_decode"))
    rows = []
    for factor, word in ((1.0, "added up"), (MIXED_DECODE, f"decodes times {MIXED_DECODE:g}")):
        error = (both.time_us_prefill + factor * both.time_us_decode) / both.time_us - 1
        note = f"mean signed error {100 * error.mean():+.0f} %; ClusterSpec.mixed_decode, 1 in the presets"
        what = f"attention GQA, prefill and decode in one call, {word}, RTX PRO 6000"
        rows.append(scored(f"attention.mixed.{factor:g}", what, error, note=note))
    return rows


def _attention_errors(table: pd.DataFrame, power: int) -> pd.DataFrame:
    """One table over all batch sizes from the kept lengths, scored at the lengths left out of each batch size."""
    kept, test = [], []
    mean = table.groupby(["batch_size", "kv_len"]).latency_us.median().reset_index()
    for _, line in mean.groupby("batch_size"):
        position = np.arange(len(line))
        held = (position % 2 == 1) & (position < len(line) - 1)
        if len(line) < 5:
            held[:] = False
        kept.append(line[~held])
        test.append(line[held])
    points, scored_at = pd.concat(kept), pd.concat(test)
    model = AttentionTable(points[["batch_size", "kv_len", "latency_us"]].itertuples(index=False, name=None), power)
    guess = model.time_us(scored_at.batch_size, scored_at.kv_len)
    return scored_at.assign(error=guess / scored_at.latency_us - 1, system=table.system.iloc[0])
