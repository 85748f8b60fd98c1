"""A product of a few rows (up to 256) with a plain weight matrix on tensor cores, the weights streamed once.

Between a matrix-vector kernel and a library's matrix product: bound by reading the weights, yet with too many rows to
multiply without tensor cores. See `multiply` for the contract and `choose_tiling` for the sizes.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from pelton.platform.compiling import launch
from pelton_backends.triton.ops.pieces import activated
from pelton_backends.triton.runtime import (
    H200_MEMORY,
    dot,
    has_pdl,
    launch_options,
    let_next_start,
    shared_memory,
    wait_for_inputs,
)

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def tile_rows(tile, N: tl.constexpr, ACTIVATION: tl.constexpr, R: tl.constexpr):
    """Rows of the weight that a tile has; with an activation R / 2 rows of the gate, then their rows of up. Past the last
    row, the last row again."""
    lane = tl.arange(0, R)
    if ACTIVATION is None:
        return tl.minimum(tile * R + lane, N - 1)
    HALF: tl.constexpr = R // 2
    return tl.minimum(tile * HALF + lane % HALF, N // 2 - 1) + (lane // HALF) * (N // 2)


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_kernel(
    x, weight, bias, out, partials, counters, num_tokens, stride, weight_scale, x_scale,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """R rows of the weight by a SPLIT-th of K, for all rows of x."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    slot = (tile * tl.num_programs(2) + tl.program_id(2)) * SPLIT  # of the first part
    NUM_STEPS: tl.constexpr = (K + C * SPLIT - 1) // (C * SPLIT)  # of C columns, in each part
    IS_EVEN: tl.constexpr = K % (C * SPLIT) == 0
    rows = tile_rows(tile, N, ACTIVATION, R)
    first = part * NUM_STEPS * C
    weight_rows = weight + rows.to(tl.int64) * K + first
    let_next_start(PDL)
    wait_for_inputs(PDL)
    columns = tl.arange(0, C)
    tokens = tl.program_id(2) * M + tl.arange(0, M)
    weight_tile = weight_rows[:, None] + columns[None, :]
    x_tile = x + first + tl.minimum(tokens, num_tokens - 1)[None, :] * stride + columns[:, None]
    total = tl.zeros((R, M), dtype=tl.float32)
    for step in tl.range(0, NUM_STEPS, num_stages=STAGES):
        if IS_EVEN:
            w = tl.load(weight_tile + step * C, eviction_policy="evict_first")
            y = tl.load(x_tile + step * C)
        else:
            left = K - first - step * C
            w = tl.load(weight_tile + step * C, mask=columns[None, :] < left, other=0.0)
            y = tl.load(x_tile + step * C, mask=columns[:, None] < left, other=0.0)
        total = dot(w, y, total)

    if SPLIT > 1:
        cells = tl.arange(0, R)[:, None] * M + tl.arange(0, M)[None, :]
        tl.store(partials + (slot + part) * (R * M) + cells, total)
        tl.debug_barrier()  # all threads' stores come before the one thread's increment, which releases them
        if tl.atomic_add(counters + slot // SPLIT, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(counters + slot // SPLIT, 0)
            # In the order of the parts, whichever came last: the same bits each time.
            total = tl.load(partials + slot * (R * M) + cells, cache_modifier=".cg")
            for i in tl.static_range(1, SPLIT):
                total += tl.load(partials + (slot + i) * (R * M) + cells, cache_modifier=".cg")
            store_result(total, weight_scale, x_scale, bias, out, rows, tile, tokens, num_tokens, N, ACTIVATION, M, R)
    else:
        store_result(total, weight_scale, x_scale, bias, out, rows, tile, tokens, num_tokens, N, ACTIVATION, M, R)


@triton.jit
def store_result(
    total, weight_scale, x_scale, bias, out, rows, tile, tokens, num_tokens,
    N: tl.constexpr, ACTIVATION: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Scales, bias, activation and the only rounding of the product, of [R, M] float32; out is [T, N] or [T, N / 2]."""
    dtype = out.dtype.element_ty
    if weight_scale is not None:
        scale = tl.load(x_scale + tl.minimum(tokens, num_tokens - 1))
        total = total * tl.load(weight_scale + rows)[:, None] * scale[None, :]
    if bias is not None:
        total += tl.load(bias + rows).to(tl.float32)[:, None]
    is_token = tokens[:, None] < num_tokens
    if ACTIVATION is None:
        columns = tile * R + tl.arange(0, R)
        result = tl.trans(total.to(dtype))
        tl.store(out + tokens[:, None] * N + columns[None, :], result, mask=is_token & (columns < N)[None, :])
    else:
        columns = tile * (R // 2) + tl.arange(0, R // 2)
        pairs = tl.permute(tl.reshape(total.to(dtype), (2, R // 2, M)), (2, 1, 0))
        gate, up = tl.split(pairs)
        result = activated(gate.to(tl.float32), up.to(tl.float32), ACTIVATION, dtype)
        is_inside = is_token & (columns < N // 2)[None, :]
        tl.store(out + tokens[:, None] * (N // 2) + columns[None, :], result, mask=is_inside)


SMALLEST_TILE = 32  # rows


class Tiling(NamedTuple):
    """How `multiply` cuts its work: tiles of `rows` of the weight by `tokens` of x, K in `split` parts and steps of
    `columns`."""

    rows: int
    columns: int
    split: int
    stages: int
    num_warps: int
    tokens: int = 256  # at most


@cache
def choose_tiling(
    num_tokens: int, out_features: int, in_features: int, memory: int = H200_MEMORY, element_size: int = 2
) -> Tiling:
    """Choose as measured on an H200 (132 multiprocessors with 227 KB of shared memory each); for others only made to fit.

    Best are about 64 programs with all of a multiprocessor's memory as buffers: enough bytes are on their way, and each
    further part of K costs a round trip through L2. Rows of x are shared out first where weights are few.
    """
    rows, tokens = 64, min(max(triton.next_power_of_2(num_tokens), 16), 128)
    if tokens == 128 and out_features > 264 * rows:
        rows = 128
    tiles = triton.cdiv(out_features, rows)
    while tokens > 32 and tiles * triton.cdiv(num_tokens, tokens) < 64:
        tokens //= 2
    programs, split = tiles * triton.cdiv(num_tokens, tokens), 1
    wanted = 96 if in_features >= (8192 if tokens < 64 else 4096) else 64
    while programs * split < wanted and in_features >= 512 * split:
        split *= 2
    columns = (64 if tokens == 128 else 128) * 2 // element_size
    memory = memory * (88 if programs * split <= 132 else 48) // 100
    steps = triton.cdiv(in_features, columns * split)
    stages = max(min(8, memory // ((rows + tokens) * columns * element_size), steps + 1), 2)
    return Tiling(rows, columns, split, stages, 4, tokens)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    counters: Tensor,
    tiling: Tiling | None = None,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T + bias, and, with an activation, activation(gate) * up of its halves.

    T = num_tokens (1 to 256), K = in_features, N = out_features, all of any size
      x         [T, K]  fp16 or bf16; strides (any, 1)
      weight    [N, K]  dtype of x, contiguous; with an activation gate's rows, then up's
      bias      [N]     or None
      counters  [at least ceil(N / 32) ceil(T / 32)] int32, zeros; zeros again when the kernel is done
      scales    of 8-bit x and weight: [N] of weight's rows, [T] of x's, float32
    -> [T, N] or [T, N / 2], contiguous, of `dtype` or x's

    A program multiplies `Tiling.rows` rows of the weight with all rows of x over one part of K. The weight is the left
    operand of the dot, so that 64 of its rows fill Hopper's wgmma whatever T is. The parts of K are added by the program that
    comes last, in the order of the parts: results do not depend on timing.
    Sums in float32, rounded once; gate and up are rounded before the activation, the activation before its product with
    up. (To bring weights into L2 ahead of the inputs gained nothing, nor to let the next kernel start after the loop.)
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    is_gated = activation is not None
    tiling = tiling or choose_tiling(num_tokens, out_features, in_features, shared_memory(x.device), x.element_size())
    num_columns = out_features // 2 if is_gated else out_features
    num_tiles = triton.cdiv(out_features, tiling.rows)
    if is_gated:
        num_tiles = triton.cdiv(num_columns, tiling.rows // 2)
    out = torch.empty((num_tokens, num_columns), dtype=dtype or x.dtype, device=x.device)
    weight_scale, x_scale = scales or (None, None)
    block = min(max(triton.next_power_of_2(num_tokens), 16), tiling.tokens)
    num_blocks = triton.cdiv(num_tokens, block)
    partials = None
    if tiling.split > 1:
        shape = (num_tiles, num_blocks, tiling.split, tiling.rows, block)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    pdl = has_pdl(x.device)
    launch(
        multiply_kernel, (num_tiles, tiling.split, num_blocks),
        x, weight, bias, out, partials, counters, num_tokens, x.stride(0), weight_scale, x_scale,
        N=out_features, K=in_features, ACTIVATION=activation,
        M=block, R=tiling.rows, C=tiling.columns, SPLIT=tiling.split, STAGES=tiling.stages,
        PDL=pdl, num_warps=tiling.num_warps, **launch_options(pdl),
    )  # fmt: skip
    return out
