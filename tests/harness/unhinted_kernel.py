"""A row copied through an address from a table, without the alignment hint: what the compiler makes of it then."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_row(x_table, out, C: tl.constexpr):
    col = tl.arange(0, C)
    x = tl.load(x_table).to(tl.pointer_type(out.dtype.element_ty))
    tl.store(out + col, tl.load(x + col))
