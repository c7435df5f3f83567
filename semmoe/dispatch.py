"""DispatchSpec: the flow around an MoE layer, the dispatcher inside it, and the width of the rows that travel."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UserError, nearest
from .specs import DTYPE_BYTES

FLOWS = ("dp", "tp_replicated", "tp_scattered", "tp_shuffled")
DISPATCHERS = ("allgather_rs", "a2a_assignment", "a2a_dedup", "low_latency")
METADATA_BYTES = 8  # per remote assignment beside the hidden row: slot id int32 + gate weight fp32
FP8_BLOCK = 128  # elements that share one fp32 scale in fp8 dispatch


@dataclass(frozen=True, kw_only=True)
class DispatchSpec:
    """Flow and dispatcher around an MoE layer, with the width of the rows that travel.

    dtype names as in specs.DTYPE_BYTES. `carry_expert_ids`: SAG also carries the k ids of each token (tp_shuffled).
    `keeps_order`: its token scheduler leaves tokens where a plain reduce-scatter puts them, so that SRS and SAG pick no rows.
    """

    flow: str
    dispatcher: str | None
    hidden: int
    top_k: int
    activation_dtype: str = "bf16"
    dispatch_dtype: str | None = None
    combine_dtype: str | None = None
    carry_expert_ids: bool = False
    keeps_order: bool = False

    def __post_init__(self) -> None:
        if self.flow not in FLOWS:
            raise UserError(f"flow '{self.flow}'{nearest(self.flow, FLOWS)}")
        if self.flow == "tp_replicated":
            if self.dispatcher is not None:
                raise UserError(
                    "flow tp_replicated has no dispatcher (every rank holds every token); set dispatcher=none"
                )
        elif self.dispatcher is None:
            raise UserError(f"flow {self.flow} needs a dispatcher (one of {', '.join(valid_dispatchers(self.flow))})")
        elif self.dispatcher not in DISPATCHERS:
            raise UserError(f"dispatcher '{self.dispatcher}'{nearest(self.dispatcher, DISPATCHERS)}")
        elif self.dispatcher not in valid_dispatchers(self.flow):
            raise UserError(f"dispatcher {self.dispatcher} goes with flow dp only, not {self.flow}")
        for name in ("activation_dtype", "dispatch_dtype", "combine_dtype"):
            dtype = getattr(self, name) or self._default_dtype(name)
            if dtype not in DTYPE_BYTES:
                raise UserError(f"{name}: unknown dtype '{dtype}'{nearest(dtype, DTYPE_BYTES)}")
            object.__setattr__(self, name, dtype)

    def _default_dtype(self, name: str) -> str:
        return "fp8" if name == "dispatch_dtype" and self.dispatcher == "low_latency" else self.activation_dtype

    @property
    def row_bytes(self) -> float:
        return self.hidden * DTYPE_BYTES[self.activation_dtype]

    @property
    def dispatch_row_bytes(self) -> float:
        """A dispatched row; fp8 rows carry one fp32 scale per block of 128."""
        scales = -(-self.hidden // FP8_BLOCK) * 4 if self.dispatch_dtype == "fp8" else 0
        return self.hidden * DTYPE_BYTES[str(self.dispatch_dtype)] + scales

    @property
    def combine_row_bytes(self) -> float:
        return self.hidden * DTYPE_BYTES[str(self.combine_dtype)]


def valid_dispatchers(flow: str) -> tuple[str, ...]:
    """Dispatchers that may stand in a flow (DESIGN section 2)."""
    return {"dp": DISPATCHERS, "tp_replicated": ()}.get(flow, DISPATCHERS[1:])


def valid_pairs() -> list[tuple[str, str | None]]:
    """Every valid (flow, dispatcher) pair."""
    return [(flow, d) for flow in FLOWS for d in (valid_dispatchers(flow) or (None,))]
