"""How well predictors know the experts of unseen requests, layer by layer, beside the paper's way of counting.

    python -m semmoe.predict.evaluate [--trace tiny|gptoss|FILE --model NAME] [--out FILE]

Held-out and token-weighted: recall = share of a token's k experts among the k that the predictor ranks highest;
calibration = expected calibration error of the expected hits k q[e] (capped at 1) over ten bins of equal width.
The paper's counting: per token *type* and in sample, F1 of the type's static hottest k experts, median over types.
Every occurrence counts once above, every type once below, and a type seen once is its own perfect prediction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..profile import Profile
from ..trace import RoutingTrace
from .base import ExpertPredictor
from .fusion import Fusion
from .token_table import TokenTable

BINS = 10


@dataclass(frozen=True, eq=False)
class Accuracy:
    """recall_L and calibration_L (expected calibration error) of one predictor on unseen requests."""

    recall_L: NDArray[np.float64]
    calibration_L: NDArray[np.float64]
    table_bytes: int


def accuracy(predictor: ExpertPredictor, trace: RoutingTrace) -> Accuracy:
    """Figures of a fitted predictor on the tokens of `trace`."""
    recall, calibration = [], []
    lookback = int(getattr(predictor, "lookback", 0))
    for layer in range(trace.num_layers):
        history = np.full((trace.num_tokens, lookback, trace.top_k), -1, dtype=np.int16)
        for back in range(1, min(lookback, layer) + 1):
            history[:, back - 1] = trace.experts_TLk[:, layer - back]
        q_TE = predictor.experts(trace.token_id_T, layer, history if lookback else None)
        hit_TE = np.zeros(q_TE.shape, dtype=bool)
        np.put_along_axis(hit_TE, trace.experts_TLk[:, layer].astype(np.int64), True, axis=1)
        recall.append(recall_of(q_TE, hit_TE, trace.top_k))
        calibration.append(calibration_error(np.minimum(trace.top_k * q_TE, 1.0), hit_TE))
    return Accuracy(np.array(recall), np.array(calibration), int(getattr(predictor, "table_bytes", 0)))


def recall_of(q_TE: NDArray[np.floating], hit_TE: NDArray[np.bool_], k: int) -> float:
    """Share of the true experts among the k of largest q."""
    best_Tk = np.argpartition(-q_TE, k - 1, axis=1)[:, :k]
    return float(np.take_along_axis(hit_TE, best_Tk, axis=1).sum() / hit_TE.sum())


def calibration_error(chance_TE: NDArray[np.floating], hit_TE: NDArray[np.bool_]) -> float:
    """Expected calibration error: |mean chance - share of hits| of each bin of chances, weighted by its size.

    Worked example: chances [0.8, 0.8, 0.8, 0.8] with hits [1, 1, 0, 0]: one bin, |0.8 - 0.5| = 0.3.
    """
    bin_N = np.minimum((chance_TE.ravel() * BINS).astype(np.int64), BINS - 1)
    said = np.bincount(bin_N, chance_TE.ravel(), BINS)
    came = np.bincount(bin_N, hit_TE.ravel(), BINS)
    return float(np.abs(said - came).sum() / len(bin_N))


def paper_f1_L(trace: RoutingTrace) -> NDArray[np.float64]:
    """Per layer: median over token types of the in-sample F1 of the type's hottest k experts against each occurrence's.

    Both sets have k members, so F1, precision and recall are one number.
    """
    profile, k = Profile.fit(trace), trace.top_k
    medians = []
    for layer in range(trace.num_layers):
        counts_UE = profile.token_counts_UE(layer)
        hottest = np.sort(counts_UE, axis=1)[:, ::-1][:, :k].sum(axis=1)
        medians.append(float(np.median(hottest / (k * profile.token_count_U))))
    return np.array(medians)


def report(trace: RoutingTrace, folds: int = 5, seed: int = 0) -> str:
    """Markdown table per layer, mean over folds by request."""
    kinds: dict[str, Callable[[], TokenTable | Fusion]] = {
        "token table": TokenTable,
        "fusion, one layer back": lambda: Fusion(lookback=1),
        "fusion, two layers back": Fusion,
    }
    found: dict[str, list[Accuracy]] = {name: [] for name in kinds}
    for train, test in Profile.fit(trace).folds(folds, seed):
        for name, make in kinds.items():
            predictor = make()
            predictor.fit(Profile.fit(train))
            found[name].append(accuracy(predictor, test))
    paper_L = paper_f1_L(trace)
    head = (
        "| layer | " + " | ".join(f"{name}: recall (ECE)" for name in kinds) + " | paper's counting: type-median F1 |"
    )
    lines = [head, "| --- |" + " --- |" * (len(kinds) + 1)]
    rows = [(str(trace.layer_ids_L[i]), slice(i, i + 1)) for i in range(trace.num_layers)] + [("mean", slice(None))]
    for label, part in rows:
        cells = [
            f"{np.mean([a.recall_L[part] for a in runs]):.3f} ({np.mean([a.calibration_L[part] for a in runs]):.3f})"
            for runs in found.values()
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + f" | {paper_L[part].mean():.3f} |")
    spread = [f"± {np.std([a.recall_L.mean() for a in runs], ddof=1):.3f}" for runs in found.values()]
    lines.append("| spread over folds | " + " | ".join(spread) + " | |")
    sizes = [f"{np.mean([a.table_bytes for a in runs]) / 1e6:.2f} MB" for runs in found.values()]
    lines.append("| tables | " + " | ".join(sizes) + " | |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    from ..evaluate import load  # here: the evaluation of policies builds on predictors

    parser = argparse.ArgumentParser(prog="python -m semmoe.predict.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", default="tiny", help="tiny, gptoss, or a trace file")
    parser.add_argument("--model", help="model of a trace file")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="Markdown file (default: standard output)")
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    try:
        trace, _ = load(options.trace, options.model)
        text = (
            f"# Predictors on held-out requests: {Path(options.trace).stem}\n\n"
            f"Made by `python -m semmoe.predict.evaluate {' '.join(words)}`: {options.folds} folds by request.\n\n"
            f"{report(trace, options.folds)}\n"
        )
    except UserError as error:
        print(f"semmoe.predict.evaluate: {error}", file=sys.stderr)
        return 2
    if options.out:
        from ..files import write_atomically

        write_atomically(options.out, text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
