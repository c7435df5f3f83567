"""ELDR-style request scheduling: least loaded among the ranks whose typical prefill resembles this one's.

The source routes requests of a disaggregated engine to decoders by the *measured* expert counts of their prefill.
Offline: signatures of training requests (count times inverse document frequency per layer and expert) are clustered by
K-means with clusters of equal size, one cluster a rank. Online: every rank whose centroid is within `band` of the most
similar one qualifies, and the least loaded of them gets the request.

Our additions: similarity is the cosine after subtracting the mean training signature (raw counts are so alike that
every band would admit every rank), and clusters are matched to the ranks that hold their experts, exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..assign import assign_capped, assign_equal
from ..errors import UserError
from ..placement.base import Placement
from ..profile import Profile
from .base import RankStates

if TYPE_CHECKING:
    from ..serving import Request

SCALE = 1 << 20  # fixed point of a cosine
ROUNDS = 30


class Eldr:
    """Least loaded rank within a similarity band of the best prefill centroid. band: in units of cosine; starts: of
    K-means; seed: of its starts."""

    needs_head = True

    def __init__(self, band: float = 0.1, starts: int = 8, seed: int = 0) -> None:
        if not band >= 0 or starts < 1:
            raise UserError(f"request_scheduler.band={band} must be >= 0 and starts={starts} at least 1")
        self.band, self.starts, self.seed = band, starts, seed
        self.centroid_GD: NDArray[np.float64] | None = None

    def fit(self, profile: Profile, placement: Placement) -> None:
        """Learn the idf weights and one centroid a rank from the training requests."""
        layers, ranks = profile.num_layers, placement.ep_size
        counts_RLE = np.stack([profile.request_counts_RE(layer) for layer in range(layers)], axis=1)
        requests = len(counts_RLE)
        seen_LE = (counts_RLE > 0).sum(axis=0)
        self.idf_LE = np.log((1.0 + requests) / (1.0 + seen_LE)) + 1.0
        self.mean_D = np.zeros(counts_RLE[0].size)
        raw_RD = np.stack([self._raw(counts_LE) for counts_LE in counts_RLE])
        self.mean_D = raw_RD.mean(axis=0)
        unit_RD = np.stack([self.signature(counts_LE) for counts_LE in counts_RLE])
        cluster_R = self._clusters(unit_RD, ranks)
        mass_CG = np.zeros((ranks, ranks))
        for c in range(ranks):
            mass_LE = counts_RLE[cluster_R == c].sum(axis=0)
            mass_CG[c] = np.einsum("le,leg->g", mass_LE, placement.rank_mask_LEG)
        rank_C = assign_equal(np.rint(mass_CG).astype(np.int64))
        self.centroid_GD = np.empty((ranks, unit_RD.shape[1]))
        self.centroid_GD[rank_C] = self._centroids(unit_RD, cluster_R, ranks)

    def signature(self, counts_LE: NDArray[np.integer]) -> NDArray[np.float64]:
        """Centred unit vector [L * E] of a request's expert counts."""
        return _unit(self._raw(counts_LE) - self.mean_D)

    def values(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> NDArray[np.float64]:
        """Minus the load of the ranks within the band, -inf elsewhere."""
        if head_counts is None or self.centroid_GD is None:
            raise UserError("request_scheduler eldr needs measured expert counts of the prefill and a fitted profile")
        like_G = self.centroid_GD @ self.signature(head_counts)
        tokens_G = np.asarray(ranks.queued_tokens_G) + ranks.kv_tokens_G
        load_G = tokens_G + (np.asarray(ranks.running_G) + ranks.waiting_G)
        return np.where(like_G >= like_G.max() - self.band, -load_G.astype(np.float64), -np.inf)

    def assign(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> int:
        return int(self.values(request, score_G, head_counts, ranks).argmax())

    def _raw(self, counts_LE: NDArray[np.integer]) -> NDArray[np.float64]:
        return _unit((np.asarray(counts_LE, dtype=np.float64) * self.idf_LE).ravel())

    def _clusters(self, unit_RD: NDArray[np.float64], clusters: int) -> NDArray[np.int64]:
        """Balanced K-means: at most ceil(R / clusters) members each, the assignment exact; the best of the starts."""
        requests, rng = len(unit_RD), np.random.default_rng(self.seed)
        best, best_R = -np.inf, np.zeros(requests, dtype=np.int64)
        for _ in range(self.starts):
            cluster_R = rng.permutation(np.arange(requests) % clusters)
            for _ in range(ROUNDS):
                like_RC = unit_RD @ self._centroids(unit_RD, cluster_R, clusters).T
                fresh_R = assign_capped(np.rint(like_RC * SCALE).astype(np.int32), -(-requests // clusters))
                if np.array_equal(fresh_R, cluster_R):
                    break
                cluster_R = fresh_R
            value = float(like_RC[np.arange(requests), cluster_R].sum())
            if value > best:
                best, best_R = value, cluster_R
        return best_R

    @staticmethod
    def _centroids(unit_RD: NDArray[np.float64], cluster_R: NDArray[np.int64], clusters: int) -> NDArray[np.float64]:
        empty = np.zeros(unit_RD.shape[1])
        members = [unit_RD[cluster_R == c] for c in range(clusters)]
        return np.stack([_unit(m.mean(axis=0)) if len(m) else empty for m in members])


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-12))
