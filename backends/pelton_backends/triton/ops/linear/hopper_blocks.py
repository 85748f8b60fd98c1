"""Products of some rows and weights in e4m3 whose blocks have scales, on Hopper: tensor cores take the weights as they are.

Rows of x are sums of two numbers in e4m3, which lose next to nothing of them, each multiplied by the weights; or they are rounded to one
(`fp8.rounded`), for half of the products. The sums of a block's 128 columns are the device's own, and meet the block's scale in float32.
Weights are on their way before the rows exist, as in `hopper_split_k`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.hopper_split_k import (
    PANEL_BYTES,
    PROGRAMS,
    begin_ring,
    fetch,
    paired_panels_of,
    panels_of,
    rows_in_memory,
    store_split,
)
from pelton_backends.triton.ops.linear.large_batch import add_norm_row
from pelton_backends.triton.ops.moe.unsummed import UnsummedRows, sum_add_norm_split
from pelton_backends.triton.ops.pieces import Norm, empty_rows, kept_policy, store_split_row
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_COLUMNS, BLOCK_ROWS = 128, 64
"""Of a block with a scale; rows may be a multiple."""
ROWS, MOST_TOKENS = BLOCK_ROWS, 128  # of a tile
_PANEL = gl.constexpr(PANEL_BYTES)


# Rows as sums of two.


@triton.jit
def _split_row_kernel(
    x_ptr, out_ptr, inverse_ptr, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, KEPT: tl.constexpr
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * stride + columns, mask=columns < SIZE, other=0.0)
    store_split_row(x, out_ptr, inverse_ptr, row, SIZE, BLOCK, KEPT)


@triton.jit
def _add_norm_split_kernel(
    hidden_ptr, residual_ptr, sum_ptr, out_ptr, inverse_ptr, norm_ptr, post_norm_ptr, hidden_stride, residual_stride, sum_stride,
    eps, post_eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr, PDL: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """`large_batch.add_norm`, its rows as sums of two."""
    row = tl.program_id(0).to(tl.int64)
    x = add_norm_row(
        hidden_ptr, residual_ptr, sum_ptr, norm_ptr, post_norm_ptr, row, hidden_stride, residual_stride, sum_stride,
        eps, post_eps, SIZE, BLOCK, UNIT_OFFSET, POST_UNIT_OFFSET, PDL, KEPT,
    )  # fmt: skip
    store_split_row(x, out_ptr, inverse_ptr, row, SIZE, BLOCK, KEPT)


_launch_split_row = Launcher(_split_row_kernel)
_launch_add_norm_split = Launcher(_add_norm_split_kernel)


def split_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] bf16, strides (any, 1) -> rows [T, 2 K] float8_e4m3fn and inverse [T] float32, powers of two:
    x = inverse * (rows[:, :K] + rows[:, K:]), exactly down to 2^-16 of the row's largest number. A row that has an infinite number becomes
    NaN. One row a program."""
    num_rows, size = x.shape
    out = empty_rows(num_rows, 2 * size, x, torch.float8_e4m3fn)
    inverse = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        block, pdl, kept = triton.next_power_of_2(size), has_pdl(x.device), kept_policy(num_rows)
        _launch_split_row(
            (kept, x.dtype, x.device, size, x.stride(0) % 16, alignment(x)),
            (num_rows,), (x, out, inverse, x.stride(0)), {"SIZE": size, "BLOCK": block, "PDL": pdl, "KEPT": kept},
            num_warps=min(max(block // 256, 1), 16), **launch_options(pdl),
        )  # fmt: skip
    return out, inverse


def add_norm_split(
    hidden: Tensor | UnsummedRows, residual: Tensor | None, norm: Norm, post_norm: Norm | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`large_batch.add_norm` and `split_rows` in one pass: (the new residual, rows, inverse)."""
    if isinstance(hidden, UnsummedRows):
        assert residual is not None and post_norm is None
        return residual, *sum_add_norm_split(hidden, residual, norm)
    num_rows, size = hidden.shape
    out = empty_rows(num_rows, 2 * size, hidden, torch.float8_e4m3fn)
    inverse = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    total = hidden if residual is None else residual
    if num_rows == 0:
        return total, out, inverse
    is_stored = residual is not None or post_norm is not None
    block, pdl = triton.next_power_of_2(size), has_pdl(hidden.device)
    residual_stride = 0 if residual is None else residual.stride(0)
    constants = {
        "SIZE": size, "BLOCK": block, "UNIT_OFFSET": norm.unit_offset,
        "POST_UNIT_OFFSET": post_norm is not None and post_norm.unit_offset, "PDL": pdl, "KEPT": kept_policy(num_rows),
    }  # fmt: skip
    tensors = (hidden, residual, norm.weight, post_norm and post_norm.weight)
    _launch_add_norm_split(
        (
            hidden.dtype, hidden.device, *constants.values(), *(tensor is None for tensor in tensors), hidden.stride(0),
            residual_stride, alignment(*tensors),
        ),
        (num_rows,),
        (
            hidden, residual, total if is_stored else None, out, inverse, norm.weight, post_norm and post_norm.weight,
            hidden.stride(0), residual_stride, total.stride(0), norm.eps, post_norm.eps if post_norm else 0.0,
        ),
        constants, num_warps=min(max(block // 256, 1), 16), **launch_options(pdl),
    )  # fmt: skip
    return total, out, inverse


# The product.


@gluon.jit
def _scale_at(scales, is_first, panel, BLOCKS: gl.constexpr, OTHER: gl.constexpr):
    """Return a panel's scales of a tile's rows: of gate's, and in turns with them of up's, which lie OTHER rows behind."""
    return gl.where(is_first, gl.load(scales + panel), gl.load(scales + panel + OTHER * BLOCKS))


@gluon.jit(do_not_specialize=["num_tokens"])
def blocks_kernel(
    x, weight, weight_scale, inverse, bias, out, partials, counters, num_tokens,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr, M: gl.constexpr, R: gl.constexpr, PANELS: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """R rows of the weight by a SPLIT-th of K, for M rows of x, each number of which is the sum of TERMS: through a ring of STAGES buffers
    of PANELS times 128 columns."""
    BLOCKS: gl.constexpr = K // _PANEL
    STEPS: gl.constexpr = BLOCKS // (PANELS * SPLIT)
    IS_PAIRED: gl.constexpr = ACTIVATION is not None
    OTHER: gl.constexpr = N // 2 if IS_PAIRED else 0
    tile, part, token = gl.program_id(0), gl.program_id(1), gl.program_id(2) * M
    row = tile * (R // 2 if IS_PAIRED else R)
    first = part * STEPS * PANELS
    weights, rows, weight_barriers, row_barriers = begin_ring(x, weight, row, first, STAGES, PANELS, TERMS, IS_PAIRED)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, 32])
    is_first = gl.arange(0, R, gl.SliceLayout(1, layout)) % 2 == 0
    of_rows = weight_scale + gl.minimum(row, N - 1 - OTHER).to(gl.int64) * BLOCKS
    scale = _scale_at(of_rows, is_first, first, BLOCKS, OTHER)  # from memory, while nothing else can be done
    gdc_launch_dependents()
    gdc_wait()
    for i in gl.static_range(STAGES):
        for j in gl.static_range(TERMS):
            at = j * BLOCKS + first + i * PANELS
            fetch(x, token, at, row_barriers.index(i), rows.index(TERMS * i + j), False)
    tokens = token + gl.arange(0, M, gl.SliceLayout(0, layout))
    of_tokens = gl.load(inverse + gl.minimum(tokens, num_tokens - 1))

    total = gl.zeros((R, M), gl.float32, layout)
    for step in range(STEPS):
        stage, phase, panel = step % STAGES, (step // STAGES) & 1, first + step * PANELS
        scales = (scale,)
        for i in gl.static_range(1, PANELS):
            scales += (_scale_at(of_rows, is_first, panel + i, BLOCKS, OTHER),)
        scale = _scale_at(of_rows, is_first, gl.minimum(panel + PANELS, BLOCKS - 1), BLOCKS, OTHER)
        mbarrier.wait(weight_barriers.index(stage), phase)
        mbarrier.wait(row_barriers.index(stage), phase)
        left = weights.index(stage).reshape((PANELS * R, _PANEL))
        high = rows.index(TERMS * stage).reshape((PANELS * M, _PANEL))
        low = rows.index(TERMS * stage + TERMS - 1).reshape((PANELS * M, _PANEL))
        parts = ()
        for i in gl.static_range(PANELS):
            sums = warpgroup_mma_init(gl.zeros((R, M), gl.float32, layout))
            lines = left.slice(i * R, R)
            sums = warpgroup_mma(lines, high.slice(i * M, M).permute((1, 0)), sums, use_acc=False, is_async=True)
            if TERMS > 1:
                sums = warpgroup_mma(lines, low.slice(i * M, M).permute((1, 0)), sums, is_async=True)
            parts += (sums,)
        parts = warpgroup_mma_wait(0, deps=parts)
        if STEPS > STAGES:  # noqa: SIM102
            if step + STAGES < STEPS:
                gl.thread_barrier()  # every warp's products of that stage are done
                mbarrier.expect(weight_barriers.index(stage), weight.block_type.nbytes)
                mbarrier.expect(row_barriers.index(stage), TERMS * x.block_type.nbytes)
                at = panel + STAGES * PANELS
                fetch(weight, row, at, weight_barriers.index(stage), weights.index(stage), IS_PAIRED)
                for j in gl.static_range(TERMS):
                    fetch(
                        x, token, j * BLOCKS + at, row_barriers.index(stage), rows.index(TERMS * stage + j), False
                    )  # fmt: skip
        for i in gl.static_range(PANELS):
            total += (parts[i] if PANELS > 1 else parts) * scales[i][:, None]
    total = total * of_tokens[None, :]
    slot = tile * gl.num_programs(2) + gl.program_id(2)
    store_split(
        total, slot, part, partials, counters, None, None, bias, out, tile, token, num_tokens, N, ACTIVATION, M, R, SPLIT, layout
    )  # fmt: skip


_launch = Launcher(blocks_kernel)


class BlocksTiling(NamedTuple):
    """Tiles of `ROWS` of the weight by `tokens` of x, K in `split` parts, `stages` buffers of `panels` times 128 columns of both."""

    tokens: int
    split: int
    panels: int
    stages: int


@cache
def choose_blocks_tiling(num_tokens: int, out_features: int, in_features: int, terms: int = 2) -> BlocksTiling:
    """Choose as measured on an H200 with Llama-3.1-8B's matrices and sums of two (terms): see docs/performance/models.md."""
    tokens, tiles = min(max(triton.next_power_of_2(num_tokens), 16), MOST_TOKENS), triton.cdiv(out_features, ROWS)
    if tokens == MOST_TOKENS and tiles * triton.cdiv(num_tokens, tokens) < 128:
        tokens //= 2
    programs, split, blocks = tiles * triton.cdiv(num_tokens, tokens), 1, in_features // BLOCK_COLUMNS
    while blocks % (2 * split) == 0 and (
        (programs * split < 64 and blocks >= 8 * split)
        or (programs * split < 200 and blocks >= max(tokens, 32) * split)
    ):
        split *= 2
    memory = 105_000 if programs * split > PROGRAMS else 205_000  # two programs share a multiprocessor
    stage_bytes = (ROWS + terms * tokens) * PANEL_BYTES
    panels = 1
    for several, least in ((2, 2), (4, 3)):
        fits = memory >= least * several * stage_bytes and several * tokens <= 2 * MOST_TOKENS
        if blocks % (several * split) == 0 and fits:
            panels = several
    stages = max(min(memory // (stage_bytes * panels), blocks // (split * panels), 9), 1)
    return BlocksTiling(tokens, split, panels, stages)


class BlocksProduct:
    """x @ weight.T + bias, or activation(gate) * up of its halves, for weights whose blocks of 128 columns have scales.

    weight        [N, K] float8_e4m3fn, contiguous, K a multiple of 128; with an activation gate's rows, then up's
    weight_scale  [N, K / 128] float32, the same for each 64 rows (of gate, and of up)
    counters      [at least ceil(N / 64) ceil(T / 16)] int32, zeros; zeros again when the kernel is done
    """

    def __init__(
        self, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str | None, counters: Tensor
    ) -> None:
        self._weight, self._scale, self._bias, self._activation = weight, weight_scale, bias, activation
        self._counters, self._alignment = counters, alignment(bias, weight_scale)
        self._described: dict[int, TensorDescriptor] = {}

    def __call__(self, rows: Tensor, inverse: Tensor, dtype: torch.dtype, tiling: BlocksTiling | None = None) -> Tensor:
        """rows [T, 2 K] and inverse [T], as `split_rows` gives them, or [T, K] and [T] of `fp8.rounded` -> [T, N] or [T, N / 2] of dtype"""
        num_tokens, (out_features, in_features) = rows.shape[0], self._weight.shape
        terms = rows.shape[1] // in_features
        activation = self._activation
        tiling = tiling or choose_blocks_tiling(num_tokens, out_features, in_features, terms)
        num_columns = out_features // 2 if activation is not None else out_features
        num_tiles, num_blocks = triton.cdiv(out_features, ROWS), triton.cdiv(num_tokens, tiling.tokens)
        out = empty_rows(num_tokens, num_columns, rows, dtype)
        if num_tokens == 0:
            return out
        partials = None
        if tiling.split > 1:
            shape = (num_tiles, num_blocks, tiling.split, ROWS, tiling.tokens)
            partials = torch.empty(shape, dtype=torch.float32, device=rows.device)
        weight = self._described.get(tiling.panels)
        if weight is None:
            describe = panels_of if activation is None else paired_panels_of
            weight = self._described[tiling.panels] = describe(self._weight, out_features, ROWS, tiling.panels)
        rows_of_x = panels_of(rows, rows_in_memory(rows, num_blocks * tiling.tokens), tiling.tokens, tiling.panels)
        _launch(
            (dtype, rows.device, out_features, in_features, activation, self._bias is None, self._alignment, tiling, terms),
            (num_tiles, tiling.split, num_blocks),
            (rows_of_x, weight, self._scale, inverse, self._bias, out, partials, self._counters, num_tokens),
            {
                "N": out_features, "K": in_features, "ACTIVATION": activation, "M": tiling.tokens, "R": ROWS,
                "PANELS": tiling.panels, "SPLIT": tiling.split, "STAGES": tiling.stages, "TERMS": terms,
            },
            num_warps=4, **launch_options(has_pdl(rows.device)),
        )  # fmt: skip
        return out
