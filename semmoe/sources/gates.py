"""Gates of a model without a public trace, made of the few numbers of an affinity profile (affinity.py), and routes by them.

A gate is a linear map of a token's hidden state, so routes are drawn as a gate would make them. In MoE layer l

    logit[t, e] = bias[l, e] + meaning * <x[t, l], w[l, e]> + habit * h[type(t), l, e] + noise[t, l, e]

and the k largest logits win. w are random expert directions in DIMS dimensions, of which the i-th weighs i ** -decay (the
faster the decay, the fewer kinds of meaning there are and the better experts cluster), h the fixed taste of a token
type, noise of unit variance. The meaning x of a token mixes what its request is about (the same for all its tokens and
layers), its type, and its own context (the same over layers, so that earlier layers tell of later ones):

    x[t, l] = sqrt(request) c[request of t] + sqrt(kind_l) u[type of t] + sqrt(1 - request - kind_l) n[t]
    kind_l  = (1 - request) * kind * (1 - fade * depth), depth 0 in the first layer and 1 in the last

c is sqrt(apart) * (mean of the domain) + the topic + the request's own part. TOPIC_TOKENS of the tokens are of the
topic's own vocabulary, the others common to all; both Zipf.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .affinity import AffinityProfile

Float = NDArray[np.float32]
COMMON_TYPES, TOPIC_TYPES = 2048, 128  # token types shared by all topics, and of each topic alone
TOPICS = 16  # of a domain
TOPIC_TOKENS = 0.9  # share of a request's tokens that are of its topic's own vocabulary
OWN_SHARE = 0.05  # of a request's meaning that is its own, the rest is its topic's
DIMS = 16
SAMPLE, BALANCING = 1024, 12  # tokens and steps by which a gate's load is evened
ZIPF = 1.05
CHUNK = 8192  # tokens drawn at once


class Gates:
    """The gates of a profile's layers. Its tables follow from the profile alone, the same for every draw."""

    def __init__(self, profile: AffinityProfile) -> None:
        self.profile = profile
        self.num_types = num_types(profile)

    def draw(
        self, which_R: NDArray[np.integer], length_R: NDArray[np.integer], rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
        """(token id [T], experts [T, L, k]) of requests of these domains, by number, and lengths in tokens."""
        request_T = np.repeat(np.arange(len(length_R)), length_R)
        topic_R = which_R * TOPICS + rng.integers(TOPICS, size=len(length_R))
        about_R = self._about(topic_R, rng)
        type_T = _types(topic_R[request_T], rng)
        return self._token_id[type_T], self._routes(type_T, about_R[request_T], rng)

    def _routes(self, type_T: NDArray[np.int64], about_T: Float, rng: np.random.Generator) -> NDArray[np.int16]:
        profile = self.profile
        routes = np.empty((len(type_T), len(profile.layer_ids), profile.top_k), dtype=np.int16)
        context_T = _normal(rng, len(type_T), DIMS)
        for i, layer in enumerate(profile.layer_ids):
            gate = self._gate(layer)
            for begin in range(0, len(type_T), CHUNK):
                part = slice(begin, begin + CHUNK)
                logit_TE = gate.logits(type_T[part], about_T[part], context_T[part])
                logit_TE += _normal(rng, *logit_TE.shape)
                routes[part, i] = _top(logit_TE, profile.top_k)
        return routes

    def _gate(self, layer: int) -> _Gate:
        """The layer's tables. Experts sit where tokens are, and a bias evens their load, as training does to a gate."""
        profile, rng = self.profile, np.random.default_rng([layer, 12])
        first, last = profile.layer_ids[0], profile.layer_ids[-1]
        kind = (1 - profile.request) * profile.kind * (1 - profile.fade * (layer - first) / max(last - first, 1))
        shares = np.sqrt(np.array([profile.request, kind, max(1 - profile.request - kind, 0.0)], dtype=np.float32))
        taste_VE = profile.habit * _normal(rng, self.num_types, profile.num_experts)
        gate = _Gate(self._kind, shares, self._weight_D, np.zeros((DIMS, profile.num_experts), np.float32), taste_VE)
        type_T, about_T, context_T = self._sample
        some = rng.permutation(len(type_T))
        seat_ED = gate.meaning(type_T[some], about_T[some], context_T[some])[: profile.num_experts]
        gate.direction_DE = (profile.meaning * seat_ED / np.linalg.norm(seat_ED, axis=1, keepdims=True)).T
        logit_TE = gate.logits(type_T, about_T, context_T) + _normal(rng, len(type_T), profile.num_experts)
        target_E = np.exp(profile.skew * _normal(rng, profile.num_experts))
        target_E *= len(type_T) * profile.top_k / target_E.sum()
        for _ in range(BALANCING):
            load_E = np.bincount(_top(logit_TE + gate.bias_E, profile.top_k).ravel(), minlength=profile.num_experts)
            gate.bias_E += np.log((target_E + 1) / (load_E + 1)).astype(np.float32) * (0.1 * profile.meaning)
        return gate

    @cached_property
    def _weight_D(self) -> Float:
        weight_D = np.arange(1, DIMS + 1) ** -self.profile.decay
        return (weight_D / np.sqrt((weight_D**2).sum())).astype(np.float32)

    @cached_property
    def _sample(self) -> tuple[NDArray[np.int64], Float, Float]:
        """Types, requests' meanings and contexts of tokens of all domains, by which gates are made and evened."""
        rng = np.random.default_rng(17)
        topic_T = rng.integers(TOPICS * len(self.profile.domains), size=SAMPLE)
        return _types(topic_T, rng), self._about(topic_T, rng), _normal(rng, SAMPLE, DIMS)

    def _about(self, topic_R: NDArray[np.integer], rng: np.random.Generator) -> Float:
        """What requests of these topics are about."""
        apart = self.profile.apart
        own_R = np.sqrt(1 - OWN_SHARE) * self._topic[topic_R] + np.sqrt(OWN_SHARE) * _normal(rng, len(topic_R), DIMS)
        about_R = np.sqrt(apart) * self._domain_mean[topic_R // TOPICS] + np.sqrt(1 - apart) * own_R
        return np.asarray(about_R, dtype=np.float32)

    @cached_property
    def _kind(self) -> Float:
        return _normal(np.random.default_rng(13), self.num_types, DIMS)

    @cached_property
    def _topic(self) -> Float:
        return _normal(np.random.default_rng(14), TOPICS * len(self.profile.domains), DIMS)

    @cached_property
    def _domain_mean(self) -> Float:
        return _normal(np.random.default_rng(15), len(self.profile.domains), DIMS)

    @cached_property
    def _token_id(self) -> NDArray[np.int64]:
        return np.random.default_rng(16).permutation(self.profile.vocab_size)[: self.num_types]


def num_types(profile: AffinityProfile) -> int:
    """Token types that the texts of a profile are made of."""
    return COMMON_TYPES + TOPICS * TOPIC_TYPES * len(profile.domains)


@dataclass(eq=False)
class _Gate:
    """A layer's tables: meaning_TD of tokens, and their logits without the noise."""

    kind_VD: Float
    shares: Float  # square roots of request, kind and context
    weight_D: Float
    direction_DE: Float
    taste_VE: Float
    bias_E: Float = field(init=False)

    def __post_init__(self) -> None:
        self.bias_E = np.zeros(self.direction_DE.shape[1], dtype=np.float32)

    def meaning(self, type_T: NDArray[np.int64], about_T: Float, context_T: Float) -> Float:
        request, kind, context = self.shares
        return (request * about_T + kind * self.kind_VD[type_T] + context * context_T) * self.weight_D

    def logits(self, type_T: NDArray[np.int64], about_T: Float, context_T: Float) -> Float:
        return self.meaning(type_T, about_T, context_T) @ self.direction_DE + self.taste_VE[type_T] + self.bias_E


def _top(logit_TE: Float, k: int) -> NDArray[np.int64]:
    return np.argpartition(logit_TE, -k, axis=1)[:, -k:]


def _types(topic_T: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Token types: common ones, or of the topic's own vocabulary; Zipf in both."""
    common_T = _zipf(COMMON_TYPES, len(topic_T), rng)
    own_T = COMMON_TYPES + topic_T * TOPIC_TYPES + _zipf(TOPIC_TYPES, len(topic_T), rng)
    return np.where(rng.random(len(topic_T)) < TOPIC_TOKENS, own_T, common_T)


def _zipf(types: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    weight = 1.0 / np.arange(1, types + 1) ** ZIPF
    return np.searchsorted(np.cumsum(weight / weight.sum())[:-1], rng.random(count))


def _normal(rng: np.random.Generator, *shape: int) -> Float:
    return rng.standard_normal(shape, dtype=np.float32)
