"""BlockStack: the whole model of one configuration on one rank, over fixed batches: scope=full_model, workload=batches.

Every batch runs twice. Once with a barrier before each attention block and before each MoE layer, so that both are timed
by themselves, as the layers of scope=moe_layers are; and once from the first block to the LM head without any, for the step.
Routes are forced, as the batch's tokens have them: attention takes its shape from the workload (semmoe/batch_form.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter_ns

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semmoe.run import Run

from ..counting import Counter
from ..feeds import Feed, RandomFeed, weights_of
from ..stack import LayerInput, Stack, StepResult, max_home_tokens
from ..worker import RankContext
from .attention import Sequences
from .forward import Blocks


class BlockStack(Stack):
    """A Stack whose MoE layers stand in their transformer blocks; inputs of later layers come out of earlier ones."""

    scope = "full_model"

    def __init__(self, context: RankContext, run: Run) -> None:
        super().__init__(context, run)
        self.form = run.batch_form
        most = self.form.sequences(most_queue_tokens(run))
        self.blocks = Blocks(
            self.transport,
            run.model,
            self.layers,
            most,
            self.form.positions,
            int(run.cfg["seed"]),
            self.run_layer,
            context.progress,
        )

    def make_feed(self) -> Feed:
        """Random rows before the first block, whatever the MoE layers' weights are."""
        run, measure = self.run, self.run.cfg["measure"]
        seed = int(run.cfg["seed"])
        return RandomFeed(run.model, seed, weights_of(measure["feed"], run.model, seed, measure.get("checkpoint")))

    def rows(self, layer: int, rows_T: NDArray[np.int64]) -> Tensor:
        """The same on every rank: a residual stream, no partial sum."""
        return self.feed.rows_TH(layer, rows_T[: 0 if layer else None])

    def sequences(self, inputs: list[LayerInput]) -> Sequences:
        """Those of this rank's queue."""
        return Sequences.of(self.form.plan([len(inputs[0].x)]), 0, self.device)

    def execute(self, inputs: list[LayerInput], barrier_each_layer: bool) -> StepResult:
        """barrier_each_layer: also the pass with barriers; without it nothing but the step is known."""
        sequences = self.sequences(inputs)
        whole = self._pass(inputs, sequences, apart=False)
        if not barrier_each_layer:
            return whole
        return replace(self._pass(inputs, sequences, apart=True), step_ns=whole.step_ns)

    @torch.no_grad()
    def _pass(self, inputs: list[LayerInput], sequences: Sequences, apart: bool) -> StepResult:
        self.timer.reset()
        self.timer.waits = apart
        self.transport.counter.reset()
        clock = _Clock(self._wait, self._line_up if apart else None)
        self._line_up()
        begin = perf_counter_ns()
        (x,) = deque(self.blocks.run(inputs[0].x, inputs, sequences, clock.mark), maxlen=1)
        self.blocks.logits(x, sequences)
        self._wait()
        step_ns = perf_counter_ns() - begin
        counter, took = self.transport.counter, clock.took_ns
        kept = Counter(counter.rank, counter.ranks, counter.layers)
        return StepResult(took["layer"], self.timer.marks_L, step_ns, kept, took["attention"])

    def _line_up(self) -> None:
        self.flush_caches()
        self.context.barrier()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class _Clock:
    """took_ns[what]: of every piece that was marked. line_up: called before each piece, outside of its time."""

    def __init__(self, wait: Callable[[], None], line_up: Callable[[], None] | None) -> None:
        self.took_ns: dict[str, list[int]] = {"attention": [], "layer": [], "dense": []}
        self._wait, self._line_up = wait, line_up
        self._what, self._since = "", 0

    def mark(self, what: str) -> None:
        """`what` begins, and what was before it ends."""
        if self._line_up is None:  # only the whole step is timed
            return
        self._wait()
        now = perf_counter_ns()
        if self._what:
            self.took_ns[self._what].append(now - self._since)
        if what in self.took_ns:
            self._line_up()
        self._what, self._since = (what if what in self.took_ns else ""), perf_counter_ns()


def most_queue_tokens(run: Run) -> int:
    """The most tokens whose attention one rank computes in a batch."""
    if run.spec.flow == "dp":
        return max_home_tokens(run)
    return max(len(rows_T) for rows_T, _ in run.batch_steps())
