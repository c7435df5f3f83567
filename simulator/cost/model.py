"""CostModel: milliseconds of every part of a layer, for one model, cluster, flow and dispatcher.

All layers of a forward pass are priced in one call; arrays carry the layer axis L of the Traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError, nearest
from semmoe.specs import ClusterSpec, ModelSpec
from semmoe.traffic import Traffic
from semmoe.traffic.over_ranks import most

from .attention import AttentionCost, AttentionLoad
from .block_pass import BlockPass
from .collectives import CollectiveCost
from .dense import DenseCost
from .experts import ExpertTimes
from .flow_level import FlowCost
from .host import HostCost, slowest, waits
from .whole_pass import WholePass

Float = NDArray[np.float64]
FIDELITIES = {"bottleneck": CollectiveCost, "flow": FlowCost}


class CostModel:
    """ep_size: ranks of the group. slots: expert slots a layer. allow_roofline: see CollectiveCost. fidelity: of the
    network, "bottleneck" (busiest link) or "flow" (transfers share links over time, slow). cuda_graphs: steps of a full model
    that run as one: "all", "decode" (those without prefill) or "none"; the others last at least as long as the host issues.
    planned_by: token scheduler and predictor (Run.planned_by), where a calibration measured their planning. fixed_batches: a
    full model's blocks run as the harness runs fixed batches, without the bookkeeping of requests.

    `provenance()` names the sources of everything priced so far.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        spec: DispatchSpec,
        ep_size: int,
        slots: int | None = None,
        allow_roofline: bool = False,
        fidelity: str = "bottleneck",
        cuda_graphs: str = "all",
        planned_by: Sequence[str] = (),
        fixed_batches: bool = False,
    ) -> None:
        if fidelity not in FIDELITIES:
            raise UserError(f"cost.fidelity='{fidelity}'{nearest(fidelity, FIDELITIES)}; {' or '.join(FIDELITIES)}")
        self.model, self.cluster, self.spec, self.ep_size = model, cluster, spec, ep_size
        self.cuda_graphs = cuda_graphs
        slots_per_rank = (slots or model.num_experts) // ep_size
        self.network = FIDELITIES[fidelity](cluster, spec, ep_size, slots_per_rank, allow_roofline)
        self.host = HostCost(cluster, model, spec, planned_by)
        tp = 1 if spec.flow == "dp" else ep_size
        self._experts, self._attention = ExpertTimes(cluster, model), AttentionCost(cluster, model, tp)
        self._dense = DenseCost(cluster, model, tp)
        self._whole = None if fixed_batches else WholePass.of(cluster, model, tp)
        self._blocks = BlockPass.of(cluster, model, spec.flow, ep_size) if fixed_batches else None
        self._outside_marks: set[str] = set()

    def collectives(self, traffic: Traffic) -> dict[str, Float]:
        """Milliseconds per layer of the phases srs, dispatch, combine and sag that the traffic has."""
        return {name: time / 1e3 for name, time in self.network.phases_us(traffic).items()}

    def experts(self, rows_LG: NDArray[np.integer], active_LG: NDArray[np.integer]) -> Float:
        """Milliseconds per layer until the slowest rank's experts are done."""
        return self.slowest(self.experts_by_rank(rows_LG, active_LG))

    def experts_by_rank(self, rows_LG: NDArray[np.integer], active_LG: NDArray[np.integer]) -> Float:
        """Milliseconds [L, G]."""
        return self._experts.time_us(rows_LG, active_LG) / 1e3

    def slowest(self, ms_LG: Float) -> Float:
        """What a layer waits for; see cost/host.py."""
        return slowest(ms_LG, self.cluster.cores)

    def by_rank(self, traffic: Traffic, experts_LG: Float | None = None) -> dict[str, Float]:
        """Milliseconds [L, G] of the phases in which ranks work by themselves; a layer waits for the slowest. experts_LG:
        those of the experts, where they are known."""
        if experts_LG is None:
            experts_LG = self.experts_by_rank(traffic.expert_rows_LG, traffic.active_experts_LG)
        gate_LG = self.host.gate_us(self._scored_LG(traffic)) / 1e3
        return {"gate": gate_LG, "permute": self.host.permute_us(handled_rows_LG(traffic)) / 1e3, "experts": experts_LG}

    def waits(self, traffic: Traffic, experts_LG: Float | None = None) -> dict[str, Float]:
        """Milliseconds per layer, mean over ranks, of "wait" for slower ones and, where they share cores, "core_wait" for the
        core: what imbalance and sharing cost a rank. They are part of the other phases, which count the slowest rank."""
        parts = [waits(ms_LG, self.cluster.cores) for ms_LG in self.by_rank(traffic, experts_LG).values()]
        found = {"wait": np.sum([wait for wait, _ in parts], axis=0)}
        if 0 < self.cluster.cores < self.ep_size:
            found["core_wait"] = np.sum([core for _, core in parts], axis=0)
        return found

    def gate(self, traffic: Traffic) -> Float:
        """Milliseconds per layer of scores and top-k: of the tokens at home, or of all tokens in tp_replicated."""
        return self._most_loaded(self.host.gate_us, self._scored_LG(traffic)) / 1e3

    def permute(self, traffic: Traffic) -> Float:
        """Milliseconds per layer of packing, sorting and adding up rows around the exchange."""
        return self._most_loaded(self.host.permute_us, handled_rows_LG(traffic)) / 1e3

    def start(self) -> float:
        """Milliseconds by which the first exchange after a barrier takes longer (CPU processes; measured)."""
        return float(self.cluster.host_us.get("start", 0.0)) / 1e3

    def plan(self, tokens: int) -> float:
        """Milliseconds of planning one layer: table look-up, homes, permutation."""
        return self.host.plan_us(tokens) / 1e3

    # loads are [G], or [S, G] for S steps at once; the answers are single times, or [S]

    def attention(self, load: AttentionLoad) -> Float:
        """Milliseconds of one attention block until the slowest rank is done."""
        known = self._blocks or self._whole
        self._outside_marks = {known.mark} if known else self._attention.marks
        return slowest(self._alike((known or self._attention).time_us(load)), self.cluster.cores) / 1e3

    def shared(self, load: AttentionLoad) -> Float:
        """Milliseconds of the shared experts of one MoE layer."""
        return slowest(self._alike((self._blocks or self._dense).shared_us(load.tokens_G)), self.cluster.cores) / 1e3

    def outside_layers(self, load: AttentionLoad) -> Float:
        """Milliseconds of a forward pass outside its MoE layers and attention: dense layers, LM head, host."""
        dense_layers = self.model.num_layers - self.model.num_moe_layers
        dense_us = dense_layers * slowest(self._alike(self._dense.dense_us(load.tokens_G)), self.cluster.cores)
        if self._blocks:
            dense_us = dense_layers * slowest(self._alike(self._blocks.dense_us(load.tokens_G)), self.cluster.cores)
            if dense_layers and self.spec.flow != "dp":  # around a dense layer that ranks share
                dense_us = dense_us + dense_layers * 2 * self.network.all_reduce_us(load.tokens_G)
            head_us = slowest(self._alike(self._blocks.head_us(load.sequences_G)), self.cluster.cores)
            return (dense_us + head_us) / 1e3
        if self._whole:
            return (dense_us + slowest(self._alike(self._whole.around_us(load)), self.cluster.cores)) / 1e3
        head_us = slowest(self._alike(self._dense.head_us(load.sequences_G)), self.cluster.cores)
        return (dense_us + head_us + float(self.cluster.host_us.get("step", 200.0))) / 1e3

    def eager_ms(self, load: AttentionLoad) -> Float:
        """Milliseconds that a forward pass takes at least: the host's, where it does not run as a CUDA graph."""
        prefills = load.prefill_pairs_G.any(axis=-1)
        eager = {"all": np.zeros_like(prefills), "none": np.ones_like(prefills)}.get(self.cuda_graphs, prefills)
        if not eager.any():
            return np.zeros(eager.shape)
        return np.where(eager, self.model.num_layers * self.host.eager_us() / 1e3, 0.0)

    def provenance(self) -> str:
        """Words of provenance in alphabetical order: "fitted, interpolated, roofline, skew_unvalidated"."""
        marks = self.network.marks | self.host.marks | {self._experts.provenance}
        return ", ".join(sorted(marks | self._outside_marks))

    def _alike(self, queue_us: Float) -> Float:
        """Times of all ranks where one queue is everybody's: they do the same, and those that share a core wait."""
        return queue_us if self.spec.flow == "dp" else np.repeat(queue_us, self.ep_size, axis=-1)

    def _most_loaded(self, time_us: Callable[[NDArray[np.integer]], Float], rows_LG: NDArray[np.integer]) -> Float:
        """`slowest` where a rank with more rows takes no less time: that of the rank with most, unless cores are shared."""
        if 0 < self.cluster.cores < self.ep_size:
            return slowest(time_us(rows_LG), self.cluster.cores)
        return time_us(most(rows_LG))

    def _scored_LG(self, traffic: Traffic) -> NDArray[np.int64]:
        if self.spec.flow != "tp_replicated":
            return traffic.homes_LG
        return np.full_like(traffic.homes_LG, traffic.tokens)


def handled_rows_LG(traffic: Traffic) -> NDArray[np.int64]:
    """Rows that pass through each rank's hands: its experts' rows, those it sends and those that it receives."""
    return traffic.expert_rows_LG + traffic.exchanged_rows_LG()
