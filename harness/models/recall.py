"""How well the token id alone predicts the experts: recall@k of a token table on tokens that it was not fitted to.

`python -m harness.models.recall [trace.npz]` prints it per layer, fitted on half of the requests, tested on the others.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from semmoe.trace import RoutingTrace

from .tiny import TinyModel


def token_recall(
    token_train_T: np.ndarray,
    experts_train_TLk: np.ndarray,
    token_test_T: np.ndarray,
    experts_test_TLk: np.ndarray,
    *,
    vocab_size: int,
    num_experts: int,
    backoff: float = 1.0,
) -> list[float]:
    """recall@k per layer: share of the test assignments among the k experts most likely for the token id.

    P(e|v) is proportional to count[v, e] + backoff * k * P(e): an unseen token id falls back to the layer's
    popular experts.
    """
    layers, top_k = experts_train_TLk.shape[1:]
    recalls = []
    for layer in range(layers):
        flat = token_train_T[:, None].astype(np.int64) * num_experts + experts_train_TLk[:, layer]
        count_VE = np.bincount(flat.ravel(), minlength=vocab_size * num_experts).reshape(vocab_size, num_experts)
        score_VE = count_VE + backoff * top_k * count_VE.sum(0) / count_VE.sum()
        guess_Vk = np.argsort(-score_VE, axis=1, kind="stable")[:, :top_k]
        hit_Tkk = experts_test_TLk[:, layer, :, None] == guess_Vk[token_test_T][:, None, :]
        recalls.append(float(hit_Tkk.any(-1).mean()))
    return recalls


def recall_per_layer(model: TinyModel, streams: list[np.ndarray], window: int, windows: int = 64) -> list[float]:
    """Token-table recall on held-out text: windows of each stream, the even ones to fit and the odd ones to test."""
    tokens: list[list[np.ndarray]] = [[], []]
    experts: list[list[np.ndarray]] = [[], []]
    for stream in streams:
        count = min(windows, len(stream) // window)
        rows = stream[: count * window].astype(np.int64).reshape(count, window)
        for part in (0, 1):
            chosen = rows[part::2]
            capture = model.moe_inputs(torch.from_numpy(chosen))
            tokens[part].append(chosen.ravel())
            experts[part].append(capture.experts_LTk.permute(1, 0, 2).numpy())
    return token_recall(
        np.concatenate(tokens[0]),
        np.concatenate(experts[0]),
        np.concatenate(tokens[1]),
        np.concatenate(experts[1]),
        vocab_size=model.config.vocab_size,
        num_experts=model.config.num_experts,
    )


def trace_recall(trace: RoutingTrace, train_fraction: float = 0.5, seed: int = 0) -> list[float]:
    """Recall per layer on the held-out requests of a trace."""
    train, test = trace.split(train_fraction, seed)
    return token_recall(
        train.token_id_T,
        train.experts_TLk,
        test.token_id_T,
        test.experts_TLk,
        vocab_size=trace.vocab_size,
        num_experts=trace.num_experts,
    )


if __name__ == "__main__":
    from .record_tiny import TRACE_PATH

    path = sys.argv[1] if len(sys.argv) > 1 else TRACE_PATH
    print(" ".join(f"{recall:.3f}" for recall in trace_recall(RoutingTrace.load(path))))
