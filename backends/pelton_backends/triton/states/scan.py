"""States of Mamba-2 over rows of several tokens, chunk by chunk.

Two kernels. The first goes through a row's chunks, and writes the state before each; a program has a part of one head's state, and
parts have nothing to do with each other. The second computes all chunks at once: within a chunk tokens meet each other as in
attention, and what came before it they find in the state. States between the two take SCRATCH_BYTES at most: steps with more chunks
are computed in parts of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from pelton_backends.triton.launch import Launcher, Variant, alignment
from pelton_backends.triton.runtime import dot, launch_options, let_next_start, wait_for_inputs
from pelton_backends.triton.states.rows import columns, first_tile_of, padded, padded_to_swizzle, softplus, tile_of
from pelton_backends.triton.states.step import places

if TYPE_CHECKING:
    from torch import Tensor

SCRATCH_BYTES = 64 << 20
"""What memory is left for, a KV group: `ATTENTION_BYTES` of the worker."""
MAX_PART = 64
"""Numbers of a head, and of a state, that a program of the first kernel has."""
HEADS_TOGETHER = 2
"""Heads of a program of the second kernel: they share the products of C and B."""


@triton.jit
def _steps(steps, stride_steps, token, is_token, head, dt_bias, a_log, low, high):
    """dt [tokens] of a chunk, 0 for what is none of its tokens, and dt A, the logarithms of what a token leaves of the state."""
    dt = 1.0
    if dt_bias is not None:
        raw = tl.load(steps + token.to(tl.int64) * stride_steps + head, is_token, 0.0).to(tl.float32)
        dt = tl.minimum(tl.maximum(softplus(raw + tl.load(dt_bias + head)), low), high)
    dt = tl.where(is_token, dt, 0.0)
    return dt, -dt * tl.exp(tl.load(a_log + head))


@triton.jit(do_not_specialize=["stride_table", "first_row", "first_tile", "last_tile"])
def chunk_states_kernel(
    convolved, steps, states, dt_bias, a_log, before, query_start_loc, seq_lens, block_table, low, high, first_row,
    first_tile, last_tile, stride_steps, stride_block, stride_table,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, X: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, LINE: tl.constexpr, ACTIVATE: tl.constexpr, TILE: tl.constexpr, DIMS: tl.constexpr, NUMBERS: tl.constexpr,
    SKIP_SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for a part [DIMS, NUMBERS] of a head's state, and a row's chunks from tile `first_tile` up to before `last_tile`."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    head, row = tl.program_id(1), first_row + tl.program_id(2)
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - start
    if SKIP_SINGLE and query_len == 1:
        return
    # Of the row: tokens that parts before this one have had, and those up to the end of this one.
    own_tile = first_tile_of(row, start, query_start_loc, first_row, TILE)
    begin = tl.maximum(first_tile - own_tile, 0) * TILE
    end = tl.minimum((last_tile - own_tile) * TILE, query_len)
    if begin >= end:
        return
    has_state = (tl.load(seq_lens + row) > query_len) | (begin > 0)
    block = tl.load(block_table + row.to(tl.int64) * stride_table).to(tl.int64)
    parts: tl.constexpr = (STATE + NUMBERS - 1) // NUMBERS
    dim = tl.program_id(0) // parts * DIMS + tl.arange(0, DIMS)
    number = tl.program_id(0) % parts * NUMBERS + tl.arange(0, NUMBERS)
    is_dim, is_number = dim < DIM, number < STATE
    is_state = is_dim[:, None] & is_number[None, :]
    inside = head * (DIM * STATE) + dim[:, None] * STATE + number[None, :]
    at = states + block * stride_block + inside
    state = tl.load(at, is_state & has_state, 0.0)
    to = before + (own_tile + begin // TILE - first_tile).to(tl.int64) * (HEADS * DIM * STATE) + inside
    local = tl.arange(0, TILE)
    x_at = convolved + X + head * DIM + dim[None, :]
    b_at = convolved + B + head // (HEADS // GROUPS) * STATE + number[None, :]
    for first in range(begin, end, TILE):
        tl.store(to, state.to(before.dtype.element_ty), is_state)
        to += HEADS * DIM * STATE
        is_token, token = first + local < query_len, start + first + local
        dt, fading = _steps(steps, stride_steps, token, is_token, head, dt_bias, a_log, low, high)
        whole = tl.sum(fading, axis=0)
        left = tl.exp(whole - tl.cumsum(fading, axis=0)) * dt  # of a token, behind the chunk
        line = token.to(tl.int64)[:, None] * LINE
        x = columns(x_at + line, is_token[:, None] & is_dim[None, :], ACTIVATE)
        b = columns(b_at + line, is_token[:, None] & is_number[None, :], ACTIVATE)
        given = (x.to(tl.float32) * left[:, None]).to(x.dtype)
        state = dot(tl.trans(given), b, state * tl.exp(whole))
    tl.store(at, state, is_state)


@triton.jit(do_not_specialize=["first_row", "num_reqs", "first_tile"])
def chunk_outputs_kernel(
    convolved, steps, dt_bias, a_log, d, before, output, query_start_loc, low, high, first_row, num_reqs, first_tile,
    stride_steps, stride_output,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, X: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, LINE: tl.constexpr, ACTIVATE: tl.constexpr, TILE: tl.constexpr, DIMS: tl.constexpr, NUMBERS: tl.constexpr,
    TOGETHER: tl.constexpr, SKIP_SINGLE: tl.constexpr, PDL: tl.constexpr,
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
    local, number, dim = tl.arange(0, TILE), tl.arange(0, NUMBERS), tl.arange(0, DIMS)
    is_token, token = first + local < query_len, start + first + local
    line = convolved + token.to(tl.int64)[:, None] * LINE
    b_at = line + B + first_head // (HEADS // GROUPS) * STATE + number[None, :]
    c_at = b_at + (C - B)
    met = tl.zeros([TILE, TILE], tl.float32)
    c = columns(c_at, is_token[:, None] & (number < STATE)[None, :], ACTIVATE)
    for part in range(0, STATE, NUMBERS):
        is_read = is_token[:, None] & (part + number < STATE)[None, :]
        if STATE > NUMBERS:
            c = columns(c_at + part, is_read, ACTIVATE)
        b = columns(b_at + part, is_read, ACTIVATE)
        met = dot(c, tl.trans(b), met)
    is_seen = local[:, None] >= local[None, :]
    for one in range(TOGETHER):
        head = first_head + one
        dt, fading = _steps(steps, stride_steps, token, is_token, head, dt_bias, a_log, low, high)
        passed = tl.cumsum(fading, axis=0)
        between = tl.exp(tl.where(is_seen, passed[:, None] - passed[None, :], float("-inf")))
        weights = (met * between * dt[None, :]).to(c.dtype)
        state = before + (tl.program_id(0).to(tl.int64) * HEADS + head) * (DIM * STATE)
        skip = 0.0 if d is None else tl.load(d + head)
        for low_dim in range(0, DIM, DIMS):
            own_dim = low_dim + dim
            is_dim = own_dim < DIM
            found = tl.zeros([TILE, DIMS], tl.float32)
            for part in range(0, STATE, NUMBERS):
                is_number = part + number < STATE
                if STATE > NUMBERS:
                    c = columns(c_at + part, is_token[:, None] & is_number[None, :], ACTIVATE)
                s_at = state + own_dim[None, :] * STATE + (part + number)[:, None]
                found = dot(c, tl.load(s_at, is_number[:, None] & is_dim[None, :], 0.0), found)
            is_number_of_x = is_token[:, None] & is_dim[None, :]
            x = columns(line + X + head * DIM + own_dim[None, :], is_number_of_x, ACTIVATE)
            found = dot(weights, x, found * tl.exp(passed)[:, None])
            if d is not None:
                found = found + skip * x.to(tl.float32)
            to = output + token.to(tl.int64)[:, None] * stride_output + head * DIM + own_dim[None, :]
            tl.store(to, found.to(output.dtype.element_ty), is_number_of_x)


_launch_states, _launch_outputs = Launcher(chunk_states_kernel), Launcher(chunk_outputs_kernel)


class Tiles(NamedTuple):
    """Tokens of a chunk; numbers of a head and of a state that the second kernel has at once, and its warps."""

    tokens: int
    dims: int
    numbers: int
    num_warps: int


def choose_tiles(dtype: torch.dtype, head_dim: int, state_size: int) -> Tiles:
    """As large as registers allow on compute capability 9.0: with 4 warps on more than 64 x 128 numbers, or in float32 on more than
    32 x 32, the second kernel spills."""
    if dtype == torch.float32:  # FMA, no tensor cores
        return Tiles(32, min(padded(head_dim), 32), min(padded(state_size), 32), 8)
    size = padded_to_swizzle(state_size)
    return Tiles(64, 64, *((size, 4) if size <= 128 else (64, 8)))


class StateScan:
    """For rows from `first_row` on, token by token what `StateStep` says of one: `output` and the states behind the step. With
    `skip_single` rows of one token are left alone.

    Paper  Dao and Gu, Transformers are SSMs (arXiv:2405.21060), section 6.

    Tensors as `StateStep`'s. Products of B, C, x and states are those of convolved's dtype, summed in float32 without TF32: what a token
    leaves, the weights within a chunk and the state before a chunk are rounded to it. The state itself stays float32 from chunk to
    chunk. float32 is exact to 2e-5 of float64, float16 to 3e-3, bfloat16 to 2e-2, each of the largest output.
    """

    def __init__(self, layer: Any, *, at: tuple[int, int, int] | None = None, pdl: bool) -> None:
        self._layer, self._options = layer, launch_options(pdl)
        self._together = HEADS_TOGETHER if layer.num_heads // layer.num_groups % HEADS_TOGETHER == 0 else 1
        dtype, size = getattr(torch, layer.needs.dtype), layer.state_size
        tiles = choose_tiles(dtype, layer.head_dim, size)
        dims, numbers = min(padded(layer.head_dim), MAX_PART), min(padded(size), MAX_PART)
        self._tile, self._parts = tiles.tokens, triton.cdiv(layer.head_dim, dims) * triton.cdiv(size, numbers)
        self._tile_bytes = layer.num_heads * layer.head_dim * size * dtype.itemsize
        own = layer.states, layer.dt_bias, layer.a_log, layer.d
        self._key = layer.states.stride(0), layer.states.device.index, dtype, alignment(*own)
        self._constants = {
            "HEADS": layer.num_heads, "GROUPS": layer.num_groups, "DIM": layer.head_dim, "STATE": size,
            **places(layer, at), "TILE": self._tile, "PDL": pdl,
        }  # fmt: skip
        self._sizes = {"DIMS": dims, "NUMBERS": numbers}, {"DIMS": tiles.dims, "NUMBERS": tiles.numbers}
        self._num_warps = tiles.num_warps
        self._variants: dict[tuple[int, bool], tuple[Variant, Variant]] = {}

    def _variants_for(self, line: int, skip_single: bool) -> tuple[Variant, Variant]:
        if (line, skip_single) not in self._variants:
            known, (of_states, of_outputs) = self._constants | {"LINE": line, "SKIP_SINGLE": skip_single}, self._sizes
            self._variants[line, skip_single] = (
                _launch_states.variant(self._key, known | of_states, num_warps=4, num_stages=3, **self._options),
                _launch_outputs.variant(
                    self._key, known | of_outputs | {"TOGETHER": self._together}, num_warps=self._num_warps, num_stages=1,
                    **self._options,
                ),
            )  # fmt: skip
        return self._variants[line, skip_single]

    def __call__(
        self,
        convolved: Tensor,
        steps: Tensor,
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
        launch_states, launch_outputs = self._variants_for(convolved.stride(0), skip_single)
        num_tiles = len(convolved) // self._tile + num_rows
        some = min(max(SCRATCH_BYTES // self._tile_bytes, 1), num_tiles)
        before = convolved.new_empty(some, layer.num_heads, layer.head_dim, layer.state_size)
        strides = steps.stride(0), output.stride(0)
        key = (
            convolved.dtype, steps.dtype, output.dtype, strides,
            alignment(convolved, steps, output, before, query_start_loc, seq_lens, block_table),
        )  # fmt: skip
        for first in range(0, num_tiles, some):
            last = min(first + some, num_tiles)
            launch_states(
                key, (self._parts, layer.num_heads, num_rows),
                (
                    convolved, steps, layer.states, layer.dt_bias, layer.a_log, before, query_start_loc, seq_lens,
                    block_table, *layer.dt_limit, first_row, first, last, strides[0], layer.states.stride(0),
                    block_table.stride(0),
                ),
            )  # fmt: skip
            launch_outputs(
                key, (last - first, layer.num_heads // self._together),
                (
                    convolved, steps, layer.dt_bias, layer.a_log, layer.d, before, output, query_start_loc,
                    *layer.dt_limit, first_row, num_reqs, first, *strides,
                ),
            )  # fmt: skip
