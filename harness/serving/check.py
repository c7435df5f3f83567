"""Correctness of a full model before its served run: logits against the whole model in one process, fp32."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from semmoe.errors import UserError
from semmoe.planning import StepPlanner
from semmoe.serving import DECODE, PREFILL, StepPlan, TokenRows

from ..check import TOLERANCE, dtypes
from ..models.tiny import Layer, TinyModel, rotary_tables
from ..poison import poisoned
from ..reference.experts import moe_reference
from ..weights import TinyWeights
from .full_model import FullModel

SAMPLE_TOKENS = 64  # of each sampled prompt
LOGITS_TOLERANCE = 1e-4  # fp32, relative norm; layers alone are held to TOLERANCE
LAYERS_ADD_UP = 2.0  # rounding errors of six layers, over that of one


def check_full(full: FullModel, planner: StepPlanner) -> tuple[float, float | None]:
    """(largest relative error of a logit row, share of (token, layer) whose free gate differs from the trace; None where
    the gate decides). A request whose prompt was cut (workload.max_prompt) sees another context than the trace did.

    Prompts of the first requests in two chunks, then one decode step, on all ranks. Collective. Raises the same UserError
    on every rank where logits disagree: nothing may be timed then.
    """
    seen = []
    for plan in sample_plans(full):
        routed = planner.route(*plan.token_rows(TokenRows.of(full.own.requests)))
        with poisoned():
            logits_NV = full.step(plan, routed).logits_NV
        mine_N = np.flatnonzero(plan.rank_N == full.own.queue)
        seen += [(int(plan.request_N[i]), int(plan.kv_len_N[i]), row) for i, row in zip(mine_N, logits_NV, strict=True)]
    tokens = {request: sequence.tokens_S for request, sequence in full.own.sequences.items()}
    full.own.sequences.clear()
    everybody = full.transport.gather_objects((seen, tokens))
    outcome = (0.0, 0, 1)
    if full.context.rank == 0:
        outcome = _compare(
            full, [row for rows, _ in everybody for row in rows], {r: t for _, d in everybody for r, t in d.items()}
        )
    error, flips, total = full.transport.gather_objects(outcome)[0]
    limit = max(LOGITS_TOLERANCE if d == "fp32" else LAYERS_ADD_UP * TOLERANCE[d] for d in dtypes(full))
    if not error <= limit:
        raise UserError(
            f"full_model/{full.spec.flow}/{full.spec.dispatcher or 'none'}: logits differ from the single-process model by "
            f"{error:.3g} (relative norm; at most {limit:g} is right): a fault of the data plane, a head shard or a KV cache, "
            "so nothing was timed"
        )
    return error, None if full.greedy else flips / total


def sample_plans(full: FullModel) -> list[StepPlan]:
    """First requests, dealt to the queues in turn: half of each prompt, the other half, one decode token."""
    ranks, limit = full.context.ranks, int(full.run.cfg["serving"]["max_batch_tokens"])
    queues = ranks if full.spec.flow == "dp" else 1
    each = min(2 * ranks // queues, limit)  # requests of a queue
    sampled = full.own.requests[: each * queues]
    ids = np.arange(len(sampled))
    inputs_N = np.array([r.prompt_len + r.output_len - 1 for r in sampled])
    prompt_N = np.minimum([r.prompt_len for r in sampled], min(SAMPLE_TOKENS, 2 * (limit // each)))
    cuts = [np.zeros_like(ids), prompt_N // 2, prompt_N, np.minimum(prompt_N + 1, inputs_N - 1)]
    plans = []
    for index, phase in enumerate((PREFILL, PREFILL, DECODE)):
        count_N = cuts[index + 1] - cuts[index]
        kept = count_N > 0
        if kept.any():
            columns = (ids % queues, ids, np.full_like(ids, phase), cuts[index], count_N)
            plans.append(StepPlan(index, *(column[kept].astype(np.int64) for column in columns)))
    return plans


def _compare(full: FullModel, seen: list[tuple[int, int, Tensor]], tokens: dict[int, Tensor]) -> tuple[float, int, int]:
    """(worst relative error, (token, layer) pairs whose free gate differs, all such pairs)."""
    model = TinyWeights().model
    trace_TLk = full.run.heldout.experts_TLk
    errors, flips, total = [0.0], 0, 0
    for request in sorted({request for request, _, _ in seen}):
        length = max(end for r, end, _ in seen if r == request)
        rows = full.own.requests[request].rows(length)
        experts_TLk = torch.from_numpy(trace_TLk[rows].astype(np.int64))
        forced = None if full.greedy else experts_TLk
        logits_TV, flipped = reference_logits(model, tokens[request][:length], forced)
        flips, total = flips + flipped, total + length * len(model.layers)
        for r, end, row in seen:
            if r == request:
                want = logits_TV[end - 1]
                errors.append(float((row.float() - want).norm() / want.norm()))
    return float(np.max(errors)), flips, max(total, 1)  # unlike max(), it keeps NaN


@torch.no_grad()
def reference_logits(model: TinyModel, tokens_T: Tensor, experts_TLk: Tensor | None) -> tuple[Tensor, int]:
    """(logits_TV of one sequence in one pass, (token, layer) pairs where the gate's own choice is another set).

    experts_TLk: forced experts, weighted as the gate weights them; None: the gate decides.
    """
    tables = rotary_tables(model.config, 0, len(tokens_T))
    x_1TH = functional.embedding(tokens_T[None], model.embed_VH)
    flips = 0
    for index, each in enumerate(model.layers):
        layer = cast(Layer, each)
        x_1TH = x_1TH + layer.attention(layer.input_norm(x_1TH), tables, None, index)
        rows_TH = layer.post_attention_norm(x_1TH)[0]
        score_TE = functional.linear(rows_TH, layer.moe.gate_EH).softmax(dim=-1)
        chosen_Tk = score_TE.topk(model.config.top_k, dim=-1).indices
        if experts_TLk is not None:
            asked_Tk = experts_TLk[:, index]
            flips += int((chosen_Tk.sort(dim=1).values != asked_Tk.sort(dim=1).values).any(dim=1).sum())
            chosen_Tk = asked_Tk
        weights_Tk = score_TE.gather(1, chosen_Tk)
        weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)
        x_1TH = x_1TH + moe_reference(rows_TH, chosen_Tk, weights_Tk, layer.moe.w13_E2FH, layer.moe.w2_EHF)
    return functional.linear(model.norm(x_1TH[0]), model.embed_VH), flips
