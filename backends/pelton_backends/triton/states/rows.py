"""Rows of a step for kernels of layers with states: which tokens are whose, and what a token's step is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(index, query_start_loc, first_row, num_reqs, TILE: tl.constexpr):
    """Row of tile `index` of TILE tokens, its first token in the batch, how many it has in the step, and the tile's first in the row.

    As in `prefill_kernel`: row r owns tiles query_start_loc[r] // TILE + r and on, at least as many as it needs. Tiles are counted
    from `first_row`'s.
    """
    index += tl.load(query_start_loc + first_row) // TILE + first_row
    row, above = first_row, num_reqs
    while above - row > 1:
        middle = (row + above) // 2
        if tl.load(query_start_loc + middle) // TILE + middle <= index:
            row = middle
        else:
            above = middle
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - start
    return row, start, query_len, (index - (start // TILE + row)) * TILE


@triton.jit
def first_tile_of(row, start, query_start_loc, first_row, TILE: tl.constexpr):
    """The number of a row's first tile, counted as `tile_of` does."""
    return start // TILE + row - (tl.load(query_start_loc + first_row) // TILE + first_row)


@triton.jit
def columns(at, mask, ACTIVATE: tl.constexpr):
    """Load some of a token's numbers; with ACTIVATE what comes through SiLU, rounded as they are."""
    x = tl.load(at, mask, 0.0)
    if ACTIVATE:
        wide = x.to(tl.float32)
        x = (wide / (1.0 + tl.exp(-wide))).to(x.dtype)
    return x


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact for small results too: 1 + exp(x) is rounded, and the logarithm made good for it (Kahan)."""
    small = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + small
    found = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))
    return tl.where(x > 20.0, x, found)


def padded(size: int) -> int:
    """As many numbers as a tile of a product has for `size`: a power of two, 16 at least."""
    return max(int(triton.next_power_of_2(size)), 16)


def padded_to_swizzle(size: int) -> int:
    """The same for 16-bit numbers in a kernel of several products on tensor cores: 64 at least, which fill the 128 bytes that shared memory
    is swizzled by. Where tiles of one kernel are swizzled by fewer bytes than others, ptxas 12.8 makes code that reads anywhere
    (`tests/support/pelton_sass.py`)."""
    return max(padded(size), 64)
