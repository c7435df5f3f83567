"""What runs (ModelSpec) on what (ClusterSpec), and whether it fits in memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from .errors import UserError, nearest
from .kinds import check_kinds

DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "mxfp4": 0.53125}  # mxfp4: 4 bits + 1 byte per 32
WIDTHS = (
    "hidden",
    "expert_ffn",
    "shared_ffn",
    "dense_ffn",
    "head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "rope_head_dim",
    "v_head_dim",
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of one MoE transformer; sizes in elements unless the name says otherwise.

    `layer_ids` are the absolute decoder-layer indices of the MoE layers (dense layers are absent from it).
    Shapes of presets come from the models' public config.json files.
    """

    name: str
    hidden: int
    num_layers: int
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    expert_ffn: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    shared_experts: int = 0
    shared_ffn: int = 0
    dense_ffn: int = 0
    n_group: int = 1
    topk_group: int = 1
    renormalise: bool = True
    scoring: str = "softmax"
    attention: str = "gqa"
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    weight_dtype: str = "bf16"
    expert_dtype: str = "bf16"
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(int(i) for i in self.layer_ids))
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise UserError(f"model {self.name}: layer_ids must be non-empty, increasing and distinct")
        if self.layer_ids[-1] >= self.num_layers:
            raise UserError(
                f"model {self.name}: MoE layer {self.layer_ids[-1]} of a model with {self.num_layers} layers"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise UserError(f"model {self.name}: top_k={self.top_k} must lie in 1..num_experts={self.num_experts}")
        if self.num_experts % self.n_group:
            raise UserError(f"model {self.name}: n_group={self.n_group} does not divide num_experts={self.num_experts}")
        for dtype in (self.weight_dtype, self.expert_dtype):
            if dtype not in DTYPE_BYTES:
                raise UserError(f"model {self.name}: unknown dtype '{dtype}'{nearest(dtype, DTYPE_BYTES)}")
        if self.attention not in ("gqa", "mla"):
            raise UserError(f"model {self.name}: attention '{self.attention}' must be 'gqa' or 'mla'")

    @property
    def num_moe_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def expert_bytes(self) -> float:
        """Weight bytes of one routed expert: gate, up and down projections."""
        return 3 * self.hidden * self.expert_ffn * DTYPE_BYTES[self.expert_dtype]

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV cache that one token takes over all layers (one latent row per layer for MLA)."""
        if self.attention == "mla":
            return self.num_layers * (self.kv_lora_rank + self.rope_head_dim) * 2.0
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2.0

    @property
    def attention_params(self) -> int:
        """Weights of one attention block."""
        if self.attention == "mla":
            qk = self.head_dim + self.rope_head_dim
            q = (
                (self.hidden * self.q_lora_rank + self.q_lora_rank * self.num_heads * qk)
                if self.q_lora_rank
                else self.hidden * self.num_heads * qk
            )
            kv = self.hidden * (self.kv_lora_rank + self.rope_head_dim)
            kv_up = self.kv_lora_rank * self.num_heads * (self.head_dim + self.v_head_dim)
            return q + kv + kv_up + self.num_heads * self.v_head_dim * self.hidden
        return self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    def scaled(self, factor: float) -> ModelSpec:
        """The same model with every width times `factor` (multiples of 16): hidden, experts, heads, latent rows. For machines
        that are too small. Layers, heads, experts and vocabulary keep their numbers."""
        if not 0 < factor <= 1:
            raise UserError(f"model_scale={factor} must lie in (0, 1]")
        if factor == 1:
            return self
        sizes = {name: getattr(self, name) for name in WIDTHS}
        return replace(self, **{n: max(16, round(size * factor / 16) * 16) for n, size in sizes.items() if size})

    def weight_bytes_per_rank(self, slots_per_rank: int, attention_tp: int = 1) -> float:
        """Weights on one rank: its expert slots of every MoE layer and the replicated (or TP-split) rest."""
        experts = self.num_moe_layers * slots_per_rank * self.expert_bytes
        dense_layers = self.num_layers - self.num_moe_layers
        rest = self.num_layers * self.attention_params
        rest += dense_layers * 3 * self.hidden * self.dense_ffn
        rest += self.num_moe_layers * (
            3 * self.hidden * self.shared_experts * self.shared_ffn + self.hidden * self.num_experts
        )
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden
        return experts + (rest + embeddings) * DTYPE_BYTES[self.weight_dtype] / attention_tp


TOPOLOGIES = ("switch", "mesh", "pcie", "shared_memory")
FABRICS = ("flat", "rail", "rack")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Measured latency of one collective over `ranks` ranks, by message size in nccl-tests' count of bytes."""

    op: str
    ranks: int
    bytes: tuple[float, ...]
    latency_us: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", tuple(float(b) for b in self.bytes))
        object.__setattr__(self, "latency_us", tuple(float(v) for v in self.latency_us))
        if len(self.bytes) != len(self.latency_us) or not self.bytes:
            raise UserError(f"curve {self.op} over {self.ranks} ranks: bytes and latency_us need the same length >= 1")
        if any(b <= 0 for b in self.bytes) or any(a >= b for a, b in zip(self.bytes, self.bytes[1:], strict=False)):
            raise UserError(f"curve {self.op} over {self.ranks} ranks: bytes must be positive and increasing")
        if any(not v > 0 for v in self.latency_us):
            raise UserError(f"curve {self.op} over {self.ranks} ranks: latencies must be positive numbers")


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Ranks, link tiers and measured or fitted costs of one machine or group of machines.

    gbps = 10^9 bytes per second, per rank and direction; nic_gbps per NIC. `nics_per_node` 0: one a rank; more: a rank
    stripes over its own; fewer: neighbours share one. `fabric` between nodes, `nodes_per_leaf` (0: all): traffic/wiring.py;
    `oversubscription`: capacity of a leaf's NICs over that of its uplinks. `cores` > 0 marks a CPU machine whose ranks
    share that many cores: rank r runs on core r modulo cores, and a layer waits for the core with most work.
    `mixed_decode`: time of decodes that share an attention call with a prefill chunk over their time alone; 1: unknown.
    `host_us` holds fixed costs per named operation and `per_row_ns` costs per row (names: simulator/cost/host.py), `skew`
    measured weights of the busiest port and hottest pair of an exchange (names and law: harness/calibration/skew.py),
    `expert_grid` measured (rows, active experts, us) of experts of `expert_grid_shape` = (hidden, ffn), `attention`
    measured tables of attention kernels (simulator/cost/attention.py names their keys), `gemm` the law of dense products
    fitted to measured ones (keys: simulator/cost/dense.py; {}: roofline), `provenance` the source per field.
    """

    name: str
    nodes: int
    ranks_per_node: int
    topology: str
    memory_gib: float
    memory_gbps: float
    bf16_tflops: float
    link_gbps: float
    alpha_us: float
    nic_gbps: float = 0.0
    nic_alpha_us: float = 20.0
    nics_per_node: int = 0
    fabric: str = "flat"
    nodes_per_leaf: int = 0
    oversubscription: float = 1.0
    fp8_tflops: float = 0.0
    mesh_link_gbps: float = 0.0
    memory_efficiency: float = 0.85
    max_mfu: float = 0.65
    mfu_half_rows: float = 64.0
    mixed_decode: float = 1.0
    expert_floor_us: float = 30.0
    cores: int = 0
    host_us: dict[str, float] = field(default_factory=dict)
    per_row_ns: dict[str, float] = field(default_factory=dict)
    skew: dict[str, float] = field(default_factory=dict)
    curves: tuple[Curve, ...] = ()
    expert_grid: tuple[tuple[float, float, float], ...] = ()
    expert_grid_shape: tuple[int, ...] = ()
    deepep: dict[str, Any] = field(default_factory=dict)
    attention: tuple[dict[str, Any], ...] = ()
    gemm: dict[str, float] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        curves = tuple(c if isinstance(c, Curve) else Curve(**c) for c in self.curves)
        object.__setattr__(self, "curves", curves)
        object.__setattr__(self, "attention", tuple(self.attention))
        object.__setattr__(self, "expert_grid", tuple(tuple(float(x) for x in row) for row in self.expert_grid))
        object.__setattr__(self, "expert_grid_shape", tuple(int(x) for x in self.expert_grid_shape))
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise UserError(f"cluster {self.name}: nodes and ranks_per_node must be at least 1")
        if self.topology not in TOPOLOGIES:
            raise UserError(f"cluster {self.name}: topology '{self.topology}'{nearest(self.topology, TOPOLOGIES)}")
        for key in ("memory_gib", "memory_gbps", "bf16_tflops", "link_gbps"):
            if not getattr(self, key) > 0:
                raise UserError(f"cluster {self.name}: {key}={getattr(self, key)} must be positive")
        if self.nodes > 1 and not self.nic_gbps > 0:
            raise UserError(f"cluster {self.name}: {self.nodes} nodes need nic_gbps > 0")
        self._check_fabric()

    def _check_fabric(self) -> None:
        if self.fabric not in FABRICS:
            raise UserError(f"cluster {self.name}: fabric '{self.fabric}'{nearest(self.fabric, FABRICS)}")
        if not self.oversubscription >= 1:
            raise UserError(f"cluster {self.name}: oversubscription={self.oversubscription} must be at least 1")
        if self.nodes_per_leaf < 0:
            raise UserError(f"cluster {self.name}: nodes_per_leaf={self.nodes_per_leaf} must not be negative")
        few, many = sorted((self.nics_per_node or self.ranks_per_node, self.ranks_per_node))
        if few < 1 or many % few:
            raise UserError(
                f"cluster {self.name}: nics_per_node={self.nics_per_node} must divide ranks_per_node="
                f"{self.ranks_per_node} or be a multiple of it"
            )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def nic_bundle_gbps(self) -> float:
        """Capacity of what a rank sends through between nodes: its NICs together, or the one that it shares."""
        return self.nic_gbps * max((self.nics_per_node or 1) // self.ranks_per_node, 1)

    @property
    def digest(self) -> str:
        """Short hash of the whole content: which calibration a predicted row used."""
        return digest(asdict(self))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ClusterSpec:
        known = {f.name for f in fields(cls)}
        for key in raw:
            if key not in known:
                raise UserError(f"cluster {raw.get('name', '?')}: unknown key '{key}'{nearest(key, known)}")
        missing = [f.name for f in fields(cls) if f.name not in raw and f.default is f.default_factory]  # both MISSING
        if missing:
            raise UserError(f"cluster {raw.get('name', '?')}: lacks {', '.join(missing)}")
        check_kinds(cls, raw, f"cluster {raw.get('name', '?')}: ")
        return cls(**raw)


def digest(content: Any) -> str:
    """First 12 hex digits of the SHA-256 of the canonical JSON of `content`."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_fits(model: ModelSpec, cluster: ClusterSpec, slots_per_rank: int, attention_tp: int = 1) -> float:
    """GiB left for KV cache and activations on a rank after the weights; UserError where the weights do not fit."""
    weights_gib = model.weight_bytes_per_rank(slots_per_rank, attention_tp) / 2**30
    left_gib = cluster.memory_gib * 0.92 - weights_gib
    if left_gib <= 0:
        raise UserError(
            f"{model.name} needs {weights_gib:.1f} GiB of weights a rank on {cluster.name}, which has "
            f"{cluster.memory_gib:.0f} GiB; use more ranks, fewer redundant slots, or a bigger device"
        )
    return left_gib
