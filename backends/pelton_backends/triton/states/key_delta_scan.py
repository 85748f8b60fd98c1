"""States of the delta rule with a decay for each number of a key, over rows of several tokens, chunk by chunk.

As in `delta_scan.py`, but two tokens meet with a decay of their own in each number, which is no factor of their product. Between blocks
of BLOCK tokens it is the product of two, up to the later block's begin and from there on, neither above 1; within a block each pair's
is computed, by a kernel before the others, for all blocks at once. It also writes what they multiply: keys as they are left behind the
block (`left`), queries as they ask what was before it (`asked`), and what they find within it (`inside`). The second brings that to
whole chunks.

Decays are logarithms to base two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton_backends.triton.launch import Launcher, Variant, alignment
from pelton_backends.triton.runtime import dot, launch_options, let_next_start, wait_for_inputs
from pelton_backends.triton.states.delta_scan import BLOCK, COLUMNS, TILE, delta_states_kernel, inverse_of
from pelton_backends.triton.states.delta_step import unit
from pelton_backends.triton.states.rows import padded, padded_to_swizzle, softplus, tile_of
from pelton_backends.triton.states.scan import SCRATCH_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from pelton_backends.sdpa.delta_rule import DeltaParams

PIECE = 16
"""Numbers of a key that a block's pairs have at once."""


@triton.jit
def _within(fades, left, asked, STATE: tl.constexpr, PIECE: tl.constexpr):
    """Products of a block's keys, and of its queries, with its keys: [BLOCK, BLOCK] each, zeros for tokens that come later."""
    local, piece = tl.arange(0, BLOCK), tl.arange(0, PIECE)
    is_before = (local[:, None] >= local[None, :])[:, :, None]
    met, found = tl.zeros([BLOCK, BLOCK, PIECE], tl.float32), tl.zeros([BLOCK, BLOCK, PIECE], tl.float32)
    for part in range(0, STATE, PIECE):
        at, is_number = local[:, None] * STATE + part + piece[None, :], (part + piece < STATE)[None, :]
        faded = tl.load(fades + at, is_number, 0.0)
        k, q = (
            tl.load(left + at, is_number, 0.0).to(tl.float32),
            tl.load(asked + at, is_number, 0.0).to(tl.float32),
        )
        between = tl.where(is_before, faded[:, None, :] - faded[None, :, :], float("-inf"))
        decayed = tl.exp2(between) * k[None, :, :]
        met += k[:, None, :] * decayed
        found += q[:, None, :] * decayed
    return tl.sum(met, axis=2), tl.sum(found, axis=2)


@triton.jit(do_not_specialize=["first_row", "num_reqs", "first_tile"])
def key_delta_blocks_kernel(
    convolved, marks, dt_bias, a_log, fades, passed, seen, left, asked, inside, inverses, query_start_loc, max_beta, scale,
    first_row, num_reqs, first_tile, stride_marks,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, TILE: tl.constexpr,
    PADDED_STATE: tl.constexpr, PIECE: tl.constexpr, SKIP_SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for a block of a chunk, tiles from `first_tile` on, and a head: decays count from the block's begin."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    blocks: tl.constexpr = TILE // BLOCK
    tile, low, head = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK, tl.program_id(1)
    _, start, query_len, first = tile_of(first_tile + tile, query_start_loc, first_row, num_reqs, TILE)
    if first + low >= query_len:
        return
    if SKIP_SINGLE and query_len == 1:
        return
    width: tl.constexpr = 2 * GROUPS * STATE + HEADS * DIM
    place = tile.to(tl.int64) * HEADS + head
    local, number = tl.arange(0, BLOCK), tl.arange(0, PADDED_STATE)
    is_token, is_number = first + low + local < query_len, (number < STATE)[None, :]
    is_read, token = is_token[:, None] & is_number, (start + first + low + local).to(tl.int64)
    q_at = convolved + token[:, None] * width + head // (HEADS // GROUPS) * STATE + number[None, :]
    q = unit(tl.load(q_at, is_read, 0.0).to(tl.float32), 1) * scale
    k = unit(tl.load(q_at + GROUPS * STATE, is_read, 0.0).to(tl.float32), 1)
    mark = marks + token * stride_marks
    rate = max_beta / (1.0 + tl.exp(-tl.load(mark + head, is_token, 0.0).to(tl.float32)))
    a = tl.load(mark[:, None] + HEADS + head * STATE + number[None, :], is_read, 0.0).to(tl.float32)
    a += tl.load(dt_bias + head * STATE + number, number < STATE, 0.0)[None, :]
    pace = -1.4426950408889634 * tl.exp(tl.load(a_log + head))
    fading = tl.where(is_read, pace * softplus(a), 0.0)
    faded, whole = tl.cumsum(fading, axis=0), tl.sum(fading, axis=0)
    tl.store(passed + (place * (blocks + 1) + low // BLOCK) * STATE + number, whole, number < STATE)
    own = (place * TILE + low) * STATE
    fades, seen, left, asked = fades + own, seen + own, left + own, asked + own
    at = local[:, None] * STATE + number[None, :]
    tl.store(fades + at, faded, is_number)
    tl.store(left + at, k.to(left.dtype.element_ty), is_number)
    tl.store(asked + at, q.to(asked.dtype.element_ty), is_number)
    tl.debug_barrier()  # other threads of the program read them
    met, found = _within(fades, left, asked, STATE, PIECE)
    tl.debug_barrier()
    decayed = tl.exp2(faded)
    tl.store(seen + at, (k * decayed * rate[:, None]).to(seen.dtype.element_ty), is_number)
    tl.store(left + at, (k * tl.exp2(whole[None, :] - faded)).to(left.dtype.element_ty), is_number)
    tl.store(asked + at, (q * decayed).to(asked.dtype.element_ty), is_number)
    row, column = local[:, None], local[None, :]
    tl.store(inside + (place * TILE + low + row) * TILE + low + column, found.to(inside.dtype.element_ty))
    inverse = inverse_of(tl.where(row > column, met * rate[:, None], 0.0))
    tl.store(inverses + (place * TILE + low + row) * BLOCK + column, inverse.to(inverses.dtype.element_ty))


@triton.jit(do_not_specialize=["first_row", "num_reqs", "first_tile"])
def key_delta_written_kernel(
    convolved, marks, passed, written, seen, left, asked, inside, inverses, query_start_loc, max_beta, first_row, num_reqs,
    first_tile, stride_marks,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, TILE: tl.constexpr,
    PADDED_DIM: tl.constexpr, PADDED_STATE: tl.constexpr, SKIP_SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for a chunk, tiles from `first_tile` on, and a head: decays count from the chunk's begin, those of `left` to its end."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    head = tl.program_id(1)
    _, start, query_len, first = tile_of(first_tile + tl.program_id(0), query_start_loc, first_row, num_reqs, TILE)
    if first >= query_len:
        return
    if SKIP_SINGLE and query_len == 1:
        return
    place = tl.program_id(0).to(tl.int64) * HEADS + head
    passed += place * ((TILE // BLOCK + 1) * STATE)
    written += place * (TILE * DIM)
    inside += place * (TILE * TILE)
    inverses += place * (TILE * BLOCK)
    seen, left, asked = seen + place * (TILE * STATE), left + place * (TILE * STATE), asked + place * (TILE * STATE)
    v_at = convolved + 2 * GROUPS * STATE + head * DIM
    local, number, dim = tl.arange(0, BLOCK), tl.arange(0, PADDED_STATE), tl.arange(0, PADDED_DIM)
    is_number, is_dim = (number < STATE)[None, :], (dim < DIM)[None, :]
    before = tl.zeros([PADDED_STATE], tl.float32)
    end = tl.minimum(query_len - first, TILE)
    for low in range(0, end, BLOCK):
        row = low + local
        is_token, token = first + row < query_len, (start + first + row).to(tl.int64)
        at = row[:, None] * STATE + number[None, :]
        v = tl.load(
            v_at + token[:, None] * (2 * GROUPS * STATE + HEADS * DIM) + dim[None, :], is_token[:, None] & is_dim, 0.0
        )
        b = tl.load(marks + token * stride_marks + head, is_token, 0.0).to(tl.float32)
        new = v.to(tl.float32) * (max_beta / (1.0 + tl.exp(-b)))[:, None]
        learned, asks = tl.load(seen + at, is_number, 0.0), tl.load(asked + at, is_number, 0.0)
        decayed = tl.exp2(before)[None, :]
        brought = learned.to(tl.float32) * decayed
        for earlier in range(0, low, BLOCK):
            other = earlier + local
            since = before - tl.load(passed + earlier // BLOCK * STATE + number, number < STATE, 0.0)
            theirs = tl.load(left + other[:, None] * STATE + number[None, :], is_number, 0.0).to(tl.float32)
            theirs = tl.trans((theirs * tl.exp2(since)[None, :]).to(v.dtype))
            found = dot(asks, theirs, tl.zeros([BLOCK, BLOCK], tl.float32))
            tl.store(inside + row[:, None] * TILE + other[None, :], found.to(v.dtype))
            taken = dot(learned, theirs, tl.zeros([BLOCK, BLOCK], tl.float32)).to(v.dtype)
            new -= dot(taken, tl.load(written + other[:, None] * DIM + dim[None, :], is_dim, 0.0), tl.zeros_like(new))
            brought -= dot(
                taken, tl.load(seen + other[:, None] * STATE + number[None, :], is_number, 0.0), tl.zeros_like(brought)
            )
        inverse = tl.load(inverses + row[:, None] * BLOCK + local[None, :])
        new = dot(inverse, new.to(v.dtype), tl.zeros_like(new)).to(v.dtype)
        brought = dot(inverse, brought.to(v.dtype), tl.zeros_like(brought)).to(v.dtype)
        before += tl.load(passed + low // BLOCK * STATE + number, number < STATE, 0.0)
        tl.debug_barrier()  # all threads have read what is written over
        tl.store(written + row[:, None] * DIM + dim[None, :], new, is_dim)
        tl.store(seen + at, brought, is_number)
        tl.store(asked + at, (asks.to(tl.float32) * decayed).to(v.dtype), is_number)
        tl.store(passed + low // BLOCK * STATE + number, before, number < STATE)
        tl.debug_barrier()  # the next block's threads read what all have written
    tl.store(passed + (TILE // BLOCK) * STATE + number, before, number < STATE)
    for low in range(0, end, BLOCK):
        at = left + (low + local)[:, None] * STATE + number[None, :]
        since = before - tl.load(passed + low // BLOCK * STATE + number, number < STATE, 0.0)
        k = tl.load(at, is_number, 0.0)
        tl.store(at, (k.to(tl.float32) * tl.exp2(since)[None, :]).to(k.dtype), is_number)


@triton.jit(do_not_specialize=["first_row", "num_reqs", "first_tile"])
def key_delta_outputs_kernel(
    asked, inside, written, before, output, query_start_loc, first_row, num_reqs, first_tile, stride_output,
    HEADS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED_STATE: tl.constexpr, SKIP_SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for a chunk, tiles from `first_tile` on, and a head."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    head = tl.program_id(1)
    _, start, query_len, first = tile_of(first_tile + tl.program_id(0), query_start_loc, first_row, num_reqs, TILE)
    if first >= query_len:
        return
    if SKIP_SINGLE and query_len == 1:
        return
    place = tl.program_id(0).to(tl.int64) * HEADS + head
    local, number, dim = tl.arange(0, TILE), tl.arange(0, PADDED_STATE), tl.arange(0, COLUMNS)
    is_token, is_number = first + local < query_len, number < STATE
    q_at = asked + place * (TILE * STATE) + local[:, None] * STATE + number[None, :]
    q = tl.load(q_at, is_token[:, None] & is_number[None, :], 0.0)
    is_seen = (local[:, None] >= local[None, :]) & is_token[:, None]
    weights = tl.load(inside + place * (TILE * TILE) + local[:, None] * TILE + local[None, :], is_seen, 0.0)
    to = output + (start + first + local).to(tl.int64)[:, None] * stride_output + head * DIM
    for low in range(0, DIM, COLUMNS):
        own = (low + dim)[None, :]
        is_dim = own < DIM
        s_at = before + place * (STATE * DIM) + number[:, None] * DIM + own
        state = tl.load(s_at, is_number[:, None] & is_dim, 0.0)
        is_new = is_token[:, None] & is_dim
        new = tl.load(written + place * (TILE * DIM) + local[:, None] * DIM + own, is_new, 0.0)
        found = dot(weights, new, dot(q, state, tl.zeros([TILE, COLUMNS], tl.float32)))
        tl.store(to + own, found.to(output.dtype.element_ty), is_new)


_launches = tuple(
    Launcher(kernel)
    for kernel in (key_delta_blocks_kernel, key_delta_written_kernel, delta_states_kernel, key_delta_outputs_kernel)
)


class KeyDeltaScan:
    """For rows from `first_row` on, token by token what `DeltaStep` says of one: `output` and the states behind the step. With
    `skip_single` rows of one token are left alone.

    Paper  Kimi Linear (arXiv:2510.26692), section 3; Yang et al., Gated Linear Attention (arXiv:2312.06635), section 4.3.

    Tensors as `DeltaStep`'s, and rounded as `DeltaScan`'s.
    """

    def __init__(self, layer: DeltaParams, *, pdl: bool) -> None:
        self._layer, self._scale, self._options = layer, layer.state_size**-0.5, launch_options(pdl)
        dtype, dim, size = getattr(torch, layer.needs.dtype), layer.head_dim, layer.state_size
        self._blocks = TILE // BLOCK.value
        self._tile_bytes = layer.num_heads * (
            TILE * (dim + 3 * size + TILE + BLOCK.value) * dtype.itemsize
            + max(4 * TILE * size, dim * size * dtype.itemsize)
            + 4 * size * (self._blocks + 1)
        )
        self._constants = {
            "HEADS": layer.num_heads, "DIM": dim, "STATE": size, "TILE": TILE, "PADDED_STATE": padded_to_swizzle(size),
            "PDL": pdl,
        }  # fmt: skip
        self._columns = min(padded(dim), COLUMNS)
        self._key = (
            layer.states.stride(0), layer.states.device.index, dtype, alignment(layer.states, layer.dt_bias, layer.a_log)
        )  # fmt: skip
        self._variants: dict[bool, list[Variant]] = {}

    def _variants_for(self, skip_single: bool) -> list[Variant]:
        if skip_single not in self._variants:
            layer, known = self._layer, {**self._constants, "SKIP_SINGLE": skip_single}
            grouped, is_wide = {"GROUPS": layer.num_groups}, layer.state_size > 128
            own: tuple[tuple[dict[str, int], int, int], ...] = (
                (grouped | {"PIECE": PIECE}, 8 if is_wide else 4, 1),
                (grouped | {"PADDED_DIM": padded(layer.head_dim)}, 8 if is_wide else 4, 1),
                (grouped | {"COLUMNS": self._columns}, 8 if is_wide else 4, 1 if is_wide else 2),
                ({"COLUMNS": 64}, 8, 1),
            )
            self._variants[skip_single] = [
                launch.variant(self._key, known | sizes, num_warps=num_warps, num_stages=num_stages, **self._options)
                for launch, (sizes, num_warps, num_stages) in zip(_launches, own, strict=True)
            ]
        return self._variants[skip_single]

    def __call__(
        self,
        convolved: Tensor,
        marks: Tensor,
        output: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        num_reqs: int,
        first_row: int,
        skip_single: bool,
    ) -> None:
        layer, num_rows = self._layer, num_reqs - first_row
        heads, dim, size, states = layer.num_heads, layer.head_dim, layer.state_size, layer.states
        num_tiles = len(convolved) // TILE + num_rows
        some = min(max(SCRATCH_BYTES // self._tile_bytes, 1), num_tiles)
        passed = states.new_empty(some, heads, self._blocks + 1, size)
        written, seen, left, asked, inside, inverses = (
            convolved.new_empty(some, heads, TILE, count) for count in (dim, size, size, size, TILE, BLOCK.value)
        )
        # Whoever writes the states before chunks starts after all have read the decays within blocks.
        fades = states.new_empty(some * heads * max(TILE * size, -(-dim * size * convolved.itemsize // 4)))
        before = fades.view(convolved.dtype)
        prepare, write, pass_on, give = self._variants_for(skip_single)
        strides = marks.stride(0), output.stride(0)
        scratch = passed, written, seen, left, asked, inside, inverses, fades
        key = (
            convolved.dtype, marks.dtype, output.dtype, strides,
            alignment(convolved, marks, output, *scratch, query_start_loc, seq_lens, block_table),
        )  # fmt: skip
        for first in range(0, num_tiles, some):
            last = min(first + some, num_tiles)
            prepare(
                key, ((last - first) * self._blocks, heads),
                (
                    convolved, marks, layer.dt_bias, layer.a_log, fades, passed, seen, left, asked, inside, inverses,
                    query_start_loc, layer.max_beta, self._scale, first_row, num_reqs, first, strides[0],
                ),
            )  # fmt: skip
            write(
                key, (last - first, heads),
                (
                    convolved, marks, passed, written, seen, left, asked, inside, inverses, query_start_loc,
                    layer.max_beta, first_row, num_reqs, first, strides[0],
                ),
            )  # fmt: skip
            pass_on(
                key, (triton.cdiv(dim, self._columns), heads, num_rows),
                (
                    convolved, states, passed, written, seen, left, before, query_start_loc, seq_lens, block_table,
                    first_row, first, last, states.stride(0), block_table.stride(0),
                ),
            )  # fmt: skip
            give(
                key,
                (last - first, heads),
                (asked, inside, written, before, output, query_start_loc, first_row, num_reqs, first, strides[1]),
            )
