"""Rows of any single file of measurements, told by its columns: `semmoe validate data=FILE`."""

from __future__ import annotations

from pathlib import Path

from semmoe.errors import UserError

from .collectives import NCCL_COLUMNS, curve, nccl_rows
from .deepep import SMS, curve_error, deepep_columns, law_row, source_rows, transfer
from .deepep_law import LINK_GBPS, SOURCE, mode_of
from .operators import ATTENTION_COLUMNS, MOE_COLUMNS, MOE_SERIES, attention_rows
from .row import Row, held_out, read, scored


def rows_of_file(path: Path, known: Path | None = None) -> list[Row]:
    """Held-out rows of the file; DeepEP rows of other machines also from H100's law.

    known: folder of the public tables, whose measured H100 rows make that transfer sharper; without it the law's
    committed constants are used alone.
    """
    columns = set(read(path, ()).columns)
    if set(NCCL_COLUMNS) <= columns:
        return nccl_rows(path)
    if set(deepep_columns("low_latency")) <= columns:
        return _deepep(path, known)
    if set(MOE_COLUMNS) <= columns:
        table = read(path, MOE_COLUMNS)
        error = held_out(table[table.moe_ep_size == 1], MOE_SERIES, "num_tokens", "latency_us", curve)
        return [
            scored(f"moe.{system}", f"fused MoE by tokens, {system}", part.error, 5, 15)
            for system, part in error.groupby("system")
        ]
    if set(ATTENTION_COLUMNS) <= columns:
        return attention_rows(path.stem, path)
    raise UserError(
        f"{path}: columns of no known kind; NCCL ({', '.join(NCCL_COLUMNS)}), DeepEP "
        f"({', '.join(deepep_columns('low_latency'))}, normal mode also {', '.join(SMS)}), fused MoE "
        f"({', '.join(MOE_COLUMNS)}) and attention ({', '.join(ATTENTION_COLUMNS)}) are right"
    )


def _deepep(path: Path, known: Path | None) -> list[Row]:
    table = read(path, deepep_columns("low_latency"))
    mode, rows = mode_of(table), []
    words = mode.replace("_", " ")
    for system, part in table.groupby("system"):
        key, what = f"deepep.{mode}.{system}", f"DeepEP {words}, {system}, held out"
        if mode == "normal":
            rows.append(law_row(key, what, part))
        else:
            rows.append(scored(key, what, curve_error(part).error, 10))
    source = source_rows(table)
    public = None if known is None else known / f"deepep_{mode}.csv"
    if source.empty and public is not None and public.is_file():
        source = source_rows(read(public, deepep_columns(mode)))
    for system in sorted(set(table.system) - {SOURCE}):
        if system not in LINK_GBPS or not (table[table.system == system].node_num == 1).any():
            continue
        what = f"DeepEP {words}, {system} from H100 by the datasheets"
        rows.append(transfer(f"deepep.{mode}.{system}.transfer", what, table, str(system), source))
    return rows
