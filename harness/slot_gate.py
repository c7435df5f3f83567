"""SlotGate: the gate of one MoE layer, answering in slots of its placement.

With P = E and ungrouped gating the gate's rows are put into slot order once, so that the gate's own top-k comes out as
slots (any engine can do that); otherwise ids go through maps, and replicas through `router`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from semmoe.errors import UserError
from semmoe.placement.base import Placement
from semmoe.planning import ReplicaRouter

from .reference.gate import Gating


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes of the tokens that a layer is given: slots_Tk (int64) as the planner made them.

    forced: the layer uses them, whatever its gate says (checks of losslessness, replayed traces). Not forced: the gate
    decides, and `route_flips` counts how often it differs. weights_Tk: gate weights; None: those that this layer's
    gate gives to the forced experts.
    """

    slots_Tk: Tensor
    weights_Tk: Tensor | None = None
    forced: bool = True

    def of(self, token_n: Tensor) -> Routes:
        """Those of some tokens."""
        weights = None if self.weights_Tk is None else self.weights_Tk.index_select(0, token_n)
        return Routes(self.slots_Tk.index_select(0, token_n), weights, self.forced)


class SlotGate:
    """Layer `layer` (0-based over MoE layers). permuted: whether the gate's rows stand in slot order.

    `route` is the whole gate. Its parts (score, chosen, weights) read nothing to the host, so that a graph can hold them.
    """

    def __init__(
        self,
        gating: Gating,
        placement: Placement,
        layer: int,
        gate_EH: Tensor,
        bias_E: Tensor | None,
        router: ReplicaRouter | None,
    ) -> None:
        self.gating, self.placement, self.layer, self.router = gating, placement, layer, router
        device = gate_EH.device
        self._expert_of_slot_P = torch.from_numpy(placement.physical_to_logical_LP[layer].astype(np.int64)).to(device)
        self._first_slot_E = torch.from_numpy(placement.first_slot_LE[layer].astype(np.int64)).to(device)
        self.permuted = not placement.has_replicas and gating.n_group == 1
        self._gate_EH = gate_EH[self._expert_of_slot_P] if self.permuted else gate_EH
        self._bias_E = bias_E[self._expert_of_slot_P] if bias_E is not None and self.permuted else bias_E

    def route(self, x_nH: Tensor, routes: Routes | None, home: int) -> tuple[Tensor, Tensor, int | None]:
        """(slots, fp32 weights, flips) of tokens at one home. The gate always runs: its time belongs to the layer."""
        score_nE = self.score(x_nH)
        chosen_nk = self.chosen(score_nE)
        flips = None if routes is None else self.flips(chosen_nk, routes.slots_Tk)
        if routes is not None and routes.forced:
            given = routes.weights_Tk
            return routes.slots_Tk, self.weights(score_nE, routes.slots_Tk) if given is None else given, flips
        return self._slots(chosen_nk, home), self.gating.weights(score_nE, chosen_nk), flips

    def score(self, x_nH: Tensor) -> Tensor:
        return self.gating.scores(torch.nn.functional.linear(x_nH, self._gate_EH, self._bias_E))

    def chosen(self, score_nE: Tensor) -> Tensor:
        """The gate's own choice: slots where it is permuted, else experts."""
        return self.gating.choose(score_nE)

    def weights(self, score_nE: Tensor, slots_nk: Tensor) -> Tensor:
        """fp32 weights of given slots."""
        return self.gating.weights(score_nE, slots_nk if self.permuted else self._expert_of_slot_P[slots_nk])

    def flips(self, chosen_nk: Tensor, slots_nk: Tensor) -> int:
        """Choices of the routes that are not among the gate's own (order does not matter). Reads the device."""
        asked_nk = self._expert_of_slot_P[slots_nk]
        chosen_nk = self._expert_of_slot_P[chosen_nk] if self.permuted else chosen_nk
        return int((asked_nk[:, :, None] != chosen_nk[:, None, :]).all(dim=2).sum())

    def _slots(self, chosen_nk: Tensor, home: int) -> Tensor:
        if self.permuted:
            return chosen_nk
        if not self.placement.has_replicas:
            return self._first_slot_E[chosen_nk]
        if self.router is None:
            raise UserError(
                f"{self.placement.num_slots} slots for {self.placement.num_experts} experts need a replica router"
            )
        homes = np.full(len(chosen_nk), home, dtype=np.int64)
        slots_nk = self.router.slots(chosen_nk.cpu().numpy(), homes, self.placement, self.layer)
        return torch.from_numpy(np.asarray(slots_nk, dtype=np.int64)).to(chosen_nk.device)
