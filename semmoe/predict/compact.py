"""Rows of a token table in a few bytes: the largest entries of each row, the rest as a share of the marginal.

P[u] = share[u, m] at the M kept experts; what is left of 1 goes to the other experts in proportion to the marginal p_0,
as smoothing would. An entry takes an expert id (one byte up to 256 experts) and its chance k P in steps of 1/255, so a
row takes 2 M bytes instead of 4 E: qwen3-30b-a3b, 152k types x 48 layers x 16 entries: 233 MB for 3.7 GB.
A look-up reads one row. What it costs in recall: results/predictors_compact.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from ..profile import Profile
from ..trace import RoutingTrace

STEPS = 255


@dataclass(frozen=True, eq=False)
class CompactRows:
    """One layer: expert_UM ids in descending chance, step_UM = round(255 k P); row U is the marginal prior_E itself."""

    expert_UM: NDArray[np.unsignedinteger]
    step_UM: NDArray[np.uint8]
    prior_E: NDArray[np.float32]
    top_k: int

    @classmethod
    def of(
        cls, counts_UE: NDArray[np.integer], tokens_U: NDArray[np.integer], top_k: int, kappa: float, kept: int,
        prior_E: NDArray[np.floating],
    ) -> CompactRows:  # fmt: skip
        """The `kept` largest of P[u, e] = (counts[u, e] / k + kappa p_0[e]) / (N_u + kappa) of every row."""
        types, experts = counts_UE.shape
        kept = min(kept, experts)
        expert_UM = np.empty((types, kept), dtype=np.uint8 if experts <= 256 else np.uint16)
        step_UM = np.empty((types, kept), dtype=np.uint8)
        for begin in range(0, types, 4096):
            part = slice(begin, begin + 4096)
            share_UE = (counts_UE[part] / top_k + kappa * prior_E) / (tokens_U[part, None] + kappa)
            order_UM = np.argsort(-share_UE, axis=1, kind="stable")[:, :kept]
            chance_UM = np.minimum(top_k * np.take_along_axis(share_UE, order_UM, axis=1), 1.0)
            expert_UM[part], step_UM[part] = order_UM, np.rint(STEPS * chance_UM)
        return cls(expert_UM, step_UM, prior_E.astype(np.float32), top_k)

    @property
    def nbytes(self) -> int:
        return int(self.expert_UM.nbytes + self.step_UM.nbytes + self.prior_E.nbytes)

    def rows(self, row_T: NDArray[np.integer]) -> NDArray[np.float32]:
        """P [T, E] of these rows (U: the marginal)."""
        return expand(self.expert_UM, self.step_UM, self.prior_E, row_T, 1.0 / (STEPS * self.top_k))


@numba.njit(cache=True)
def expand(expert_UM, step_UM, prior_E, row_T, unit):  # type: ignore[no-untyped-def]
    tokens, types, kept = len(row_T), expert_UM.shape[0], expert_UM.shape[1]
    share_TE = np.empty((tokens, len(prior_E)), dtype=np.float32)
    for t in range(tokens):
        share_TE[t] = prior_E
        u = row_T[t]
        if u >= types:
            continue
        mass, other = 0.0, 1.0
        for m in range(kept):
            mass += step_UM[u, m] * unit
            other -= prior_E[expert_UM[u, m]]
        rest = max(1.0 - mass, 0.0) / other if other > 1e-6 else 0.0
        scale = 1.0 / mass if rest == 0.0 and mass > 0 else 1.0  # rounding alone: every row sums to 1
        for e in range(len(prior_E)):
            share_TE[t, e] *= rest
        for m in range(kept):
            share_TE[t, expert_UM[u, m]] = step_UM[u, m] * unit * scale
    return share_TE


def report(trace: RoutingTrace, folds: int = 5, seed: int = 0) -> str:
    """Markdown: held-out recall, calibration error and bytes by entries a row, mean over folds by request."""
    from .evaluate import accuracy
    from .token_table import TokenTable

    k, experts = trace.top_k, trace.num_experts
    lines = ["| entries a row | recall | change | calibration error | bytes | dense fp32 |", "| --- |" + " --- |" * 5]
    whole = 0.0
    for kept in dict.fromkeys([experts, 4 * k, 2 * k, k]):
        runs, dense = [], []
        for train, test in Profile.fit(trace).folds(folds, seed):
            table = TokenTable(entries=kept)
            table.fit(Profile.fit(train))
            runs.append(accuracy(table, test))
            dense.append(4.0 * (len(table.profile.token_ids_U) + 1) * experts * trace.num_layers)
        recall, error, size = (
            float(np.mean(values))
            for values in zip(*((r.recall_L.mean(), r.calibration_L.mean(), r.table_bytes) for r in runs), strict=True)
        )
        whole = whole or recall
        lines.append(
            f"| {kept}{' (all)' if kept == experts else ''} | {recall:.4f} | {recall - whole:+.4f} | {error:.4f} | "
            f"{size / 1e6:.2f} MB | {np.mean(dense) / 1e6:.2f} MB |"
        )
    return "\n".join(lines)


def main() -> None:
    """`python -m semmoe.predict.compact TRACE...`: the report of each (tiny, gptoss or a file)."""
    import sys

    from ..evaluate import load

    names = sys.argv[1:] or ["tiny"]
    print("# What compact rows of the token table cost\n")
    print(
        f"Made by `python -m semmoe.predict.compact {' '.join(names)}`: 5 folds by request, token-weighted, mean over layers."
    )
    for name in names:
        trace, _ = load(name, None)
        print(f"\n## {name}\n\n{report(trace)}")


if __name__ == "__main__":
    main()
