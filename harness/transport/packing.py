"""Rows and metadata as one flat byte tensor, and back: what travels in one all-to-all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semmoe.dispatch import METADATA_BYTES


def row_bytes(rows_NC: Tensor) -> int:
    """Bytes of one row, also of an empty tensor."""
    width = 1
    for size in rows_NC.shape[1:]:
        width *= size
    return width * rows_NC.element_size()


def as_rows(bytes_NB: Tensor, like_NC: Tensor) -> Tensor:
    """Rows of bytes in the dtype and row shape of `like_NC`."""
    if like_NC.dtype == torch.uint8:
        return bytes_NB
    return bytes_NB.reshape(-1).view(like_NC.dtype).view(-1, *like_NC.shape[1:])


def fresh(part: Tensor) -> Tensor:
    """A copy at offset 0 of its storage: a byte slice of one row is contiguous but may be unaligned for a wider dtype."""
    return part.clone(memory_format=torch.contiguous_format)


def pack_bytes(rows_NB: Tensor, send_G: Sequence[int], meta_M8: Tensor, send_meta_G: Sequence[int]) -> Tensor:
    """[rows for rank 0, metadata for rank 0, rows for rank 1, ...] as one flat byte tensor."""
    parts = []
    for rows, meta in zip(rows_NB.split(list(send_G)), meta_M8.split(list(send_meta_G)), strict=True):
        parts += [rows.reshape(-1), meta.reshape(-1)]
    return torch.cat(parts)


def unpack_bytes(
    flat: Tensor, sizes_G2: Sequence[Sequence[int]], width: int
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """(rows [N, width], metadata [M, 8], rows per rank, metadata entries per rank) of what `pack_bytes` made."""
    splits = [size for n, m in sizes_G2 for size in (n * width, m * METADATA_BYTES)]
    parts = flat.split(splits)
    rows, meta = torch.cat(parts[0::2]).view(-1, width), torch.cat(parts[1::2]).view(-1, METADATA_BYTES)
    return rows, meta, [len(p) // width for p in parts[0::2]], [len(p) // METADATA_BYTES for p in parts[1::2]]
