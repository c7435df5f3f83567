"""The gate: which experts a token chooses and with what weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semmoe.errors import UserError
from semmoe.specs import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Gating:
    """How a model turns gate logits into k experts and weights.

    scoring: "softmax" over all experts, or "sigmoid" of each. n_group > 1: experts stand in groups of equal size and
    only the topk_group groups with the largest sum of their two best scores may be chosen from (DeepSeek-V3; for
    softmax, the best score, as in DeepSeek-V2). renormalise: the k weights are divided by their sum.
    """

    top_k: int
    scoring: str = "softmax"
    renormalise: bool = True
    n_group: int = 1
    topk_group: int = 1

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise UserError(f"scoring '{self.scoring}' must be 'softmax' or 'sigmoid'")

    @classmethod
    def of(cls, model: ModelSpec) -> Gating:
        return cls(
            top_k=model.top_k,
            scoring=model.scoring,
            renormalise=model.renormalise,
            n_group=model.n_group,
            topk_group=model.topk_group,
        )

    def scores(self, logits_TE: Tensor) -> Tensor:
        """fp32 score of every expert."""
        logits_TE = logits_TE.float()
        return logits_TE.softmax(dim=-1) if self.scoring == "softmax" else logits_TE.sigmoid()

    def choose(self, score_TE: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """experts_Tk, best first. bias_E moves the choice but not the weight (DeepSeek-V3's load balancing)."""
        ranking_TE = score_TE if bias_E is None else score_TE + bias_E
        if self.n_group > 1:
            ranking_TE = self._limit_groups(ranking_TE)
        return ranking_TE.topk(self.top_k, dim=-1).indices

    def weights(self, score_TE: Tensor, experts_Tk: Tensor) -> Tensor:
        """fp32 weights of given experts: also of forced ones, whatever the gate would have chosen."""
        weights_Tk = score_TE.gather(1, experts_Tk)
        return weights_Tk / weights_Tk.sum(dim=-1, keepdim=True) if self.renormalise else weights_Tk

    def _limit_groups(self, ranking_TE: Tensor) -> Tensor:
        tokens, experts = ranking_TE.shape
        grouped = ranking_TE.view(tokens, self.n_group, experts // self.n_group)
        best = min(2 if self.scoring == "sigmoid" else 1, grouped.shape[2])
        group_score = grouped.topk(best, dim=-1).values.sum(dim=-1)
        kept = torch.zeros(tokens, self.n_group, dtype=torch.bool, device=ranking_TE.device)
        kept.scatter_(1, group_score.topk(self.topk_group, dim=-1).indices, True)
        return grouped.masked_fill(~kept[:, :, None], -torch.inf).reshape(tokens, experts)
