"""A kernel that is imported only when a step launches it: see `pelton_compile_ahead.py`."""

from __future__ import annotations

import triton
import triton.language as tl

LATE_FACTOR = tl.constexpr(5)


@triton.jit
def scaled_late(values):
    return values * LATE_FACTOR


@triton.jit
def late_kernel(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, scaled_late(tl.load(x + at)))
