"""RoutingTrace: what is written comes back, and every kind of bad file is one clear message."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_trace
from weird_arrays import WEIRD

from semmoe.errors import UserError
from semmoe.trace import RoutingTrace


def test_save_and_load_give_the_same_trace(trace, tmp_path):
    weights = np.random.default_rng(0).random(trace.experts_TLk.shape)
    full = make_trace(arrival_ms_R=np.arange(12.0), gate_weight_TLk=weights)
    full.save(tmp_path / "t.npz")
    back = RoutingTrace.load(tmp_path / "t.npz")
    for name in (
        "experts_TLk",
        "token_id_T",
        "request_offset_R1",
        "prompt_len_R",
        "layer_ids_L",
        "domain_R",
        "arrival_ms_R",
    ):
        assert np.array_equal(getattr(full, name), getattr(back, name)), name
    assert np.allclose(back.gate_weight_TLk, weights, atol=1e-3)
    assert back.digest == trace.digest == full.digest
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]


def test_select_keeps_each_request_whole(trace):
    picked = trace.select(np.array([3, 0, 3]))
    assert picked.num_requests == 3
    assert np.array_equal(picked.experts_TLk[:20], trace.experts_TLk[60:80])
    assert np.array_equal(picked.experts_TLk[20:40], trace.experts_TLk[:20])
    assert np.array_equal(picked.experts_TLk[40:], picked.experts_TLk[:20])


def test_split_is_by_request_seeded_stratified_and_disjoint():
    trace = make_trace(requests=40, tokens=5)
    marked = make_trace(requests=40, tokens=5, prompt_len_R=np.full(40, 1), token_id_T=np.repeat(np.arange(40), 5))
    train, held = marked.split(0.5, seed=1)
    ids_train, ids_held = set(train.token_id_T), set(held.token_id_T)
    assert not ids_train & ids_held and ids_train | ids_held == set(range(40))
    assert (train.domain_R == "even").sum() == 10
    assert trace.split(0.5, 1)[0].digest == trace.split(0.5, 1)[0].digest != trace.split(0.5, 2)[0].digest


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, 2.0, float("nan")])
def test_split_refuses_impossible_fractions(trace, fraction):
    with pytest.raises(UserError, match="train_fraction"):
        trace.split(fraction)


def experts_with(t: int, layer: int, row: list[int]) -> np.ndarray:
    experts = make_trace().experts_TLk.copy()
    experts[t, layer] = row
    return experts


BAD = {
    "expert id too large": ({"experts_TLk": experts_with(7, 1, [1, 8])}, r"token 7, layer 1: expert id 8 outside 0..7"),
    "negative expert id": ({"experts_TLk": experts_with(3, 2, [-1, 2])}, r"token 3, layer 2: expert id -1"),
    "twice the same expert": ({"experts_TLk": experts_with(9, 0, [4, 4])}, r"token 9, layer 0.*distinct"),
    "all-zero capture": ({"experts_TLk": experts_with(9, 0, [0, 0])}, r"token 9, layer 0.*all zero"),
    "token outside vocabulary": ({"token_id_T": np.full(240, 50)}, r"token 0: token id 50 outside 0..49"),
    "no tokens": ({"experts_TLk": np.zeros((0, 3, 2), int), "token_id_T": np.zeros(0, int)}, "empty trace"),
    "wrong rank of experts": ({"experts_TLk": np.zeros((240, 6), int)}, "tokens, layers, k"),
    "token ids of another length": ({"token_id_T": np.zeros(10, int)}, "token_id has shape"),
    "offsets that end early": ({"request_offset_R1": np.arange(13) * 19}, "request_offset must run from 0 to the 240"),
    "a request without tokens": ({"request_offset_R1": np.r_[0, 0, np.arange(2, 13) * 20]}, "request 0 has no tokens"),
    "prompt longer than request": ({"prompt_len_R": np.full(12, 21)}, "request 0: prompt_len 21 outside 0..20"),
    "layers out of order": ({"layer_ids_L": np.array([2, 1, 3])}, "increasing"),
    "float experts": ({"experts_TLk": make_trace().experts_TLk.astype(float)}, "integers are needed"),
    "expert ids beyond int16": ({"experts_TLk": make_trace().experts_TLk.astype(np.int64) + 40000}, "outside int16"),
    "NaN gate weight": ({"gate_weight_TLk": np.full((240, 3, 2), np.nan)}, "gate_weight must be finite"),
    "negative arrival": ({"arrival_ms_R": np.full(12, -1.0)}, "arrival_ms"),
    "more choices than experts": ({"num_experts": 1}, "2 choices a token out of 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_content_is_named(name):
    changes, message = BAD[name]
    with pytest.raises(UserError, match=message):
        make_trace(**changes)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04broken"])
def test_unreadable_file_is_named(tmp_path, content):
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.npz: not a readable"):
        RoutingTrace.load(path)


def test_missing_file_missing_arrays_and_future_schema_are_named(trace, tmp_path):
    with pytest.raises(UserError, match="no such trace file"):
        RoutingTrace.load(tmp_path / "absent.npz")
    np.savez(tmp_path / "part.npz", experts=trace.experts_TLk)
    with pytest.raises(UserError, match="lacks schema_version"):
        RoutingTrace.load(tmp_path / "part.npz")
    trace.save(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as file:
        arrays = {k: file[k] for k in file.files} | {"schema_version": np.int64(99)}
    np.savez(tmp_path / "future.npz", **arrays)
    with pytest.raises(UserError, match="schema version 99"):
        RoutingTrace.load(tmp_path / "future.npz")


def test_a_pickle_in_the_file_is_refused(trace, tmp_path):
    trace.save(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as file:
        arrays = {k: file[k] for k in file.files} | {"domain": np.array([object()], dtype=object)}
    np.savez(tmp_path / "pickle.npz", **arrays)
    with pytest.raises(UserError, match="not a readable"):
        RoutingTrace.load(tmp_path / "pickle.npz")


def test_every_array_of_a_wrong_kind_is_refused_and_names_the_file(trace, tmp_path):
    trace.save(tmp_path / "good.npz")
    arrays, bad = dict(np.load(tmp_path / "good.npz")), tmp_path / "bad.npz"
    free_text = {("domain", kind) for kind in WEIRD}  # any labels will do where there are enough of them
    for name in (*arrays, "arrival_ms", "gate_weight"):
        for kind, weird in WEIRD.items():
            np.savez(bad, **arrays | {name: weird})
            with pytest.raises(UserError, match=r"bad\.npz: "):
                RoutingTrace.load(bad)
                if (name, kind) not in free_text:
                    pytest.fail(f"{name}: {kind} was taken")


@pytest.mark.parametrize(("name", "value"), [("num_experts", 0), ("num_experts", 10**12), ("vocab_size", 2**62)])
def test_sizes_that_no_id_type_holds_are_refused(trace, tmp_path, name, value):
    trace.save(tmp_path / "t.npz")
    np.savez(tmp_path / "t.npz", **dict(np.load(tmp_path / "t.npz")) | {name: np.int64(value)})
    with pytest.raises(UserError, match=f"{name}={value} must lie in"):
        RoutingTrace.load(tmp_path / "t.npz")


def test_damaged_bytes_are_one_message_or_change_nothing(trace, tmp_path):
    trace.save(tmp_path / "good.npz")
    whole, rng, bad = (tmp_path / "good.npz").read_bytes(), np.random.default_rng(0), tmp_path / "bad.npz"
    damaged = [whole[:cut] for cut in (0, 1, 4, 100, len(whole) // 2, len(whole) - 1)]
    for low in (0, len(whole) - 700):  # data, and the directory at the end of the archive
        for _ in range(80):
            copy = bytearray(whole)
            for place in rng.integers(low, len(whole), 4):
                copy[place] = rng.integers(256)
            damaged.append(bytes(copy))
    refused = 0
    for data in damaged:
        bad.write_bytes(data)
        try:
            assert RoutingTrace.load(bad).digest == trace.digest  # the checksums let only harmless changes through
        except UserError as error:
            assert "bad.npz: " in str(error)
            refused += 1
    assert refused > 100


def test_a_plain_array_is_no_trace(tmp_path):
    np.save(tmp_path / "plain.npy", np.arange(5))
    with pytest.raises(UserError, match=r"plain\.npy: not a readable \.npz trace"):
        RoutingTrace.load(tmp_path / "plain.npy")


def test_a_split_by_time_trains_on_the_first_requests():
    trace = make_trace()
    train, later = trace.split(0.25, by="time")
    assert (train.num_requests, later.num_requests) == (3, 9)
    assert (np.concatenate([train.experts_TLk, later.experts_TLk]) == trace.experts_TLk).all()
    with pytest.raises(UserError, match="random or time"):
        trace.split(0.25, by="date")
