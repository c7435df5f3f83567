"""Affinity profiles: routes of a model without a public trace, drawn from a few numbers fitted to published figures.

What each number does: gates.py. Which were fitted to what: `provenance` of each file, and fit_affinity.py, which made
them.
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
from .gates import Gates, num_types
from .room import check_room

PROFILES = Path(__file__).parent.parent / "assets" / "profiles"


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
        least = num_types(self)
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
        check_room(requests, prompt_len + output_len, len(self.layer_ids), self.top_k)
        rng = np.random.default_rng([seed, 11])
        domain_R = np.arange(requests) % len(domains)
        prompt_R, output_R = _lengths(prompt_len, spread, requests, rng), _lengths(output_len, spread, requests, rng)
        length_R = prompt_R + output_R
        which_R = np.array([self.domains.index(name) for name in domains])[domain_R]
        token_id_T, experts_TLk = self._gates.draw(which_R, length_R, rng)
        return RoutingTrace(
            model=self.model,
            num_experts=self.num_experts,
            vocab_size=self.vocab_size,
            experts_TLk=experts_TLk,
            token_id_T=token_id_T,
            request_offset_R1=np.concatenate([[0], np.cumsum(length_R)]),
            prompt_len_R=prompt_R,
            domain_R=np.array(domains)[domain_R],
            layer_ids_L=np.array(self.layer_ids),
            path=f"drawn from profile {self.model} (seed {seed})",
        )

    @cached_property
    def _gates(self) -> Gates:
        return Gates(self)


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


def _lengths(mean: int, spread: float, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    if mean == 0:
        return np.zeros(count, dtype=np.int64)
    return np.maximum(np.rint(mean * rng.lognormal(-(spread**2) / 2, spread, count)), 1).astype(np.int64)
