"""States of the gated delta rule over rows of several tokens, chunk by chunk.

Three kernels. What a token writes depends on what those before it in the chunk have written: the first solves this triangular system
of each chunk, BLOCK tokens at a time, for a state of zeros (`written`) and for what a state brings in (`seen`). The second goes through
a row's chunks, writes the state before each, and makes of `written` what the tokens write in truth; a program has some columns of one
head's state. The third computes all outputs at once. As in `scan.py` what lies between them takes SCRATCH_BYTES at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton_backends.triton.launch import Launcher, Variant, alignment
from pelton_backends.triton.runtime import dot, launch_options, let_next_start, wait_for_inputs
from pelton_backends.triton.states.delta_step import decays_and_rates, unit
from pelton_backends.triton.states.rows import first_tile_of, padded, padded_to_swizzle, tile_of
from pelton_backends.triton.states.scan import HEADS_TOGETHER, SCRATCH_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from pelton_backends.sdpa.delta_rule import DeltaParams

BLOCK = tl.constexpr(16)
"""Tokens whose system is solved one by one: the least that tensor cores multiply."""
TILE = 64
"""Tokens of a chunk."""
COLUMNS = 32
"""Of a state, that a program of the second kernel has."""


@triton.jit
def inverse_of(system):
    """The inverse of 1 + `system`, which is [BLOCK, BLOCK] and has numbers below the diagonal alone: a row after the other."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inverse = -system
    for i in range(2, BLOCK):
        own = tl.sum(tl.where(row == i, -system, 0.0), axis=0)
        own += tl.sum(own[:, None] * inverse, axis=0)
        inverse = tl.where(row == i, own[None, :], inverse)
    return tl.where(row == column, 1.0, inverse)


@triton.jit(do_not_specialize=["first_row", "num_reqs", "first_tile"])
def delta_written_kernel(
    convolved, marks, dt_bias, a_log, passed, written, seen, query_start_loc, max_beta, first_row, num_reqs, first_tile,
    stride_marks,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, TILE: tl.constexpr,
    PADDED_DIM: tl.constexpr, PADDED_STATE: tl.constexpr, SKIP_SINGLE: tl.constexpr, PDL: tl.constexpr,
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
    width: tl.constexpr = 2 * GROUPS * STATE + HEADS * DIM
    place = tl.program_id(0).to(tl.int64) * HEADS + head
    passed += place * TILE
    written += place * (TILE * DIM)
    seen += place * (TILE * STATE)
    convolved += (start + first).to(tl.int64) * width
    marks += (start + first).to(tl.int64) * stride_marks
    k_at = convolved + (GROUPS + head // (HEADS // GROUPS)) * STATE
    v_at = convolved + 2 * GROUPS * STATE + head * DIM
    local, number, dim = tl.arange(0, BLOCK), tl.arange(0, PADDED_STATE), tl.arange(0, PADDED_DIM)
    is_number, is_dim = (number < STATE)[None, :], (dim < DIM)[None, :]
    before = 0.0
    for low in range(0, tl.minimum(query_len - first, TILE), BLOCK):
        token = low + local
        is_token = first + token < query_len
        fading, rate = decays_and_rates(
            marks + token.to(tl.int64) * stride_marks, head, is_token, dt_bias, a_log, max_beta, HEADS
        )
        faded = before + tl.cumsum(fading, axis=0)
        before += tl.sum(fading, axis=0)
        tl.store(passed + token, faded)
        line = token[:, None] * width
        k = unit(tl.load(k_at + line + number[None, :], is_token[:, None] & is_number, 0.0).to(tl.float32), 1)
        v = tl.load(v_at + line + dim[None, :], is_token[:, None] & is_dim, 0.0)
        learned = (k * rate[:, None]).to(v.dtype)
        new = v.to(tl.float32) * rate[:, None]
        brought = k * (rate * tl.exp(faded))[:, None]
        for earlier in range(0, low, BLOCK):
            other = earlier + local
            theirs = tl.load(k_at + other[:, None] * width + number[None, :], is_number, 0.0).to(tl.float32)
            met = dot(learned, tl.trans(unit(theirs, 1).to(v.dtype)), tl.zeros([BLOCK, BLOCK], tl.float32))
            met = (met * tl.exp(faded[:, None] - tl.load(passed + other)[None, :])).to(v.dtype)
            new -= dot(met, tl.load(written + other[:, None] * DIM + dim[None, :], is_dim, 0.0), tl.zeros_like(new))
            brought -= dot(
                met, tl.load(seen + other[:, None] * STATE + number[None, :], is_number, 0.0), tl.zeros_like(brought)
            )
        met = dot(learned, tl.trans(k.to(v.dtype)), tl.zeros([BLOCK, BLOCK], tl.float32))
        between = tl.exp(tl.where(local[:, None] > local[None, :], faded[:, None] - faded[None, :], float("-inf")))
        inverse = inverse_of(met * between).to(v.dtype)
        new = dot(inverse, new.to(v.dtype), tl.zeros_like(new)).to(v.dtype)
        brought = dot(inverse, brought.to(v.dtype), tl.zeros_like(brought)).to(v.dtype)
        tl.store(written + token[:, None] * DIM + dim[None, :], new, is_dim)
        tl.store(seen + token[:, None] * STATE + number[None, :], brought, is_number)
        tl.debug_barrier()  # the next block's threads read what all have written


@triton.jit(do_not_specialize=["stride_table", "first_row", "first_tile", "last_tile"])
def delta_states_kernel(
    convolved, states, passed, written, seen, left, before, query_start_loc, seq_lens, block_table, first_row, first_tile,
    last_tile, stride_block, stride_table,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, PADDED_STATE: tl.constexpr, SKIP_SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for COLUMNS of a head's state, and a row's chunks from tile `first_tile` up to before `last_tile`. left: what chunks
    leave of their keys, where `passed` has logarithms to base two, of each number those of blocks, and the chunk's behind them."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    head, row = tl.program_id(1), first_row + tl.program_id(2)
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - start
    if SKIP_SINGLE and query_len == 1:
        return
    own_tile = first_tile_of(row, start, query_start_loc, first_row, TILE)
    begin = tl.maximum(first_tile - own_tile, 0) * TILE
    end = tl.minimum((last_tile - own_tile) * TILE, query_len)
    if begin >= end:
        return
    has_state = (tl.load(seq_lens + row) > query_len) | (begin > 0)
    block = tl.load(block_table + row.to(tl.int64) * stride_table).to(tl.int64)
    dim, number, local = (
        tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PADDED_STATE), tl.arange(0, TILE)
    )  # fmt: skip
    is_dim, is_number = dim < DIM, number < STATE
    is_state = is_number[:, None] & is_dim[None, :]
    inside = number[:, None] * DIM + dim[None, :]
    at = states + block * stride_block + head * (STATE * DIM) + inside
    state = tl.load(at, is_state & has_state, 0.0)
    place = (own_tile + begin // TILE - first_tile).to(tl.int64) * HEADS + head
    width: tl.constexpr = 2 * GROUPS * STATE + HEADS * DIM
    k_at = convolved + (GROUPS + head // (HEADS // GROUPS)) * STATE + number[None, :]
    for first in range(begin, end, TILE):
        is_token = first + local < query_len
        rounded = state.to(before.dtype.element_ty)
        tl.store(before + place * (STATE * DIM) + inside, rounded, is_state)
        if left is None:
            faded = tl.load(passed + place * TILE + local, is_token, 0.0)
            whole = tl.min(faded, axis=0)
        is_read = is_token[:, None] & is_number[None, :]
        brought = tl.load(seen + place * (TILE * STATE) + local[:, None] * STATE + number[None, :], is_read, 0.0)
        new_at = written + place * (TILE * DIM) + local[:, None] * DIM + dim[None, :]
        is_new = is_token[:, None] & is_dim[None, :]
        new = tl.load(new_at, is_new, 0.0).to(tl.float32)
        new = (new - dot(brought, rounded, tl.zeros_like(new))).to(brought.dtype)
        tl.store(new_at, new, is_new)
        if left is None:
            k = tl.load(k_at + (start + first + local).to(tl.int64)[:, None] * width, is_read, 0.0).to(tl.float32)
            k = (unit(k, 1) * tl.exp(whole - faded)[:, None]).to(brought.dtype)
            state = dot(tl.trans(k), new, state * tl.exp(whole))
        else:
            k = tl.load(left + place * (TILE * STATE) + local[:, None] * STATE + number[None, :], is_read, 0.0)
            blocks: tl.constexpr = TILE // BLOCK
            faded = tl.load(passed + (place * (blocks + 1) + blocks) * STATE + number, is_number, 0.0)
            state = dot(tl.trans(k), new, state * tl.exp2(faded)[:, None])
        place += HEADS
    tl.store(at, state, is_state)


@triton.jit(do_not_specialize=["first_row", "num_reqs", "first_tile"])
def delta_outputs_kernel(
    convolved, passed, written, before, output, query_start_loc, scale, first_row, num_reqs, first_tile, stride_output,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, PADDED_STATE: tl.constexpr, TOGETHER: tl.constexpr, SKIP_SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for a chunk, tiles from `first_tile` on, and TOGETHER heads of one group."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    _, start, query_len, first = tile_of(first_tile + tl.program_id(0), query_start_loc, first_row, num_reqs, TILE)
    if first >= query_len:
        return
    if SKIP_SINGLE and query_len == 1:
        return
    first_head = tl.program_id(1) * TOGETHER
    local, number, dim = tl.arange(0, TILE), tl.arange(0, PADDED_STATE), tl.arange(0, COLUMNS)
    is_token, is_number = first + local < query_len, number < STATE
    token = (start + first + local).to(tl.int64)[:, None]
    is_read = is_token[:, None] & is_number[None, :]
    q_at = (
        convolved
        + token * (2 * GROUPS * STATE + HEADS * DIM)
        + first_head // (HEADS // GROUPS) * STATE
        + number[None, :]
    )
    q, k = tl.load(q_at, is_read, 0.0), tl.load(q_at + GROUPS * STATE, is_read, 0.0)
    q, k = (unit(q.to(tl.float32), 1) * scale).to(q.dtype), unit(k.to(tl.float32), 1).to(k.dtype)
    met = dot(q, tl.trans(k), tl.zeros([TILE, TILE], tl.float32))
    is_seen = (local[:, None] >= local[None, :]) & is_token[:, None]
    for one in range(TOGETHER):
        head = first_head + one
        place = tl.program_id(0).to(tl.int64) * HEADS + head
        faded = tl.load(passed + place * TILE + local, is_token, 0.0)
        between = tl.exp(tl.where(is_seen, faded[:, None] - faded[None, :], float("-inf")))
        weights = (met * between).to(q.dtype)
        for low in range(0, DIM, COLUMNS):
            is_dim = low + dim < DIM
            inside = number[:, None] * DIM + (low + dim)[None, :]
            state = tl.load(before + place * (STATE * DIM) + inside, is_number[:, None] & is_dim[None, :], 0.0)
            is_new = is_token[:, None] & is_dim[None, :]
            new = tl.load(written + place * (TILE * DIM) + local[:, None] * DIM + (low + dim)[None, :], is_new, 0.0)
            found = dot(q, state, tl.zeros([TILE, COLUMNS], tl.float32)) * tl.exp(faded)[:, None]
            found = dot(weights, new, found)
            to = output + token * stride_output + head * DIM + (low + dim)[None, :]
            tl.store(to, found.to(output.dtype.element_ty), is_new)


_launches = Launcher(delta_written_kernel), Launcher(delta_states_kernel), Launcher(delta_outputs_kernel)


class DeltaScan:
    """For rows from `first_row` on, token by token what `DeltaStep` says of one: `output` and the states behind the step. With
    `skip_single` rows of one token are left alone.

    Paper  Yang et al., Gated Delta Networks (arXiv:2412.06464), section 3.2; Yang et al. (arXiv:2406.06484).

    Tensors as `DeltaStep`'s. Products are those of convolved's dtype, summed in float32 without TF32: keys and queries of length 1, what
    tokens write, and the state before a chunk are rounded to it. The state itself, and the systems of BLOCK tokens, are float32.
    float16 is exact to 3e-3 of float64, bfloat16 to 2e-2, each of the largest output.
    """

    def __init__(self, layer: DeltaParams, *, pdl: bool) -> None:
        self._layer, self._scale, self._options = layer, layer.state_size**-0.5, launch_options(pdl)
        self._is_wide = layer.state_size > 128
        can_share = layer.num_heads // layer.num_groups % HEADS_TOGETHER == 0 and not self._is_wide
        self._together = HEADS_TOGETHER if can_share else 1
        dtype, dim, size = getattr(torch, layer.needs.dtype), layer.head_dim, layer.state_size
        self._tile_bytes = layer.num_heads * ((TILE * (dim + size) + dim * size) * dtype.itemsize + 4 * TILE)
        self._constants = {
            "HEADS": layer.num_heads, "GROUPS": layer.num_groups, "DIM": dim, "STATE": size, "TILE": TILE,
            "PADDED_STATE": padded_to_swizzle(size), "PDL": pdl,
        }  # fmt: skip
        self._columns = min(padded(dim), COLUMNS)
        self._key = (
            layer.states.stride(0), layer.states.device.index, dtype, alignment(layer.states, layer.dt_bias, layer.a_log)
        )  # fmt: skip
        self._variants: dict[bool, list[Variant]] = {}

    def _variants_for(self, skip_single: bool) -> list[Variant]:
        """More warps where 4 spill: in the second kernel on more than 128 x 32 numbers of a state, and in the third, which with keys of
        256 numbers spills over several heads, too."""
        if skip_single not in self._variants:
            dim, known = padded(self._layer.head_dim), {**self._constants, "SKIP_SINGLE": skip_single}
            is_wide = self._is_wide
            own: tuple[tuple[dict[str, int], int, int], ...] = (
                ({"PADDED_DIM": dim}, 4, 1), ({"COLUMNS": self._columns}, 8 if is_wide else 4, 1 if is_wide else 2),
                ({"COLUMNS": 64, "TOGETHER": self._together}, 8, 1),
            )  # fmt: skip
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
        passed = states.new_empty(some, heads, TILE)
        written, seen, before = (
            convolved.new_empty(some, heads, *shape) for shape in ((TILE, dim), (TILE, size), (size, dim))
        )
        write, pass_on, give = self._variants_for(skip_single)
        strides = marks.stride(0), output.stride(0)
        key = (
            convolved.dtype, marks.dtype, output.dtype, strides,
            alignment(convolved, marks, output, passed, written, seen, before, query_start_loc, seq_lens, block_table),
        )  # fmt: skip
        for first in range(0, num_tiles, some):
            last = min(first + some, num_tiles)
            write(
                key, (last - first, heads),
                (
                    convolved, marks, layer.dt_bias, layer.a_log, passed, written, seen, query_start_loc, layer.max_beta,
                    first_row, num_reqs, first, strides[0],
                ),
            )  # fmt: skip
            pass_on(
                key, (triton.cdiv(dim, self._columns), heads, num_rows),
                (
                    convolved, states, passed, written, seen, None, before, query_start_loc, seq_lens, block_table,
                    first_row, first, last, states.stride(0), block_table.stride(0),
                ),
            )  # fmt: skip
            give(
                key, (last - first, heads // self._together),
                (
                    convolved, passed, written, before, output, query_start_loc, self._scale, first_row, num_reqs, first,
                    strides[1],
                ),
            )  # fmt: skip
