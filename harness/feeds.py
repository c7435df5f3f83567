"""Feeds: the hidden states and weights that measured MoE layers get. Both are the same on every rank.

HiddenFeed  the tiny model's real hidden states (input of each MoE layer) and weights: the gate sees what it was trained
            on, so `route_flips` means something
RandomFeed  seeded normal rows and weights of any model's shape, hidden and expert width as `model_scale` left them; or
            such rows before the MoE layers of a real checkpoint (measure.feed=checkpoint, measure.checkpoint=FOLDER)
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semmoe.errors import UserError
from semmoe.specs import ModelSpec
from semmoe.trace import RoutingTrace

from .weights import RandomWeights, TinyWeights, WeightSource
from .worker import RankContext

FEEDS = ("hidden", "random", "checkpoint")
RANDOM_ROWS = 4096  # rows of the pool that RandomFeed draws from: large enough that no batch is constant


class Feed(Protocol):
    """real: whether rows and gate belong together, as they do in a trained model."""

    source: WeightSource
    real: bool

    def rows_TH(self, layer: int, rows_T: NDArray[np.int64]) -> Tensor:
        """fp32 hidden states of these rows of the trace before MoE layer `layer`."""
        ...


class HiddenFeed:
    """Rank 0 runs the tiny model once over every request of the trace; the others get its hidden states [L, N, H]."""

    real = True

    def __init__(self, context: RankContext, trace: RoutingTrace, model: ModelSpec) -> None:
        self.source: WeightSource
        self.source = tiny = TinyWeights()
        self._model, config = tiny.model, tiny.model.config
        if model.hidden != config.hidden:
            raise UserError(
                "measure.feed=hidden needs the tiny model as it is; set model_scale=1 or measure.feed=random"
            )
        ours, theirs = (
            (config.num_layers, config.num_experts, config.top_k, config.vocab_size),
            (trace.num_layers, trace.num_experts, trace.top_k, trace.vocab_size),
        )
        if ours != theirs:
            raise UserError(
                f"measure.feed=hidden runs the tiny model (layers, experts, top-k, vocabulary: {ours}), but the trace of "
                f"{trace.model} has {theirs}; use measure.feed=random"
            )
        self.hidden_LNH = torch.empty(trace.num_layers, trace.num_tokens, config.hidden)
        if context.rank == 0:
            self._forward(context, trace)
        context.broadcast(self.hidden_LNH)

    def _forward(self, context: RankContext, trace: RoutingTrace) -> None:
        for request in range(trace.num_requests):
            part = slice(int(trace.request_offset_R1[request]), int(trace.request_offset_R1[request + 1]))
            tokens_1T = torch.from_numpy(trace.token_id_T[part].astype(np.int64))[None]
            self.hidden_LNH[:, part] = self._model.moe_inputs(tokens_1T).hidden_LTH
            context.progress(request + 1, trace.num_requests)

    def rows_TH(self, layer: int, rows_T: NDArray[np.int64]) -> Tensor:
        return self.hidden_LNH[layer].index_select(0, torch.from_numpy(rows_T))


class RandomFeed:
    """Row r of layer l is row (r + 997 l) mod 4096 of one seeded normal pool."""

    real = False

    def __init__(self, model: ModelSpec, seed: int = 0, source: WeightSource | None = None) -> None:
        self.source = source or RandomWeights(model, seed=seed)
        self._pool = torch.randn(RANDOM_ROWS, self.source.hidden, generator=torch.Generator().manual_seed(seed))

    def rows_TH(self, layer: int, rows_T: NDArray[np.int64]) -> Tensor:
        return self._pool.index_select(0, torch.from_numpy((rows_T + 997 * layer) % RANDOM_ROWS))


def make_feed(
    context: RankContext,
    kind: str,
    model: ModelSpec,
    trace: RoutingTrace,
    seed: int = 0,
    checkpoint: str | None = None,
) -> Feed:
    """The feed of a configuration, kept in the context: a sweep computes hidden states once per trace. Collective."""
    if kind not in FEEDS:
        raise UserError(f"measure.feed='{kind}' must be one of {', '.join(FEEDS)}")
    key = (kind, trace.digest if kind == "hidden" else (model, seed, checkpoint))
    if context.state.get("feed_key") != key:
        context.state.pop("feed", None)
        context.state.pop("feed_key", None)
        context.state["feed"] = _new_feed(context, kind, model, trace, seed, checkpoint)
        context.state["feed_key"] = key
    feed: Feed = context.state["feed"]
    return feed


def _new_feed(
    context: RankContext, kind: str, model: ModelSpec, trace: RoutingTrace, seed: int, checkpoint: str | None
) -> Feed:
    if kind == "hidden":
        return HiddenFeed(context, trace, model)
    return RandomFeed(model, seed, open_checkpoint(checkpoint, model) if kind == "checkpoint" else None)


def weights_of(kind: str, model: ModelSpec, seed: int, checkpoint: str | None) -> WeightSource | None:
    """The MoE weights that a feed of this kind brings; None: random ones of the model's shape."""
    if kind not in FEEDS:
        raise UserError(f"measure.feed='{kind}' must be one of {', '.join(FEEDS)}")
    if kind == "random":
        return None
    if kind == "checkpoint":
        return open_checkpoint(checkpoint, model)
    tiny = TinyWeights()
    config = tiny.model.config
    ours = (config.hidden, config.num_layers, config.num_experts, config.top_k)
    theirs = (model.hidden, model.num_layers, model.num_experts, model.top_k)
    if ours != theirs:
        raise UserError(
            f"measure.feed=hidden brings the tiny model's MoE weights (hidden, layers, experts, top-k: {ours}), but "
            f"{model.name} has {theirs}; set measure.feed=random"
        )
    return tiny


def open_checkpoint(folder: str | None, model: ModelSpec) -> WeightSource:
    """The MoE layers of a local Hugging Face folder."""
    from .models.hf_checkpoint import HFCheckpoint

    if not folder:
        raise UserError("measure.feed=checkpoint needs measure.checkpoint=FOLDER, a local Hugging Face checkpoint")
    return HFCheckpoint(folder, model)
