"""JSON and YAML that others wrote: byte-order marks and CRLF are read, fields of the wrong kind are named."""

from __future__ import annotations

import json

import pytest
from compare_rows import row

from semmoe.errors import UserError
from semmoe.files import read_object
from semmoe.hf_config import model_from_hf_config
from semmoe.inputs import load_cluster
from semmoe.row_files import read_row, write_row

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
CLUSTER = {"name": "mine", "nodes": 1, "ranks_per_node": 2, "topology": "switch", "memory_gib": 4, "memory_gbps": 9}
CLUSTER |= {"bf16_tflops": 0.1, "link_gbps": 3, "alpha_us": 1}


def from_windows(path, text):
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    return path


def test_byte_order_marks_and_crlf_are_read_in_every_kind_of_file(tmp_path):
    config = from_windows(tmp_path / "config.json", json.dumps(MIXTRAL, indent=1))
    assert read_object(config, "") == MIXTRAL and model_from_hf_config(config).hidden == 32
    file = from_windows(tmp_path / "cluster.yaml", "".join(f"{key}: {value}\n" for key, value in CLUSTER.items()))
    assert load_cluster({"name": "mine", "file": str(file)})[0] == CLUSTER
    path = write_row(tmp_path, row())
    known = read_row(path)
    assert read_row(from_windows(path, path.read_text())) == known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "abc"}, "hidden_size='abc' must be a whole number of at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be"),
        ({"moe_layer_freq": 0}, "moe_layer_freq=0 must be"),
        ({"num_local_experts": [4]}, r"num_local_experts=\[4\] must be"),
        ({"n_group": -2}, "n_group=-2 must be a whole number of at least 0"),
        ({"vocab_size": None, "intermediate_size": None}, "lacks vocab_size, moe_intermediate_size"),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list of layers"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8' must be an object"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | change))
    with pytest.raises(UserError, match=f"config.json: {message}"):
        model_from_hf_config(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"null", b"3", b"{", b"", b"\xff\xfe{\x00}\x00", b"[" * 100_000])
def test_what_is_no_object_is_refused_with_the_remedy(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json: .*; give a Hugging Face config\.json or its directory"):
        model_from_hf_config(tmp_path)
