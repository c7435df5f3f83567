"""Synthetic routing traces with dials and a planted optimum that tests know exactly.

In every layer the experts are split at random into `groups` equal blocks: the planted ranks. A token type belongs to a
topic, a topic to a block. Each of a token's k choices goes to its own block, or with probability noise_l strays to a
block drawn by the blocks' shares; inside a block experts are distinct, the token's favourites first. Hence, in
expectation and whatever the other dials say:

    load of planted rank g         share_g          (share_0 = load_skew / groups, the others equal)
    LAR of planted homes, layer l  1 - noise_l + noise_l * sum_g share_g^2
    noise_l                        min(1, context_noise + depth_fade * l / (layers - 1))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..trace import RoutingTrace
from .room import check_room


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """make() gives the RoutingTrace; planted_* the optimum behind it. Same dials and seed, same trace.

    model, num_experts, top_k, layers, first_layer, vocab_size: what the trace claims to be recorded on.
    requests; prompt_len, output_len in tokens, each length spread lognormally with sigma `length_spread` (0: all equal).
    groups: planted ranks.  topics: kinds of requests (the domain label).  topic_purity: share of a request's tokens
    that are of its own topic, the rest of any.  zipf: exponent of the token frequencies inside a topic.
    concentration 0..1: 0 any expert of the block, 1 always the same favourites of a token type.
    context_noise, depth_fade 0..1: choices that do not follow the token, in the first layer and added until the last.
    local_rate 1/groups..1: LAR of planted homes in every layer, instead of the two (load_skew 1).  shuffle_experts: where
    the blocks lie, a random draw per layer; false: block g is the g-th run of experts, as contiguous placement has it.
    drift 0..1: the later half of the requests is a second domain in which this share of the token types asks for the
    next block (with load_skew, the hot rank moves with them).  load_skew: load of planted rank 0 over the mean, >= 1.
    """

    requests: int = 100
    prompt_len: int = 256
    output_len: int = 64
    length_spread: float = 0.0
    model: str = "synthetic"
    num_experts: int = 64
    top_k: int = 6
    layers: int = 26
    first_layer: int = 0
    vocab_size: int = 32768
    groups: int = 8
    topics: int = 16
    topic_purity: float = 0.6
    zipf: float = 1.0
    concentration: float = 0.7
    context_noise: float = 0.2
    depth_fade: float = 0.3
    drift: float = 0.0
    load_skew: float = 1.0
    local_rate: float | None = None
    shuffle_experts: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_len", "num_experts", "top_k", "layers", "vocab_size", "groups", "topics"):
            if getattr(self, name) < 1:
                raise UserError(f"synthetic trace: {name}={getattr(self, name)} must be at least 1")
        for name in ("topic_purity", "concentration", "context_noise", "depth_fade", "drift"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"synthetic trace: {name}={getattr(self, name)} must lie in 0..1")
        for name in ("output_len", "length_spread", "zipf", "first_layer"):
            if not getattr(self, name) >= 0:
                raise UserError(f"synthetic trace: {name}={getattr(self, name)} must not be negative")
        if self.num_experts % self.groups or self.top_k > self.num_experts // self.groups:
            raise UserError(
                f"synthetic trace: groups={self.groups} must divide num_experts={self.num_experts} into blocks of at "
                f"least top_k={self.top_k} experts"
            )
        if not self.groups <= self.topics <= self.vocab_size:
            raise UserError(
                f"synthetic trace: topics={self.topics} must lie between groups={self.groups} (each block needs one) "
                f"and vocab_size={self.vocab_size} (each topic needs a token)"
            )
        if self.local_rate is not None and not 1 / self.groups <= self.local_rate <= 1:
            raise UserError(
                f"synthetic trace: local_rate={self.local_rate} must lie in {1 / self.groups:.3g}..1 (1/groups..1): routes "
                "that know nothing of the blocks are that local already"
            )
        if not 1 <= self.load_skew <= self.groups:
            raise UserError(f"synthetic trace: load_skew={self.load_skew} must lie in 1..groups={self.groups}")

    @cached_property
    def planted_rank_LE(self) -> NDArray[np.int64]:
        """Block of every expert, the optimal rank at ep_size = groups."""
        rng = np.random.default_rng([self.seed, 1])
        block_E = np.arange(self.num_experts) // (self.num_experts // self.groups)
        if not self.shuffle_experts:
            return np.tile(block_E, (self.layers, 1))
        return np.stack([rng.permutation(block_E) for _ in range(self.layers)])

    @property
    def share_G(self) -> NDArray[np.float64]:
        """Expected load of each planted rank, as a share."""
        first = self.load_skew / self.groups
        rest = (1 - first) / max(self.groups - 1, 1)
        return np.array([first] + [rest] * (self.groups - 1))

    @property
    def noise_L(self) -> NDArray[np.float64]:
        """Probability that a choice strays, per layer."""
        if self.local_rate is not None:
            return np.full(self.layers, (1 - self.local_rate) / max(1 - float((self.share_G**2).sum()), 1e-12))
        depth_L = np.arange(self.layers) / max(self.layers - 1, 1)
        return np.minimum(self.context_noise + self.depth_fade * depth_L, 1.0)

    @property
    def planted_lar_L(self) -> NDArray[np.float64]:
        """Expected LAR per layer of planted_rank_LE with every token at its planted home."""
        return 1 - self.noise_L * (1 - float((self.share_G**2).sum()))

    def planted_home_T(self, trace: RoutingTrace) -> NDArray[np.int64]:
        """The block that every token of a trace made by this object asks for (the same in all layers)."""
        block_T = self._block_V[trace.token_id_T]
        later_T = np.char.endswith(trace.domain_R, "/later")[trace.request_T]
        moved_T = later_T & self._drifts_V[trace.token_id_T]
        return np.where(moved_T, (block_T + 1) % self.groups, block_T)

    def make(self) -> RoutingTrace:
        """Draw the trace: about 30 s for a million tokens of 26 layers on one core."""
        check_room(self.requests, self.prompt_len + self.output_len, self.layers, self.top_k)
        rng = np.random.default_rng([self.seed, 2])
        prompt_R = self._lengths(self.prompt_len, rng)
        output_R = self._lengths(self.output_len, rng) if self.output_len else np.zeros(self.requests, dtype=np.int64)
        offset_R1 = np.concatenate([[0], np.cumsum(prompt_R + output_R)])
        topic_R = self._request_topics(rng)
        request_T = np.repeat(np.arange(self.requests), np.diff(offset_R1))
        later_R = (np.arange(self.requests) >= self.requests / 2) & (self.drift > 0)
        domain_R = np.array(
            [f"topic{z}" + ("/later" if late else "") for z, late in zip(topic_R, later_R, strict=True)]
        )
        token_T = self._tokens(topic_R[request_T], rng)
        draft = RoutingTrace(
            model=self.model,
            num_experts=self.num_experts,
            vocab_size=self.vocab_size,
            experts_TLk=np.tile(np.arange(self.top_k, dtype=np.int16), (len(token_T), 1, 1)),
            token_id_T=token_T,
            request_offset_R1=offset_R1,
            prompt_len_R=prompt_R,
            domain_R=domain_R,
            layer_ids_L=np.array([self.first_layer]),
        )
        experts_TLk = draw_experts(
            token_T,
            self.planted_home_T(draft),
            np.argsort(self.planted_rank_LE, axis=1, kind="stable").reshape(self.layers, self.groups, -1),
            np.cumsum(self.share_G),
            self.noise_L,
            self.top_k,
            self.concentration,
            np.uint64(self.seed),
        )
        return RoutingTrace(
            model=self.model,
            num_experts=self.num_experts,
            vocab_size=self.vocab_size,
            experts_TLk=experts_TLk,
            token_id_T=token_T,
            request_offset_R1=offset_R1,
            prompt_len_R=prompt_R,
            domain_R=domain_R,
            layer_ids_L=self.first_layer + np.arange(self.layers),
            path=f"synthetic trace (seed {self.seed})",
        )

    @cached_property
    def _topic_V(self) -> NDArray[np.int64]:
        """Topic of every token id."""
        return np.random.default_rng([self.seed, 3]).permutation(np.arange(self.vocab_size) % self.topics)

    @cached_property
    def _block_V(self) -> NDArray[np.int64]:
        return self._topic_V % self.groups

    @cached_property
    def _drifts_V(self) -> NDArray[np.bool_]:
        return np.random.default_rng([self.seed, 4]).random(self.vocab_size) < self.drift

    @property
    def _topic_share(self) -> NDArray[np.float64]:
        """Share of each topic: its block's, split evenly over the block's topics."""
        block_Z = np.arange(self.topics) % self.groups
        return self.share_G[block_Z] / np.bincount(block_Z, minlength=self.groups)[block_Z]

    def _request_topics(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Topics in proportion to their shares, each block's total right to one request, in random order."""
        bounds_G1 = np.rint(np.concatenate([[0.0], np.cumsum(self.share_G)]) * self.requests).astype(np.int64)
        topics = []
        for block in range(self.groups):
            own = np.arange(block, self.topics, self.groups)
            topics.append(own[np.arange(bounds_G1[block + 1] - bounds_G1[block]) % len(own)])
        return rng.permutation(np.concatenate(topics))

    def _lengths(self, mean: int, rng: np.random.Generator) -> NDArray[np.int64]:
        spread = rng.lognormal(-(self.length_spread**2) / 2, self.length_spread, self.requests)
        return np.maximum(np.rint(mean * spread), 1).astype(np.int64)

    def _tokens(self, topic_T: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """A token id of the request's topic, or of a topic drawn by share; Zipf inside the topic."""
        any_T = rng.choice(self.topics, size=len(topic_T), p=self._topic_share)
        topic_T = np.where(rng.random(len(topic_T)) < self.topic_purity, topic_T, any_T)
        token_T = np.empty(len(topic_T), dtype=np.int64)
        for topic in range(self.topics):
            ids = np.flatnonzero(self._topic_V == topic)
            weight = 1.0 / np.arange(1, len(ids) + 1) ** self.zipf
            here = np.flatnonzero(topic_T == topic)
            token_T[here] = rng.choice(ids, size=len(here), p=weight / weight.sum())
        return token_T


@numba.njit(cache=True)
def _mix(x):  # type: ignore[no-untyped-def]
    """A well-mixed 64-bit word of a counter (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(cache=True)
def _unit(x):  # type: ignore[no-untyped-def]
    """A number in (0, 1) from the top 53 bits of a word."""
    return (np.float64(x >> np.uint64(11)) + 0.5) * (1.0 / 9007199254740992.0)


@numba.njit(cache=True)
def draw_experts(token_T, home_T, block_LGB, cumulative_G, noise_L, k, concentration, seed):  # type: ignore[no-untyped-def]
    """experts_TLk: distinct choices of every token; block_LGB [L, G, E / G] lists the experts of each block.

    Choices in the own block are a Gumbel top-k without replacement over beta * favour(token, layer, expert), favour
    uniform and beta = 8 c / (1 - c); a stray choice is uniform over what is left of its block. All random words are
    counters mixed with the seed, so the result does not depend on the order of evaluation.
    """
    tokens, (layers, ranks, size) = len(token_T), block_LGB.shape
    experts_TLk = np.empty((tokens, layers, k), dtype=np.int16)
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = np.empty(size, dtype=np.float64)
    taken = np.zeros((ranks, size), dtype=np.bool_)
    fixed = concentration >= 1.0
    beta = 0.0 if fixed else 8.0 * concentration / (1.0 - concentration)
    root = _mix(seed * golden + np.uint64(1))
    for t in range(tokens):
        for layer in range(layers):
            state = _mix(root ^ (np.uint64(t * layers + layer + 1) * golden))
            taste = _mix(~root ^ (np.uint64(token_T[t] * layers + layer + 1) * golden))
            home = int(home_T[t])
            for i in range(size):
                favour = _unit(_mix(taste + np.uint64(i + home * size) * golden))
                if fixed:
                    key[i] = favour
                else:
                    state += golden
                    key[i] = beta * favour - np.log(-np.log(_unit(_mix(state))))
            for j in range(k):
                block = home
                state += golden
                if _unit(_mix(state)) < noise_L[layer]:
                    state += golden
                    point = _unit(_mix(state))
                    block = 0
                    while block < ranks - 1 and point >= cumulative_G[block]:
                        block += 1
                    state += golden
                    pick = int(_unit(_mix(state)) * size)
                    while taken[block, pick]:
                        pick = (pick + 1) % size
                else:
                    pick = -1
                    for i in range(size):
                        if not taken[home, i] and (pick < 0 or key[i] > key[pick]):
                            pick = i
                taken[block, pick] = True
                experts_TLk[t, layer, j] = block_LGB[layer, block, pick]
            taken[:] = False
    return experts_TLk
