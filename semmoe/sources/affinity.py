"""Affinity profiles: routes of a model without a public trace, drawn from a few numbers fitted to published figures.

A gate is a linear map of a token's hidden state, so routes are drawn as a gate would make them. In MoE layer l

    logit[t, e] = bias[l, e] + meaning * <x[t, l], w[l, e]> + habit * h[type(t), l, e] + noise[t, l, e]

and the k largest logits win. w are random expert directions in DIMS dimensions, of which the i-th weighs i ** -decay (the
faster the decay, the fewer kinds of meaning there are and the better experts cluster), h the fixed taste of a token
type, noise of unit variance. The meaning x of a token mixes what its request is about (the same for all its tokens and
layers), its type, and its own context (the same over layers, so that earlier layers tell of later ones):

    x[t, l] = sqrt(request) c[request of t] + sqrt(kind_l) u[type of t] + sqrt(1 - request - kind_l) n[t]
    kind_l  = (1 - request) * kind * (1 - fade * depth), depth 0 in the first layer and 1 in the last

c is sqrt(apart) * (mean of the domain) + the topic + the request's own part. TOPIC_TOKENS of the tokens are of the
topic's own vocabulary, the others common to all; both Zipf. Which numbers were fitted to what: `provenance` of each file, and
sources/fit_affinity.py, which made them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..kinds import check_kinds
from ..trace import RoutingTrace

Float = NDArray[np.float32]
PROFILES = Path(__file__).parent.parent / "assets" / "profiles"
COMMON_TYPES, TOPIC_TYPES = 2048, 128  # token types shared by all topics, and of each topic alone
TOPICS = 16  # of a domain
TOPIC_TOKENS = 0.9  # share of a request's tokens that are of its topic's own vocabulary
OWN_SHARE = 0.05  # of a request's meaning that is its own, the rest is its topic's
DIMS = 16
SAMPLE, BALANCING = 1024, 12  # tokens and steps by which a gate's load is evened
ZIPF = 1.05
CHUNK = 8192  # tokens drawn at once


@dataclass(frozen=True, kw_only=True)
class AffinityProfile:
    """The numbers of one model's routes; see the module for what they do.

    meaning, habit, skew >= 0 in units of the noise; decay >= 0; request, kind, fade and apart in 0..1.
    domains: names of the kinds of text that requests may be of.
    """

    model: str
    num_experts: int
    top_k: int
    layer_ids: list[int]
    vocab_size: int
    meaning: float
    decay: float
    habit: float
    request: float
    kind: float
    fade: float
    apart: float
    skew: float
    domains: list[str]
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _STRUCTURED}
        check_kinds(type(self), numbers, "affinity profile: ")
        for name in ("num_experts", "top_k", "vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(f"affinity profile: {name}={getattr(self, name)} must be at least 1")
        for name in ("meaning", "decay", "habit", "skew"):
            if getattr(self, name) < 0:
                raise UserError(f"affinity profile: {name}={getattr(self, name)} must not be negative")
        for name in ("request", "kind", "fade", "apart"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"affinity profile: {name}={getattr(self, name)} must lie in 0..1")
        if self.top_k > self.num_experts or not self.layer_ids or not self.domains:
            raise UserError("affinity profile: needs top_k <= num_experts, layer_ids and domains")
        least = COMMON_TYPES + TOPICS * TOPIC_TYPES * len(self.domains)
        if self.vocab_size < least:
            raise UserError(
                f"affinity profile: vocab_size={self.vocab_size} is too small for the token types of its domains, which need "
                f"{least}; give recorded routes with trace= (for model=tiny: trace=tiny_docs)"
            )

    @classmethod
    def load(cls, name: str | Path) -> AffinityProfile:
        """A shipped profile by its model's name, or a JSON file."""
        path = Path(name) if str(name).endswith(".json") else PROFILES / f"{name}.json"
        if not path.is_file():
            raise UserError(f"affinity profile {name}: none; shipped are {', '.join(shipped())}, or name a .json file")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return cls(**raw)
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: not an affinity profile ({error})") from None

    def text(self) -> str:
        """The file's content: one key a line."""
        keys = {f.name: getattr(self, f.name) for f in fields(self)}
        return "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in keys.items()) + "\n}\n"

    def draw(
        self, requests: int, prompt_len: int, output_len: int, domains: list[str], spread: float = 0.0, seed: int = 0
    ) -> RoutingTrace:
        """A trace of `requests` requests, of each named domain equally many. Same arguments, same trace.

        prompt_len and output_len in tokens, lognormal with sigma `spread`. Tables belong to the profile and stay the
        same for every seed; the seed draws requests, tokens, contexts and noise.
        """
        rng = np.random.default_rng([seed, 11])
        domain_R = np.arange(requests) % len(domains)
        prompt_R, output_R = _lengths(prompt_len, spread, requests, rng), _lengths(output_len, spread, requests, rng)
        length_R = prompt_R + output_R
        request_T = np.repeat(np.arange(requests), length_R)
        which_R = np.array([self.domains.index(name) for name in domains])[domain_R]
        topic_R = which_R * TOPICS + rng.integers(TOPICS, size=requests)
        about_R = self._about(topic_R, rng)
        type_T = _types(topic_R[request_T], rng)
        return RoutingTrace(
            model=self.model,
            num_experts=self.num_experts,
            vocab_size=self.vocab_size,
            experts_TLk=self._routes(type_T, about_R[request_T], rng),
            token_id_T=self._token_id[type_T],
            request_offset_R1=np.concatenate([[0], np.cumsum(length_R)]),
            prompt_len_R=prompt_R,
            domain_R=np.array(domains)[domain_R],
            layer_ids_L=np.array(self.layer_ids),
            path=f"drawn from profile {self.model} (seed {seed})",
        )

    def _routes(self, type_T: NDArray[np.int64], about_T: Float, rng: np.random.Generator) -> NDArray[np.int16]:
        routes = np.empty((len(type_T), len(self.layer_ids), self.top_k), dtype=np.int16)
        context_T = _normal(rng, len(type_T), DIMS)
        for i, layer in enumerate(self.layer_ids):
            gate = self._gate(layer)
            for begin in range(0, len(type_T), CHUNK):
                part = slice(begin, begin + CHUNK)
                logit_TE = gate.logits(type_T[part], about_T[part], context_T[part])
                logit_TE += _normal(rng, *logit_TE.shape)
                routes[part, i] = _top(logit_TE, self.top_k)
        return routes

    def _gate(self, layer: int) -> _Gate:
        """The layer's tables. Experts sit where tokens are, and a bias evens their load, as training does to a gate."""
        rng = np.random.default_rng([layer, 12])
        first, last = self.layer_ids[0], self.layer_ids[-1]
        kind = (1 - self.request) * self.kind * (1 - self.fade * (layer - first) / max(last - first, 1))
        shares = np.sqrt(np.array([self.request, kind, max(1 - self.request - kind, 0.0)], dtype=np.float32))
        taste_VE = self.habit * _normal(rng, self.num_types, self.num_experts)
        gate = _Gate(self._kind, shares, self._weight_D, np.zeros((DIMS, self.num_experts), np.float32), taste_VE)
        type_T, about_T, context_T = self._sample
        some = rng.permutation(len(type_T))
        seat_ED = gate.meaning(type_T[some], about_T[some], context_T[some])[: self.num_experts]
        gate.direction_DE = (self.meaning * seat_ED / np.linalg.norm(seat_ED, axis=1, keepdims=True)).T
        logit_TE = gate.logits(type_T, about_T, context_T) + _normal(rng, len(type_T), self.num_experts)
        target_E = np.exp(self.skew * _normal(rng, self.num_experts))
        target_E *= len(type_T) * self.top_k / target_E.sum()
        for _ in range(BALANCING):
            load_E = np.bincount(_top(logit_TE + gate.bias_E, self.top_k).ravel(), minlength=self.num_experts)
            gate.bias_E += np.log((target_E + 1) / (load_E + 1)).astype(np.float32) * (0.1 * self.meaning)
        return gate

    @property
    def num_types(self) -> int:
        return COMMON_TYPES + TOPICS * TOPIC_TYPES * len(self.domains)

    @cached_property
    def _weight_D(self) -> Float:
        weight_D = np.arange(1, DIMS + 1) ** -self.decay
        return (weight_D / np.sqrt((weight_D**2).sum())).astype(np.float32)

    @cached_property
    def _sample(self) -> tuple[NDArray[np.int64], Float, Float]:
        """Types, requests' meanings and contexts of tokens of all domains, by which gates are made and evened."""
        rng = np.random.default_rng(17)
        topic_T = rng.integers(TOPICS * len(self.domains), size=SAMPLE)
        return _types(topic_T, rng), self._about(topic_T, rng), _normal(rng, SAMPLE, DIMS)

    def _about(self, topic_R: NDArray[np.integer], rng: np.random.Generator) -> Float:
        """What requests of these topics are about."""
        own_R = np.sqrt(1 - OWN_SHARE) * self._topic[topic_R] + np.sqrt(OWN_SHARE) * _normal(rng, len(topic_R), DIMS)
        about_R = np.sqrt(self.apart) * self._domain_mean[topic_R // TOPICS] + np.sqrt(1 - self.apart) * own_R
        return np.asarray(about_R, dtype=np.float32)

    @cached_property
    def _kind(self) -> Float:
        return _normal(np.random.default_rng(13), self.num_types, DIMS)

    @cached_property
    def _topic(self) -> Float:
        return _normal(np.random.default_rng(14), TOPICS * len(self.domains), DIMS)

    @cached_property
    def _domain_mean(self) -> Float:
        return _normal(np.random.default_rng(15), len(self.domains), DIMS)

    @cached_property
    def _token_id(self) -> NDArray[np.int64]:
        return np.random.default_rng(16).permutation(self.vocab_size)[: self.num_types]


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


_STRUCTURED = ("layer_ids", "domains", "provenance")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """trace=profile: make() draws a RoutingTrace from an affinity profile, marked as drawn in every row.

    profile: a shipped model or a JSON file; null: the model's own, or that of the model nearest in experts and choices,
    whose numbers then serve the shape given by the next five. domains: null for the profile's first; apart: null for the
    profile's own.
    """

    model: str
    num_experts: int
    top_k: int
    layer_ids: list[int]
    vocab_size: int
    profile: str | None = None
    requests: int = 200
    prompt_len: int = 256
    output_len: int = 64
    length_spread: float = 0.0
    domains: list[str] | None = None
    apart: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.prompt_len < 1 or self.output_len < 0:
            raise UserError(
                f"trace=profile: requests={self.requests} and prompt_len={self.prompt_len} must be at least 1, "
                f"output_len={self.output_len} not negative"
            )
        if not self.length_spread >= 0:
            raise UserError(f"trace=profile: length_spread={self.length_spread} must not be negative")

    def make(self) -> RoutingTrace:
        name = self.profile or nearest(self.model, self.num_experts, self.top_k)
        found = AffinityProfile.load(name)
        profile = replace(
            found,
            model=self.model,
            num_experts=self.num_experts,
            top_k=self.top_k,
            layer_ids=list(self.layer_ids),
            vocab_size=self.vocab_size,
            apart=found.apart if self.apart is None else self.apart,
        )
        domains = list(self.domains or profile.domains[:1])
        unknown = [name for name in domains if name not in profile.domains]
        if unknown:
            raise UserError(
                f"trace.domains: {', '.join(unknown)} unknown; the profile has {', '.join(profile.domains)}"
            )
        trace = profile.draw(self.requests, self.prompt_len, self.output_len, domains, self.length_spread, self.seed)
        return replace(trace, path=f"drawn from profile {Path(name).name} (seed {self.seed})")


def shipped() -> list[str]:
    """Models with a shipped affinity profile."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def nearest(model: str, num_experts: int, top_k: int) -> str:
    """The shipped profile of this model, or of the one nearest in experts and choices (by ratio)."""

    def distance(name: str) -> float:
        profile = AffinityProfile.load(name)
        return float(abs(np.log(profile.num_experts / num_experts)) + abs(np.log(profile.top_k / top_k)))

    return model if model in shipped() else min(shipped(), key=distance)


def _types(topic_T: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Token types: common ones, or of the topic's own vocabulary; Zipf in both."""
    common_T = _zipf(COMMON_TYPES, len(topic_T), rng)
    own_T = COMMON_TYPES + topic_T * TOPIC_TYPES + _zipf(TOPIC_TYPES, len(topic_T), rng)
    return np.where(rng.random(len(topic_T)) < TOPIC_TOKENS, own_T, common_T)


def _zipf(types: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    weight = 1.0 / np.arange(1, types + 1) ** ZIPF
    return np.searchsorted(np.cumsum(weight / weight.sum())[:-1], rng.random(count))


def _lengths(mean: int, spread: float, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    if mean == 0:
        return np.zeros(count, dtype=np.int64)
    return np.maximum(np.rint(mean * rng.lognormal(-(spread**2) / 2, spread, count)), 1).astype(np.int64)


def _normal(rng: np.random.Generator, *shape: int) -> Float:
    return rng.standard_normal(shape, dtype=np.float32)
