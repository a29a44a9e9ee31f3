"""The product of queries with a state, as both kernels that read compute it."""

from __future__ import annotations

import triton
import triton.language as tl

from ._launch import INTERPRETED


_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def read_state(q, s, PRECISION: tl.constexpr):
    """`q s` of q `[BJ, BK]` and s `[BK, BV]`, as `(s^T q^T)^T`: a product wants 16 rows but only 8 columns."""
    q = q.to(tl.float32)
    if PRECISION == "bf16":
        q = q.to(tl.bfloat16)
        s = s.to(tl.bfloat16)
        if _INTERPRETED:  # which multiplies the bit patterns of bfloat16
            q = q.to(tl.float32)
            s = s.to(tl.float32)
        read = tl.dot(tl.trans(s), tl.trans(q))
    else:
        read = tl.dot(tl.trans(s), tl.trans(q), input_precision=PRECISION)
    return tl.trans(read)
