"""Bodies of the tests of planning on the device: on virtual ranks and on rank processes, by torch or by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.counting import Counter, traffic_of
from harness.device.plan import DevicePlan, planner_of
from harness.stack import Stack
from harness.virtual_pool import VirtualPool
from harness.worker import RankContext
from semmoe.predict.tables import Rows
from semmoe.run import Run
from semmoe.traffic import count_traffic, differences

Step = tuple[Counter, list[NDArray[np.int64]]]  # what a rank counted; the home of every token in each layer


def turned(rows: Rows) -> Rows:
    return replace(rows, score_SG=rows.score_SG[:, ::-1])


def step_rows(run: Run, tokens: int) -> NDArray[np.int64]:
    return np.arange(tokens) * 7 % run.heldout.num_tokens


def plan_steps(context: RankContext, run: Run, tokens: Sequence[int], fault: str = "none") -> list[Step]:
    """Steps of these sizes on this rank. fault: "table", the scores of ranks stand in reverse in every chain; "stale", every
    layer is handed the slots of the layer before the last."""
    stack, planner = Stack(context, run), planner_of(run)
    plan = stack.device_plan
    assert plan is not None
    if fault == "table":
        plan.tables = [replace(t, chain=replace(t.chain, rows=turned(t.chain.rows))) for t in plan.tables]
    if fault == "stale":
        late, whole = [None], plan.carried

        def carried(slots_Tk: Any) -> None:
            whole(slots_Tk if late[0] is None else late[0])
            late[0] = slots_Tk

        plan.carried = carried  # type: ignore[method-assign]
    homes: list[NDArray[np.int64]] = []
    for layer in stack.layers:

        def kept(given: Any, device: Any, whole: Any = layer._plan) -> Any:
            made = whole(given, device)
            homes.append(made.owner_T.numpy().copy())
            return made

        layer._plan = kept  # type: ignore[method-assign]
    steps = []
    for count in tokens:
        homes.clear()
        counter = stack.execute(stack.inputs(planner.route(step_rows(run, count), None)), True).counter
        steps.append((counter, list(homes)))
    return steps


def virtual_steps(run: Run, tokens: Sequence[int], fault: str = "none") -> list[list[Step]]:
    with VirtualPool(run.ep_size, timeout_s=300.0) as pool:
        return pool.run(plan_steps, run, tokens, fault)


def process_steps(run: Run, tokens: Sequence[int]) -> list[Step]:
    """On a rank process of the tests, all of which take part."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    context = RankContext(rank, ranks)
    try:
        return plan_steps(context, run, tokens)
    finally:
        for _, _, transport in context.state.get("transports", {}).values():
            transport.close()


def check_planned_by_kernels(cases: Sequence[tuple[Run, int]], layers: int) -> None:
    """Homes of the first layers of (run, tokens) by both kernels, without running the layers."""
    from harness.kernels.home import home_tokens

    for run, tokens in cases:
        plan, rows_T = DevicePlan(run, torch.device("cpu"), kernels=True), step_rows(run, tokens)
        routed = run.planner().route(rows_T, None)
        assert routed.homes_TL is not None
        token_T = torch.from_numpy(run.heldout.token_id_T[rows_T].astype(np.int64))
        for layer in range(layers):
            homes = plan.homes(layer, token_T)
            plan.carried(torch.from_numpy(routed.slots_TLk[:, layer]))
            owner_T = home_tokens(homes.score_TG, homes.capacity).numpy()
            assert (owner_T == routed.homes_TL[:, layer]).all(), (run.ep_size, tokens, layer)


def wrong(run: Run, tokens: int, step_G: Sequence[Step]) -> list[str]:
    """What differs from the host's plan of the same step: homes of any token, layer and rank, and Traffic."""
    routed = run.planner().route(step_rows(run, tokens), None)
    shape = (run.recipe.slots, run.ep_size, run.spec)
    found = differences(
        traffic_of([counter for counter, _ in step_G]), count_traffic(routed.slots_TLk, routed.homes_TL, *shape)
    )
    assert routed.homes_TL is not None
    for rank, (_, homes_LT) in enumerate(step_G):
        moved_TL = np.stack(homes_LT, axis=1) != routed.homes_TL
        found += [f"home of token {t} in layer {layer} on rank {rank}" for t, layer in np.argwhere(moved_TL)]
    return [line for line in found if not line.startswith("metadata_bytes")]  # kernels send the routes ahead
