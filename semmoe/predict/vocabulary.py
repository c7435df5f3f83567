"""Rows of a token table: one a type that training saw, one for all others, and who stands in for an unseen type."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..inputs import ASSETS
from ..profile import Profile

BLOCK = 1024  # unseen types whose neighbours are sought at once


@dataclass(frozen=True, eq=False)
class TypeRows:
    """row_V [V]: table row of every token id; row U stands for all types without a row of their own. O(1) a token."""

    row_V: NDArray[np.int32]
    types: int

    @classmethod
    def fit(cls, profile: Profile, embedding: str | None = None) -> TypeRows:
        """Rows in order of token id. With the model's embedding, an unseen id takes the row of the seen id of largest
        cosine (the paper's rule, section 3.2); without, row U."""
        types = len(profile.token_ids_U)
        row_V = np.full(profile.trace.vocab_size, types, dtype=np.int32)
        row_V[profile.token_ids_U] = np.arange(types)
        if embedding is not None:
            unseen = np.flatnonzero(row_V == types)
            row_V[unseen] = nearest_seen(load_embedding(embedding, len(row_V)), profile.token_ids_U, unseen)
        return cls(row_V, types)

    def rows(self, token_ids_T: NDArray[np.integer]) -> NDArray[np.int32]:
        """Table row of every token. UserError for an id outside the vocabulary."""
        try:
            return self.row_V[token_ids_T]
        except IndexError:
            raise UserError(
                f"token id {int(np.max(token_ids_T))} outside the vocabulary of {len(self.row_V)} that the token table "
                "was fitted on; is this a trace of another model?"
            ) from None

    def used_by_one_request_U(self, profile: Profile) -> NDArray[np.bool_]:
        """Which types occur in a single training request."""
        pair = np.unique(profile.type_T * profile.trace.num_requests + profile.trace.request_T)
        return np.bincount(pair // profile.trace.num_requests, minlength=self.types) == 1


def nearest_seen(
    embedding_VH: NDArray[np.floating], seen_U: NDArray[np.integer], unseen: NDArray[np.integer]
) -> NDArray[np.int32]:
    """Index into seen_U of the id of largest cosine, for every unseen id (ties: the lowest index)."""
    unit_VH = embedding_VH / np.maximum(np.linalg.norm(embedding_VH, axis=1, keepdims=True), 1e-12)
    seen_UH = unit_VH[seen_U]
    blocks = [
        (unit_VH[unseen[i : i + BLOCK]] @ seen_UH.T).argmax(axis=1).astype(np.int32)
        for i in range(0, len(unseen), BLOCK)
    ]
    return np.concatenate([np.empty(0, dtype=np.int32), *blocks])


def load_embedding(path: str, vocab_size: int) -> NDArray[np.float32]:
    """[V, H] from a .npy file, or the two-dimensional tensor of V rows whose name has "embed" in a .safetensors file.

    A leading "asset:" means a file shipped with semmoe. UserError for a file that holds no such array.
    """
    file = ASSETS / path.removeprefix("asset:") if path.startswith("asset:") else Path(path)
    if not file.is_file():
        raise UserError(f"predictor.embedding={path}: no such file; a .npy or .safetensors file is needed")
    try:
        array = np.load(file, allow_pickle=False) if file.suffix == ".npy" else _from_safetensors(file)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"predictor.embedding={path}: not readable ({error})") from None
    if array.ndim != 2 or len(array) < vocab_size or not np.isfinite(array).all():
        raise UserError(
            f"predictor.embedding={path}: shape {array.shape}; finite numbers [>= {vocab_size} ids, hidden] are needed"
        )
    return array[:vocab_size].astype(np.float32)


def _from_safetensors(file: Path) -> NDArray[np.floating]:
    """The embedding of a safetensors file: 8 bytes of header length, a JSON header, then raw little-endian tensors."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    named = {name: info for name, info in header.items() if "embed" in name and len(info.get("shape", ())) == 2}
    if not named:
        raise ValueError("no two-dimensional tensor with 'embed' in its name")
    info = next(iter(named.values()))
    begin, end = (8 + length + int(offset) for offset in info["data_offsets"])
    if info["dtype"] == "BF16":  # the upper half of a float32
        wide = np.frombuffer(raw[begin:end], dtype="<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(info["shape"])
    kind = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[info["dtype"]]
    return np.frombuffer(raw[begin:end], dtype=kind).reshape(info["shape"])
