"""Correctness of a stack of blocks before it is timed: every block against the same one in a single process.

Each block is given what the ranks' own blocks before it made, so that a fault is named where it is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from semmoe.errors import UserError
from semmoe.planning import RoutedStep

from ..check import TOLERANCE, dtypes, moe_rows, relative
from ..poison import poisoned
from ..stack import LayerInput
from . import reference
from .stack import BlockStack

SEQUENCES = 16  # at most, of the checked batch


def check_blocks(stack: BlockStack, routed: RoutedStep, inputs: list[LayerInput]) -> tuple[float, float | None]:
    """(largest relative error over blocks, logits and ranks, None: forced routes have no flips).

    Collective. Raises the same UserError on every rank where one disagrees: nothing may be timed then."""
    sequences, errors = stack.sequences(inputs), list[float]()
    before = gathered = stack.transport.gather_objects((inputs[0].mine_n, inputs[0].x.cpu()))
    with torch.no_grad():
        running = stack.blocks.run(inputs[0].x, inputs, sequences)
        for layer in range(stack.run.model.num_layers):
            with poisoned():
                x = next(running)
            gathered = stack.transport.gather_objects((inputs[0].mine_n, x.cpu()))
            error = _block_error(stack, layer, routed, before, gathered) if stack.context.rank == 0 else 0.0
            errors.append(stack.transport.gather_objects(error)[0])
            stack.context.progress(layer + 1, stack.run.model.num_layers)  # the reference takes its time
            before = gathered
        logits_G = stack.transport.gather_objects(stack.blocks.logits(x, sequences).cpu())
    error = _logits_error(stack, routed, gathered, logits_G) if stack.context.rank == 0 else 0.0
    errors.append(stack.transport.gather_objects(error)[0])
    worst, limit = int(np.argmax(np.nan_to_num(errors, nan=np.inf))), max(TOLERANCE[d] for d in dtypes(stack))
    if not errors[worst] <= limit:
        what = f"block {worst}" if worst < stack.run.model.num_layers else "the LM head"
        raise UserError(
            f"full_model/{stack.spec.flow}/{stack.spec.dispatcher or 'none'}: the output of {what} differs from the "
            f"single-process reference by {errors[worst]:.3g} (relative norm; at most {limit:g} is right): a fault of a head "
            "shard, a cache or the data plane, so nothing was timed"
        )
    return errors[worst], None


def checked_tokens(stack: BlockStack) -> int:
    """Tokens of a batch that are checked: the reference goes sequence by sequence."""
    return SEQUENCES * (stack.form.context_tokens if stack.form.phase == "prefill" else 1)


def _order(stack: BlockStack, routed: RoutedStep) -> tuple[np.ndarray, list[int]]:
    """(tokens by queue, tokens of each queue)."""
    if stack.spec.flow != "dp" or routed.homes_TL is None:
        return np.arange(len(routed.rows_T)), [len(routed.rows_T)]
    homes_T = routed.homes_TL[:, 0]
    return np.argsort(homes_T, kind="stable"), np.bincount(homes_T, minlength=stack.context.ranks).tolist()


def _block_error(
    stack: BlockStack,
    layer: int,
    routed: RoutedStep,
    before: list[tuple[np.ndarray, Tensor]],
    after: list[tuple[np.ndarray, Tensor]],
) -> float:
    model, blocks = stack.run.model, stack.blocks
    order_T, tokens_G = _order(stack, routed)
    x_TH = _together(before, len(order_T))[order_T]
    experts = None
    if layer in model.layer_ids:
        moe = model.layer_ids.index(layer)
        expert_of_slot_P = stack.placement.physical_to_logical_LP[moe]
        experts_Tk = torch.from_numpy(expert_of_slot_P[routed.slots_TLk[order_T, moe]].astype(np.int64))

        def experts(rows_TH: Tensor) -> Tensor:
            return moe_rows(stack, moe, rows_TH.to(stack.dtype), experts_Tk)[0].float()

    plan, most, positions = stack.form.plan(tokens_G), blocks.most_sequences, stack.form.positions
    want_TH = torch.empty_like(x_TH)
    want_TH[order_T] = reference.block(blocks.weights, layer, x_TH, plan, most, positions, experts)
    return float(np.max([relative(x.float(), want_TH[torch.from_numpy(mine_n)]) for mine_n, x in after]))


def _logits_error(
    stack: BlockStack, routed: RoutedStep, x: list[tuple[np.ndarray, Tensor]], logits_G: list[Tensor]
) -> float:
    order_T, tokens_G = _order(stack, routed)
    last_B = np.cumsum(stack.form.plan(tokens_G).count_N) - 1
    rows_BH = _together(x, len(order_T))[order_T][last_B]
    got_BV = torch.cat(logits_G, dim=0 if stack.spec.flow == "dp" else 1).float()
    return relative(got_BV, reference.logits(stack.blocks.weights, rows_BH))


def _together(parts: list[tuple[np.ndarray, Tensor]], tokens: int) -> Tensor:
    """Rows of all ranks in the order of the batch, fp32; where all ranks have all rows, the first one's."""
    whole = torch.full((tokens, parts[0][1].shape[1]), torch.nan)
    for mine_n, x in reversed(parts):
        whole[torch.from_numpy(mine_n)] = x.float()
    return whole
