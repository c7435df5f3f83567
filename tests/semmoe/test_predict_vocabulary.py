"""Rows of token types: the back-off of unseen ids, and reading a model's embedding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from semmoe.errors import UserError
from semmoe.predict.token_table import TokenTable
from semmoe.predict.vocabulary import TypeRows, load_embedding, nearest_seen
from semmoe.profile import Profile
from semmoe.trace import RoutingTrace

TRACE = RoutingTrace(
    model="m",
    num_experts=4,
    vocab_size=6,
    experts_TLk=np.array([[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]),
    token_id_T=np.array([1, 1, 4, 4]),
    request_offset_R1=np.array([0, 1, 4]),
    prompt_len_R=np.array([1, 3]),
    domain_R=np.array(["d", "d"]),
    layer_ids_L=np.array([0]),
)
PROFILE = Profile.fit(TRACE)


def test_unseen_ids_take_the_row_of_the_nearest_seen_id_by_cosine(tmp_path: Path) -> None:
    vectors = np.array([[0, 1], [1, 0], [9, 1], [-1, 0], [0, 1], [0.1, 5]], dtype=np.float32)
    np.save(tmp_path / "e.npy", vectors)
    rows = TypeRows.fit(PROFILE, str(tmp_path / "e.npy"))
    assert rows.row_V.tolist() == [1, 0, 0, 1, 1, 1]  # id 3 has cosine -1 with id 1 and 0 with id 4
    assert TypeRows.fit(PROFILE).row_V.tolist() == [2, 0, 2, 2, 1, 2]
    table = TokenTable(embedding=str(tmp_path / "e.npy"))
    table.fit(PROFILE)
    assert np.array_equal(table.experts(np.array([2]), 0, None), table.experts(np.array([1]), 0, None))


def test_neighbours_are_the_same_in_blocks() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(3000, 8)).astype(np.float32)
    seen = np.sort(rng.choice(3000, 200, replace=False))
    unseen = np.setdiff1d(np.arange(3000), seen)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.array_equal(nearest_seen(vectors, seen, unseen), (unit[unseen] @ unit[seen].T).argmax(axis=1))


def test_types_that_one_request_alone_used() -> None:
    assert TypeRows.fit(PROFILE).used_by_one_request_U(PROFILE).tolist() == [False, True]


def test_safetensors_embeddings_are_read_without_its_library(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0], [0.25, 8.0]], dtype=np.float32)
    upper = (values.view(np.uint32) >> 16).astype("<u2").tobytes()  # exact in bf16
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}})
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + upper)
    assert np.array_equal(load_embedding(str(file), 2), values)
    with pytest.raises(UserError, match=r">= 3 ids"):
        load_embedding(str(file), 3)
    with pytest.raises(UserError, match="no such file"):
        load_embedding(str(tmp_path / "absent.npy"), 2)


def test_the_shipped_tiny_model_offers_its_embedding() -> None:
    assert load_embedding("asset:tiny/model.safetensors", 100).shape[0] == 100
