"""Small terms around experts and collectives: gate, permutation, planning. What a calibration may write, and defaults.

`semmoe calibrate` measures these and writes them into the cluster file; a preset leaves them out and gets the default,
marked "assumed". Every term of a rank is fixed + per_row * rows:

    host_us.gate      fixed part of the gate (scores, top-k) of a layer           per_row_ns.gate     per home token
    host_us.permute   fixed part of packing, sorting and adding rows of a layer   per_row_ns.permute  per row handled:
                      expert rows + rows sent + rows received
    host_us.plan      fixed part of planning a layer (tp_shuffled)                per_row_ns.plan     per token and layer
        "plan.semantic" + "plan.token_table": by token scheduler (homes, slots, permutation) and predictor (look-up), where
        all that plan the configuration were measured (labels as in result rows); else "plan.tp_shuffled", any of them
    host_us.start     late leaving of the barrier before a timed piece and ending apart: every layer of fixed batches, every
                      served step
    host_us.step      fixed part of a forward pass (scope full_model), the launch of a CUDA graph included
    host_us.eager_layer  host time to issue the kernels of one layer without a CUDA graph (scope full_model)
    host_us.attention shortest attention kernel of a layer (scope full_model)

Measured whole-model terms of a rank (served runs of scope full_model, the model that the calibration names by
expert_grid_shape), those of attention also with a share of the heads over G ranks (tp flows): attention.block.tpG, ...
Without them, attention and LM head are rooflines:

    host_us.attention.block  fixed part of an attention block  per_row_ns.attention.token     per token
        per_row_ns.attention.sequence  per request in the step
        per_row_ns.attention.pair      per (query, key) pair of prefill chunks
        per_row_ns.attention.kv        per cached key that a decode token looks at
    host_us.head             final norm and LM head            per_row_ns.head                per request in the step
    host_us.step             bookkeeping and embedding         per_row_ns.step                per request in the step

Terms of a model's blocks in fixed batches (scope full_model, every flow): simulator/cost/block_pass.py.

A name may be followed by a dispatcher or flow, which then rules: "permute.a2a_dedup", "gate.tp_replicated",
"plan.dp". Rows are counted on the slowest rank; ranks that share a core wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from semmoe.dispatch import DispatchSpec
from semmoe.specs import ClusterSpec, ModelSpec
from semmoe.traffic.over_ranks import most, total

from .dense import GemmLaw

Float = NDArray[np.float64]
LAUNCH_US = 5.0  # one small kernel with its gap, where nothing was measured (aiconfigurator uses 3)
# Without a CUDA graph: 55 ms for 48 layers in vLLM's public run of Qwen3-30B-A3B (simulator/validation/vllm_run.py), the only
# measured figure at hand. An engine's Python, not its kernels, is what takes that long: 24 launches would be 120 us.
EAGER_LAYER_US = 1146.0
PLAN_US = 10.0  # table look-up, assignment and permutation kernels of one layer


class HostCost:
    """Terms of one configuration in microseconds, per rank; combine ranks with `slowest`."""

    def __init__(
        self, cluster: ClusterSpec, model: ModelSpec, spec: DispatchSpec, planned_by: Sequence[str] = ()
    ) -> None:
        self.cluster, self.model, self.spec = cluster, model, spec
        self.gemm = GemmLaw(cluster)
        self.marks: set[str] = set()
        copied_bytes = 2 * spec.row_bytes  # a row is read and written
        copy_ns = copied_bytes / (cluster.memory_efficiency * cluster.memory_gbps)
        gate_ns = 1e3 * self.gemm.per_row_us(model.hidden, model.num_experts)
        self._gate = self._term("gate", LAUNCH_US, gate_ns)
        self._permute = self._term("permute", 2 * LAUNCH_US, copy_ns)
        planned = spec.flow == "tp_shuffled"
        parts = [f"plan.{name}" for name in planned_by]
        if parts and all(part in cluster.host_us for part in parts):
            fixed_us, per_row_ns = zip(*(self._term(part, 0.0, 0.0) for part in parts), strict=True)
            self._plan = sum(fixed_us), sum(per_row_ns)
        else:
            self._plan = self._term("plan", PLAN_US if planned else 0.0, 0.0)

    def _term(self, name: str, fixed_us: float, per_row_ns: float) -> tuple[float, float]:
        for key in (f"{name}.{self.spec.dispatcher}", f"{name}.{self.spec.flow}", name):
            if key in self.cluster.host_us or key in self.cluster.per_row_ns:
                self.marks.add(
                    "measured" if self.cluster.provenance.get("host", "").startswith("measured") else "fitted"
                )
                return float(self.cluster.host_us.get(key, 0.0)), float(self.cluster.per_row_ns.get(key, 0.0))
        if fixed_us or per_row_ns:
            self.marks.add("assumed")
        return fixed_us, per_row_ns

    def eager_us(self) -> float:
        """Host time to issue one layer's kernels one by one."""
        known = "eager_layer" in self.cluster.host_us
        self.marks.add("fitted" if known else "assumed")
        return float(self.cluster.host_us["eager_layer"]) if known else EAGER_LAYER_US

    def gate_us(self, tokens_LG: NDArray[np.integer]) -> Float:
        """Gate of the tokens that each rank scores."""
        return self._rows(self._gate, tokens_LG)

    def permute_us(self, rows_LG: NDArray[np.integer]) -> Float:
        return self._rows(self._permute, rows_LG)

    def plan_us(self, tokens: int) -> float:
        """Planning of one layer for all tokens of the step."""
        fixed, per_row_ns = self._plan
        return fixed + per_row_ns * tokens / 1e3 if tokens else 0.0

    @staticmethod
    def _rows(term: tuple[float, float], rows_LG: NDArray[np.integer]) -> Float:
        fixed, per_row_ns = term
        return np.where(rows_LG > 0, fixed + rows_LG * (per_row_ns / 1e3), 0.0)


def slowest(time_LG: Float, cores: int) -> Float:
    """What a layer waits for: the slowest rank, or the core with most work where ranks share cores.

    Rank r runs on core r modulo cores (harness/worker.py). Worked example, 3 ranks of 5, 2 and 4 on 2 cores: 5 + 4 = 9."""
    ranks = time_LG.shape[-1]
    if not 0 < cores < ranks:
        return most(time_LG)
    return np.max([time_LG[..., core::cores].sum(axis=-1) for core in range(cores)], axis=0)


def waits(time_LG: Float, cores: int) -> tuple[Float, Float]:
    """(waiting for the slowest rank or core, waiting for one's core while its other ranks compute), mean over ranks.

    With a rank's own time they add up to `slowest`. Worked example, 3 ranks of 5, 2 and 4 on 2 cores, so 9 and 2 of work: the
    ranks' means are 11 / 3 of their own, (4 + 0 + 5) / 3 for the core, and (0 + 7 + 0) / 3 for the others."""
    ranks = time_LG.shape[-1]
    own = total(time_LG) / ranks
    if not 0 < cores < ranks:
        return most(time_LG) - own, np.zeros_like(own)
    core_C = [time_LG[..., core::cores] for core in range(cores)]
    on_core = np.sum([part.sum(axis=-1) * part.shape[-1] for part in core_C], axis=0) / ranks
    return slowest(time_LG, cores) - on_core, on_core - own
