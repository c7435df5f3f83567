"""RoutingTrace: which experts every token of every request went to, layer by layer.

The file is one .npz without pickles. It is validated whenever it is read or made: later stages trust it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .files import read_arrays, replacing, single

SCHEMA_VERSION = 1
IntArray = NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """Routes of R requests, T tokens in all, over L MoE layers.

    experts_TLk       logical expert ids, the k choices of a token distinct, ordered by gate weight where known
    token_id_T        vocabulary id of the token that the layer saw (model input)
    request_offset_R1 request r owns tokens request_offset[r] : request_offset[r + 1]
    prompt_len_R      how many of them are prompt; the rest are output (decode) tokens
    domain_R          free label of each request ("source", "mmlu/biology")
    layer_ids_L       absolute decoder-layer index of each traced MoE layer
    arrival_ms_R      optional arrival times; gate_weight_TLk optional combine weights
    """

    model: str
    num_experts: int
    vocab_size: int
    experts_TLk: IntArray
    token_id_T: IntArray
    request_offset_R1: IntArray
    prompt_len_R: IntArray
    domain_R: NDArray[np.str_]
    layer_ids_L: IntArray
    arrival_ms_R: NDArray[np.floating] | None = None
    gate_weight_TLk: NDArray[np.floating] | None = None
    path: str = field(default="trace", compare=False)

    def __post_init__(self) -> None:
        convert = {
            "experts_TLk": np.int16,
            "token_id_T": np.int32,
            "request_offset_R1": np.int64,
            "prompt_len_R": np.int32,
            "layer_ids_L": np.int32,
        }
        for name, kind in convert.items():
            dtype: Any = np.dtype(kind)
            array = np.asarray(getattr(self, name))
            if array.dtype.kind not in "iu":
                raise UserError(f"{self.path}: {name} holds {array.dtype}, integers are needed")
            if array.size and (array.max() > np.iinfo(dtype).max or array.min() < np.iinfo(dtype).min):
                raise UserError(f"{self.path}: {name} holds values outside {dtype.name}")
            object.__setattr__(self, name, np.ascontiguousarray(array, dtype=dtype))
        object.__setattr__(self, "domain_R", np.asarray(self.domain_R, dtype=np.str_))
        _validate(self)

    @property
    def num_tokens(self) -> int:
        return len(self.token_id_T)

    @property
    def num_layers(self) -> int:
        return self.experts_TLk.shape[1]

    @property
    def top_k(self) -> int:
        return self.experts_TLk.shape[2]

    @property
    def num_requests(self) -> int:
        return len(self.prompt_len_R)

    @cached_property
    def length_R(self) -> NDArray[np.int64]:
        return np.diff(self.request_offset_R1)

    @cached_property
    def request_T(self) -> NDArray[np.int64]:
        """Request index of every token."""
        return np.repeat(np.arange(self.num_requests), self.length_R)

    @cached_property
    def digest(self) -> str:
        """Short content hash: part of every config id."""
        sha = hashlib.sha256(f"{self.model}/{self.num_experts}".encode())
        for array in (self.experts_TLk, self.token_id_T, self.request_offset_R1, self.prompt_len_R, self.layer_ids_L):
            sha.update(array.tobytes())
        return sha.hexdigest()[:12]

    def select(self, request_ids: IntArray) -> RoutingTrace:
        """The trace of these requests, in this order (a request may occur more than once)."""
        request_ids = np.asarray(request_ids, dtype=np.int64)
        if not len(request_ids):
            raise UserError(f"{self.path}: a selection of zero requests is no trace")
        lengths = self.length_R[request_ids]
        offset = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.repeat(self.request_offset_R1[request_ids] - offset[:-1], lengths) + np.arange(offset[-1])
        return RoutingTrace(
            model=self.model,
            num_experts=self.num_experts,
            vocab_size=self.vocab_size,
            path=self.path,
            experts_TLk=self.experts_TLk[tokens],
            token_id_T=self.token_id_T[tokens],
            request_offset_R1=offset,
            prompt_len_R=self.prompt_len_R[request_ids],
            domain_R=self.domain_R[request_ids],
            layer_ids_L=self.layer_ids_L,
            arrival_ms_R=None if self.arrival_ms_R is None else self.arrival_ms_R[request_ids],
            gate_weight_TLk=None if self.gate_weight_TLk is None else self.gate_weight_TLk[tokens],
        )

    def split(
        self, train_fraction: float = 0.5, seed: int = 0, by: str = "random"
    ) -> tuple[RoutingTrace, RoutingTrace]:
        """(training, held-out) parts by request: seeded, each domain divided in the same proportion; or by "time", the
        first requests and the others."""
        if not 0.0 < train_fraction < 1.0:
            raise UserError(f"train_fraction={train_fraction} must lie strictly between 0 and 1")
        if self.num_requests < 2:
            raise UserError(
                f"{self.path}: {self.num_requests} request cannot be split into training and held-out parts"
            )
        cut = int(np.clip(round(train_fraction * self.num_requests), 1, self.num_requests - 1))
        if by == "time":
            return self.select(np.arange(cut)), self.select(np.arange(cut, self.num_requests))
        if by != "random":
            raise UserError(f"split='{by}' must be random or time")
        rng = np.random.default_rng(seed)
        rank_R = np.empty(self.num_requests)
        for domain in np.unique(self.domain_R):
            members = np.flatnonzero(self.domain_R == domain)
            rank_R[rng.permutation(members)] = (np.arange(len(members)) + rng.random()) / len(members)
        order = np.argsort(rank_R, kind="stable")
        return self.select(np.sort(order[:cut])), self.select(np.sort(order[cut:]))

    def save(self, path: str | Path) -> None:
        """Write atomically: a reader sees the old file or the whole new one."""
        small = np.int8 if self.num_experts <= 127 else np.int16
        arrays = {
            "schema_version": np.int64(SCHEMA_VERSION),
            "model": np.str_(self.model),
            "num_experts": np.int64(self.num_experts),
            "vocab_size": np.int64(self.vocab_size),
            "experts": self.experts_TLk.astype(small),
            "token_id": self.token_id_T,
            "request_offset": self.request_offset_R1,
            "prompt_len": self.prompt_len_R,
            "domain": self.domain_R,
            "layer_ids": self.layer_ids_L,
        }
        if self.arrival_ms_R is not None:
            arrays["arrival_ms"] = np.asarray(self.arrival_ms_R, dtype=np.float64)
        if self.gate_weight_TLk is not None:
            arrays["gate_weight"] = np.asarray(self.gate_weight_TLk, dtype=np.float16)
        with replacing(path) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> RoutingTrace:
        """Read and validate a trace; UserError names the file, the row and what is wrong."""
        raw = read_arrays(path, "trace", "`semmoe trace record` or `semmoe trace synthetic` makes one")
        needed = (
            "schema_version",
            "model",
            "num_experts",
            "vocab_size",
            "experts",
            "token_id",
            "request_offset",
            "prompt_len",
            "domain",
            "layer_ids",
        )
        missing = [name for name in needed if name not in raw]
        if missing:
            raise UserError(f"{path}: lacks {', '.join(missing)}; a semmoe trace holds {', '.join(needed)}")
        version = single(raw, "schema_version", "iu", path)
        if version != SCHEMA_VERSION:
            raise UserError(f"{path}: schema version {version}; this release reads version {SCHEMA_VERSION}")
        return cls(
            model=single(raw, "model", "U", path),
            num_experts=single(raw, "num_experts", "iu", path),
            vocab_size=single(raw, "vocab_size", "iu", path),
            experts_TLk=raw["experts"],
            token_id_T=raw["token_id"],
            request_offset_R1=raw["request_offset"],
            prompt_len_R=raw["prompt_len"],
            domain_R=raw["domain"],
            layer_ids_L=raw["layer_ids"],
            arrival_ms_R=raw.get("arrival_ms"),
            gate_weight_TLk=raw.get("gate_weight"),
            path=str(path),
        )


def _validate(trace: RoutingTrace) -> None:
    where, experts = trace.path, trace.experts_TLk
    if not trace.model:
        raise UserError(f"{where}: the name of the model is empty")
    for name, most in (("num_experts", np.iinfo(np.int16).max), ("vocab_size", np.iinfo(np.int32).max)):
        if not 1 <= getattr(trace, name) <= most:
            raise UserError(f"{where}: {name}={getattr(trace, name)} must lie in 1..{most}")
    if experts.ndim != 3:
        raise UserError(f"{where}: experts has shape {experts.shape}; [tokens, layers, k] is needed")
    tokens, layers, k = experts.shape
    if not tokens or not layers or not k:
        raise UserError(f"{where}: empty trace (experts has shape {experts.shape}); record at least one token")
    for name, array, length in (("token_id", trace.token_id_T, tokens), ("layer_ids", trace.layer_ids_L, layers)):
        if array.shape != (length,):
            raise UserError(f"{where}: {name} has shape {array.shape}, experts {experts.shape}; expected ({length},)")
    _validate_requests(trace)
    if k > trace.num_experts:
        raise UserError(f"{where}: {k} choices a token out of {trace.num_experts} experts")
    bad = (experts < 0) | (experts >= trace.num_experts)
    if bad.any():
        t, layer, j = np.argwhere(bad)[0]
        raise UserError(
            f"{where}: token {t}, layer {layer}: expert id {experts[t, layer, j]} outside 0..{trace.num_experts - 1}"
        )
    if k > 1:
        in_order = np.sort(experts, axis=2)
        twice = (in_order[:, :, 1:] == in_order[:, :, :-1]).any(axis=2)
        if twice.any():
            t, layer = np.argwhere(twice)[0]
            hint = "all zero: a failed capture?" if not experts[t, layer].any() else "the k choices must be distinct"
            raise UserError(f"{where}: token {t}, layer {layer}: experts {experts[t, layer].tolist()} ({hint})")
    elif not experts.any() and trace.num_experts > 1 and tokens > 1:
        raise UserError(f"{where}: every expert id is zero: a failed capture?")
    bad_token = (trace.token_id_T < 0) | (trace.token_id_T >= trace.vocab_size)
    if bad_token.any():
        t = int(np.flatnonzero(bad_token)[0])
        raise UserError(f"{where}: token {t}: token id {trace.token_id_T[t]} outside 0..{trace.vocab_size - 1}")
    if np.any(np.diff(trace.layer_ids_L) <= 0) or trace.layer_ids_L[0] < 0:
        raise UserError(f"{where}: layer_ids {trace.layer_ids_L.tolist()} must be non-negative and increasing")
    weights = trace.gate_weight_TLk
    if weights is not None and (weights.shape != experts.shape or not np.isfinite(weights).all()):
        raise UserError(f"{where}: gate_weight must be finite and of shape {experts.shape}, is {weights.shape}")


def _validate_requests(trace: RoutingTrace) -> None:
    where, offset, tokens = trace.path, trace.request_offset_R1, trace.num_tokens
    if offset.ndim != 1 or len(offset) < 2 or offset[0] != 0 or offset[-1] != tokens:
        raise UserError(f"{where}: request_offset must run from 0 to the {tokens} tokens, is {offset[:3].tolist()}...")
    short = np.flatnonzero(np.diff(offset) <= 0)
    if len(short):
        raise UserError(
            f"{where}: request {short[0]} has no tokens (request_offset {offset[short[0] : short[0] + 2].tolist()})"
        )
    requests = len(offset) - 1
    for name, array in (
        ("prompt_len", trace.prompt_len_R),
        ("domain", trace.domain_R),
        ("arrival_ms", trace.arrival_ms_R),
    ):
        if array is not None and array.shape != (requests,):
            raise UserError(f"{where}: {name} has shape {array.shape}; {requests} requests need ({requests},)")
    length = np.diff(offset)
    bad = np.flatnonzero((trace.prompt_len_R < 0) | (trace.prompt_len_R > length))
    if len(bad):
        r = bad[0]
        raise UserError(f"{where}: request {r}: prompt_len {trace.prompt_len_R[r]} outside 0..{length[r]} (its tokens)")
    if trace.arrival_ms_R is not None and not (
        np.isfinite(trace.arrival_ms_R).all() and (trace.arrival_ms_R >= 0).all()
    ):
        raise UserError(f"{where}: arrival_ms must be finite and not negative")
