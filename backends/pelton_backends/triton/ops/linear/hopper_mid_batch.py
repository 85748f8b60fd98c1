"""Products of 65 rows and more on Hopper, while reading the weights is a good part of their cost: every weight is read once.

Numbers have two bytes, or are float8_e4m3fn with scales.

The work is cut so that each of about 128 programs, one a multiprocessor, has the same: a run of the weight's rows, which need
not be a power of two, by all rows of x, or where that makes too few programs a part of K. One warp copies, the warp groups
multiply, 64 rows of x each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.hopper_split_k import PANEL_BYTES, activated, panel_of, rows_in_memory
from pelton_backends.triton.ops.linear.mid_batch_tilings import GROUP, MidBatchTiling
from pelton_backends.triton.ops.pieces import empty_rows
from pelton_backends.triton.runtime import has_pdl, launch_options

if TYPE_CHECKING:
    from torch import Tensor

ALL_REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}
"""Of a thread that multiplies, where a program takes all that a multiprocessor has, by warp groups."""
_GROUP = gl.constexpr(GROUP)


@gluon.constexpr_function
def _piece(rows, place):
    """A product's width is a power of two: 224 rows are multiplied as 128, 64 and 32. The place-th of these, or 0."""
    bits = [1 << bit for bit in range(8, 3, -1) if rows >> bit & 1]
    return bits[place] if place < len(bits) else 0


@gluon.constexpr_function
def _columns(dtype):
    """Columns of a step: 128 bytes, the widest swizzle of shared memory."""
    return 1024 // dtype.primitive_bitwidth


@gluon.constexpr_function
def _next_power_of_2(rows):
    return 1 << (rows - 1).bit_length()


@gluon.jit
def _fetch_weights(
    weight,
    row,
    step,
    barrier,
    weights,
    stage,
    ROWS: gl.constexpr,
    SLOT: gl.constexpr,
    BOX: gl.constexpr,
    IS_PAIRED: gl.constexpr,
):
    column = step * _columns(weight.dtype)
    for i in gl.static_range(ROWS // BOX):
        place = weights.index(stage * (SLOT // BOX) + i)
        if IS_PAIRED:
            tma.async_copy_global_to_shared(weight, [(row + i * BOX) // 16, 0, 0, column], barrier, place)
        else:
            tma.async_copy_global_to_shared(weight, [row + i * BOX, column], barrier, place)


@gluon.jit
def _fetch_rows(x, token, step, barrier, rows, stage, GROUPS: gl.constexpr):
    column = step * _columns(x.dtype)
    for g in gl.static_range(GROUPS):
        place = rows.index(stage * GROUPS + g)
        tma.async_copy_global_to_shared(x, [token + g * _GROUP, column], barrier, place)


@gluon.jit
def _copy(
    x, weight, weights, rows, ready, free, row, first, token,
    STEPS: gl.constexpr, RUN: gl.constexpr, R: gl.constexpr, SLOT: gl.constexpr, BOX: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, IS_PAIRED: gl.constexpr,
):  # fmt: skip
    """The copying warp: a ring of STAGES buffers, weights ahead of the wait for the kernels before."""
    ROW_BYTES: gl.constexpr = GROUPS * x.block_type.nbytes
    BYTES: gl.constexpr = ROW_BYTES + R // BOX * weight.block_type.nbytes
    AHEAD: gl.constexpr = min(STAGES, STEPS)
    for i in gl.static_range(AHEAD):
        mbarrier.expect(ready.index(i), BYTES)
        _fetch_weights(weight, row, first + i, ready.index(i), weights, i, R, SLOT, BOX, IS_PAIRED)
    gdc_launch_dependents()
    gdc_wait()
    for i in gl.static_range(AHEAD):
        _fetch_rows(x, token, first + i, ready.index(i), rows, i, GROUPS)
    for i in range(AHEAD, STEPS):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), BYTES)
        _fetch_weights(weight, row, first + i, ready.index(stage), weights, stage, R, SLOT, BOX, IS_PAIRED)
        _fetch_rows(x, token, first + i, ready.index(stage), rows, stage, GROUPS)
    if RUN > R:
        REST_BYTES: gl.constexpr = ROW_BYTES + (RUN - R) // BOX * weight.block_type.nbytes
        for i in range(STEPS, 2 * STEPS):
            stage = i % STAGES
            mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), REST_BYTES)
            _fetch_weights(
                weight, row + R, first + i - STEPS, ready.index(stage), weights, stage, RUN - R, SLOT, BOX, IS_PAIRED
            )
            _fetch_rows(x, token, first + i - STEPS, ready.index(stage), rows, stage, GROUPS)


@gluon.jit
def _scales_of(
    weight_scale, row, N: gl.constexpr, ACTIVATION: gl.constexpr, R: gl.constexpr, COLUMNS: gl.constexpr
):  # fmt: skip
    """Scales of R columns of a result, in the order of the weight's rows in a buffer; read before the products (see `scales_of_rows`)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, COLUMNS // 4])
    column = gl.arange(0, R, gl.SliceLayout(0, layout))
    if ACTIVATION is None:
        return gl.load(weight_scale + gl.minimum(row + column, N - 1))
    else:
        HALF: gl.constexpr = N // 2
        place = gl.minimum(row // 2 + column // 16 * 8 + column % 8, HALF - 1)
        return gl.load(weight_scale + place + column // 8 % 2 * HALF)


@gluon.jit
def _store_result(
    total, weight_scale, x_scale, bias, out, row, token, num_tokens, N: gl.constexpr, ACTIVATION: gl.constexpr, R: gl.constexpr
):  # fmt: skip
    """Scales, bias, activation and the only rounding of the product, of [64, R] float32; out is [T, N] or [T, N / 2]. The scales: of the
    columns [R] and of the tokens [64], or None."""
    dtype: gl.constexpr = out.dtype.element_ty
    if weight_scale is not None:
        of_tokens = gl.convert_layout(x_scale, gl.SliceLayout(1, total.type.layout))
        total = total * weight_scale[None, :] * of_tokens[:, None]
    if ACTIVATION is None:
        layout: gl.constexpr = total.type.layout
        tokens = token + gl.arange(0, _GROUP, gl.SliceLayout(1, layout))
        columns = row + gl.arange(0, R, gl.SliceLayout(0, layout))
        if bias is not None:
            total += gl.load(bias + gl.minimum(columns, N - 1)).to(gl.float32)[None, :]
        is_inside = (tokens < num_tokens)[:, None] & (columns < N)[None, :]
        gl.store(
            out + tokens[:, None] * N + columns[None, :], total.to(dtype), mask=is_inside, eviction_policy="evict_last"
        )
    else:  # eight of gate, then the same eight of up: one thread has both
        HALF: gl.constexpr = N // 2
        gate, up = gl.split(gl.permute(gl.reshape(total, (_GROUP, R // 16, 2, 8)), (0, 1, 3, 2)))
        gate = gl.reshape(gate, (_GROUP, R // 2))
        up = gl.reshape(up, (_GROUP, R // 2))
        half: gl.constexpr = gate.type.layout
        tokens = token + gl.arange(0, _GROUP, gl.SliceLayout(1, half))
        columns = row // 2 + gl.arange(0, R // 2, gl.SliceLayout(0, half))
        if bias is not None:
            gate += gl.load(bias + gl.minimum(columns, HALF - 1)).to(gl.float32)[None, :]
            up += gl.load(bias + HALF + gl.minimum(columns, HALF - 1)).to(gl.float32)[None, :]
        result = activated(gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32), ACTIVATION, dtype)
        is_inside = (tokens < num_tokens)[:, None] & (columns < HALF)[None, :]
        gl.store(out + tokens[:, None] * HALF + columns[None, :], result, mask=is_inside, eviction_policy="evict_last")


@gluon.jit
def _zeros(R: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, COLUMNS // 4])
    return warpgroup_mma_init(gl.zeros((_GROUP, R), gl.float32, layout))


@gluon.jit
def _product(left, weights, stage, total, R: gl.constexpr, FROM: gl.constexpr, SLOT: gl.constexpr):
    """total + left by R of a buffer's rows of the weight, beginning with row FROM."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, weights.dtype.primitive_bitwidth, 2)
    STAGES: gl.constexpr = weights.shape[0] * weights.type.shape[1] // SLOT
    tiles = weights._reinterpret(weights.dtype, [STAGES * (SLOT // R), R, _columns(weights.dtype)], layout)
    right = tiles.index(stage * (SLOT // R) + FROM // R).permute((1, 0))
    return warpgroup_mma(left, right, total, is_async=True)


@gluon.jit
def _store_part(total, part, R: gl.constexpr, RUN: gl.constexpr):
    layout: gl.constexpr = total.type.layout
    tokens = gl.arange(0, _GROUP, gl.SliceLayout(1, layout))
    columns = gl.arange(0, R, gl.SliceLayout(0, layout))
    gl.store(part + tokens[:, None] * RUN + columns[None, :], total, eviction_policy="evict_last")


@gluon.jit
def _add_parts(
    partials, counter, weight_scale, x_scale, bias, out, slot, part, row, token, num_tokens,
    N: gl.constexpr, RUN: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Each of the SPLIT programs that have a part of K adds all parts of its share of the 64 rows of x, in their order."""
    TOKENS: gl.constexpr = _GROUP // SPLIT
    WIDTH: gl.constexpr = _next_power_of_2(RUN)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    gl.thread_barrier()  # all threads' stores come before the one thread's increment, which releases them
    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < SPLIT:
        arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    gl.thread_barrier()
    place = part * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    is_run = (columns < RUN)[None, :] & (place >= 0)[:, None]
    cells = partials + slot * SPLIT * (_GROUP * RUN) + place[:, None] * RUN + columns[None, :]
    total = gl.load(cells, mask=is_run, cache_modifier=".cg")
    for i in gl.static_range(1, SPLIT):
        total += gl.load(cells + i * (_GROUP * RUN), mask=is_run, cache_modifier=".cg")
    if weight_scale is not None:
        scale = gl.load(x_scale + gl.minimum(token + place, num_tokens - 1))
        total = total * gl.load(weight_scale + gl.minimum(row + columns, N - 1))[None, :] * scale[:, None]
    if bias is not None:
        total += gl.load(bias + gl.minimum(row + columns, N - 1)).to(gl.float32)[None, :]
    is_inside = is_run & (token + place < num_tokens)[:, None] & (row + columns < N)[None, :]
    at = out + (token + place)[:, None] * N + (row + columns)[None, :]
    gl.store(at, total.to(out.dtype.element_ty), mask=is_inside, eviction_policy="evict_last")
    if gl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == 2 * SPLIT - 1:  # all have seen that all are there
        gl.store(counter, 0)


@gluon.jit
def _pass(
    G: gl.constexpr, done, weight_scale, x_scale, bias, out, partials, counters, weights, rows, ready, free, row, slot, part, token,
    num_tokens,
    N: gl.constexpr, ACTIVATION: gl.constexpr, STEPS: gl.constexpr, R: gl.constexpr, SLOT: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """R rows of the weight, as up to three products a step; `done` steps came before."""
    A: gl.constexpr = _piece(R, 0)
    B: gl.constexpr = _piece(R, 1)
    C: gl.constexpr = _piece(R, 2)
    gl.static_assert(A + B + C == R, "a run of rows is of at most three powers of two")
    COLUMNS: gl.constexpr = _columns(weights.dtype)
    a = _zeros(A, COLUMNS)
    b = _zeros(B if B > 0 else 16, COLUMNS)
    c = _zeros(C if C > 0 else 16, COLUMNS)
    a_scale, b_scale, c_scale = weight_scale, weight_scale, weight_scale
    if weight_scale is not None:  # noqa: SIM102
        if SPLIT == 1:
            a_scale = _scales_of(weight_scale, row, N, ACTIVATION, A, COLUMNS)
            b_scale = _scales_of(weight_scale, row + A, N, ACTIVATION, B if B > 0 else 16, COLUMNS)
            c_scale = _scales_of(weight_scale, row + A + B, N, ACTIVATION, C if C > 0 else 16, COLUMNS)
    gdc_wait()
    if x_scale is not None:  # noqa: SIM102
        if SPLIT == 1:
            layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, COLUMNS // 4])
            tokens = token + gl.arange(0, _GROUP, gl.SliceLayout(1, layout))
            x_scale = gl.load(x_scale + gl.minimum(tokens, num_tokens - 1))
    for i in range(done, done + STEPS):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        left = rows.index(stage * GROUPS + G)
        a = _product(left, weights, stage, a, A, 0, SLOT)
        if B > 0:
            b = _product(left, weights, stage, b, B, A, SLOT)
        if C > 0:
            c = _product(left, weights, stage, c, C, A + B, SLOT)
        if C > 0:
            a, b, c = warpgroup_mma_wait(3, deps=(a, b, c))
            b, c = warpgroup_mma_init(b), warpgroup_mma_init(c)
        elif B > 0:
            a, b = warpgroup_mma_wait(2, deps=(a, b))
            b = warpgroup_mma_init(b)
        else:
            a = warpgroup_mma_wait(1, deps=(a,))
        a = warpgroup_mma_init(a)
        gl.thread_barrier()  # all four warps' products of the step before are done
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=i > done)
    a, b, c = warpgroup_mma_wait(0, deps=(a, b, c))
    gl.thread_barrier()
    mbarrier.arrive(free.index((done + STEPS - 1) % STAGES), count=1)
    if SPLIT > 1:
        mine = partials + (slot * SPLIT + part) * (_GROUP * R)
        _store_part(a, mine, A, R)
        if B > 0:
            _store_part(b, mine + A, B, R)
        if C > 0:
            _store_part(c, mine + A + B, C, R)
        _add_parts(
            partials, counters + slot, weight_scale, x_scale, bias, out, slot, part, row, token, num_tokens, N, R, SPLIT
        )
    else:
        _store_result(a, a_scale, x_scale, bias, out, row, token, num_tokens, N, ACTIVATION, A)
        if B > 0:
            _store_result(b, b_scale, x_scale, bias, out, row + A, token, num_tokens, N, ACTIVATION, B)
        if C > 0:
            _store_result(c, c_scale, x_scale, bias, out, row + A + B, token, num_tokens, N, ACTIVATION, C)


@gluon.jit
def _multiply(
    G: gl.constexpr, weight_scale, x_scale, bias, out, partials, counters, weights, rows, ready, free, row, slot, part, token,
    num_tokens,
    N: gl.constexpr, ACTIVATION: gl.constexpr, STEPS: gl.constexpr, RUN: gl.constexpr, R: gl.constexpr, SLOT: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A warp group: its 64 rows of x by the program's rows of the weight, R and then the rest of RUN."""
    _pass(
        G, 0, weight_scale, x_scale, bias, out, partials, counters, weights, rows, ready, free, row, slot * GROUPS + G, part,
        token + G * _GROUP, num_tokens, N, ACTIVATION, STEPS, R, SLOT, GROUPS, STAGES, SPLIT,
    )  # fmt: skip
    if RUN > R:
        gl.static_assert(SPLIT == 1, "rows that are left over, or parts of K, not both")
        _pass(
            G, STEPS, weight_scale, x_scale, bias, out, partials, counters, weights, rows, ready, free, row + R, slot, part,
            token + G * _GROUP, num_tokens, N, ACTIVATION, STEPS, RUN - R, SLOT, GROUPS, STAGES, SPLIT,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens"])
def mid_batch_kernel(
    x, weight, weight_scale, x_scale, bias, out, partials, counters, num_tokens,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr, RUN: gl.constexpr, R: gl.constexpr, BOX: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, REGISTERS: gl.constexpr, COPYING: gl.constexpr,
):  # fmt: skip
    """RUN rows of the weight by 64 GROUPS rows of x over a SPLIT-th of K.

    Programs that add their parts together wait for each other. They follow one another in the order in which programs start,
    so at most SPLIT - 1 of a launch ever wait for some that have not started."""
    PANEL: gl.constexpr = _columns(weight.dtype)
    STEPS: gl.constexpr = K // (PANEL * SPLIT)
    SLOT: gl.constexpr = _next_power_of_2(R)  # rows of the weight in a buffer
    IS_PAIRED: gl.constexpr = ACTIVATION is not None
    gl.static_assert(not IS_PAIRED or SPLIT == 1, "parts of K are added without an activation")
    part, block, run = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    row, first, token = run * RUN, part * STEPS, block * (GROUPS * _GROUP)
    slot = run * gl.num_programs(1) + block
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * (SLOT // BOX)] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    rows = gl.allocate_shared_memory(x.dtype, [STAGES * GROUPS] + x.block_type.shape, x.layout)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    fence_async_shared()
    flat_layout: gl.constexpr = gl.NVMMASharedLayout(128, weight.dtype.primitive_bitwidth, 2)
    flat = weights._reinterpret(weights.dtype, [STAGES * SLOT // BOX, BOX, PANEL], flat_layout)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    gl.constexpr(0), weight_scale, x_scale, bias, out, partials, counters, flat, rows, ready, free, row, slot, part,
                    token, num_tokens, N, ACTIVATION, STEPS, RUN, R, SLOT, GROUPS, STAGES, SPLIT,
                )),
                (_copy, (x, weight, weights, rows, ready, free, row, first, token, STEPS, RUN, R, SLOT, BOX, GROUPS, STAGES, IS_PAIRED)),
            ],
            [1],
            [COPYING],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    gl.constexpr(0), weight_scale, x_scale, bias, out, partials, counters, flat, rows, ready, free, row, slot, part,
                    token, num_tokens, N, ACTIVATION, STEPS, RUN, R, SLOT, GROUPS, STAGES, SPLIT,
                )),
                (_multiply, (
                    gl.constexpr(1), weight_scale, x_scale, bias, out, partials, counters, flat, rows, ready, free, row, slot, part,
                    token, num_tokens, N, ACTIVATION, STEPS, RUN, R, SLOT, GROUPS, STAGES, SPLIT,
                )),
                (_copy, (x, weight, weights, rows, ready, free, row, first, token, STEPS, RUN, R, SLOT, BOX, GROUPS, STAGES, IS_PAIRED)),
            ],
            [4, 1],
            [REGISTERS, COPYING],
        )  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply, (
                    gl.constexpr(0), weight_scale, x_scale, bias, out, partials, counters, flat, rows, ready, free, row, slot, part,
                    token, num_tokens, N, ACTIVATION, STEPS, RUN, R, SLOT, GROUPS, STAGES, SPLIT,
                )),
                (_multiply, (
                    gl.constexpr(1), weight_scale, x_scale, bias, out, partials, counters, flat, rows, ready, free, row, slot, part,
                    token, num_tokens, N, ACTIVATION, STEPS, RUN, R, SLOT, GROUPS, STAGES, SPLIT,
                )),
                (_multiply, (
                    gl.constexpr(2), weight_scale, x_scale, bias, out, partials, counters, flat, rows, ready, free, row, slot, part,
                    token, num_tokens, N, ACTIVATION, STEPS, RUN, R, SLOT, GROUPS, STAGES, SPLIT,
                )),
                (_copy, (x, weight, weights, rows, ready, free, row, first, token, STEPS, RUN, R, SLOT, BOX, GROUPS, STAGES, IS_PAIRED)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, COPYING],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 4, "one to four warp groups")
        gl.warp_specialize(
            [
                (_multiply, (
                    gl.constexpr(0), weight_scale, x_scale, bias, out, partials, counters, flat, rows, ready, free, row, slot, part,
                    token, num_tokens, N, ACTIVATION, STEPS, RUN, R, SLOT, GROUPS, STAGES, SPLIT,
                )),
                (_multiply, (
                    gl.constexpr(1), weight_scale, x_scale, bias, out, partials, counters, flat, rows, ready, free, row, slot, part,
                    token, num_tokens, N, ACTIVATION, STEPS, RUN, R, SLOT, GROUPS, STAGES, SPLIT,
                )),
                (_multiply, (
                    gl.constexpr(2), weight_scale, x_scale, bias, out, partials, counters, flat, rows, ready, free, row, slot, part,
                    token, num_tokens, N, ACTIVATION, STEPS, RUN, R, SLOT, GROUPS, STAGES, SPLIT,
                )),
                (_multiply, (
                    gl.constexpr(3), weight_scale, x_scale, bias, out, partials, counters, flat, rows, ready, free, row, slot, part,
                    token, num_tokens, N, ACTIVATION, STEPS, RUN, R, SLOT, GROUPS, STAGES, SPLIT,
                )),
                (_copy, (x, weight, weights, rows, ready, free, row, first, token, STEPS, RUN, R, SLOT, BOX, GROUPS, STAGES, IS_PAIRED)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, COPYING],
        )  # fmt: skip


_launch = Launcher(mid_batch_kernel)


def rows_of(matrix: Tensor, num_rows: int, rows: int) -> TensorDescriptor:
    shape, strides = [num_rows, matrix.shape[1]], [matrix.stride(0), 1]
    layout = gl.NVMMASharedLayout(PANEL_BYTES, 8 * matrix.element_size(), 2)
    return TensorDescriptor(matrix, shape, strides, [rows, panel_of(matrix)], layout)


def paired_rows_of(matrix: Tensor, num_rows: int, rows: int) -> TensorDescriptor:
    """The same for gate and up, [2 I, K]: eight rows of gate, the same eight of up, and so on."""
    half, num_columns = num_rows // 2, matrix.shape[1]
    shape, strides = [half // 8, 2, 8, num_columns], [8 * num_columns, half * num_columns, num_columns, 1]
    layout = gl.NVMMASharedLayout(PANEL_BYTES, 8 * matrix.element_size(), 4)
    return TensorDescriptor(matrix, shape, strides, [rows // 16, 2, 8, panel_of(matrix)], layout)


class MidBatchProduct:
    """`split_k.multiply` with one weight; its contract and roundings, for any number of rows and K a multiple of 64 (of 128 in 8 bits).

    On an H200, bf16, in a captured chain over distinct weights of one product, us (cuBLAS with the activation's kernel):
      Qwen3-0.6B    gate and up, 160 rows 8.4 (9.9), 256 rows 8.6 (10.4)
      Llama-3.1-8B  gate and up, 192 rows 80.3 (89.2), 256 rows 105.6 (111.9); down, 192 rows 44.2 (46.6)
    The power limit holds from 128 rows of the 8B on: alone for 0.5 s, gate and up take 85 us (90) at 192 rows and 109 (111) at
    256, at a clock of 1.4 to 1.5 GHz.

    counters  [at least ceil(N / 64) ceil(T / 64)] int32, zeros; zeros again when the kernel is done
    Rows of x begin at multiples of 16 bytes (`HopperProduct.takes`); with an activation N is a multiple of 16.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        counters: Tensor,
        weight_scale: Tensor | None = None,
    ) -> None:
        self._weight, self._bias, self._activation, self._counters = weight, bias, activation, counters
        self._weight_scale, self._alignment = weight_scale, alignment(bias, weight_scale)
        self._described: dict[int, TensorDescriptor] = {}

    def __call__(
        self,
        x: Tensor,
        tiling: MidBatchTiling,
        *,
        x_scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x_scale: [T] float32, where the weight has scales too; dtype: of the result, if not that of x."""
        num_tokens, (out_features, in_features) = x.shape[0], self._weight.shape
        activation = self._activation
        run, rows, groups, split, stages, registers = tiling
        multiplying, copying = ALL_REGISTERS[groups], 24
        if registers:
            copying = 40
            multiplying = (registers * (groups + 1) - copying) // groups // 8 * 8
        box = run & -run if run == rows else min(rows & -rows, (run - rows) & -(run - rows))
        num_columns = out_features // 2 if activation is not None else out_features
        num_runs, num_blocks = triton.cdiv(out_features, run), triton.cdiv(num_tokens, groups * GROUP)
        out = empty_rows(num_tokens, num_columns, x, dtype)
        partials = None
        if split > 1:
            shape = (num_runs, num_blocks, groups, split, GROUP, run)
            partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        weight = self._described.get(box)
        if weight is None:
            describe = rows_of if activation is None else paired_rows_of
            weight = self._described[box] = describe(self._weight, out_features, box)
        rows_of_x = rows_of(x, rows_in_memory(x, num_blocks * groups * GROUP), GROUP)
        _launch(
            (
                x.dtype, out.dtype, x.device, out_features, in_features, activation, self._bias is None, self._alignment,
                tiling,
            ),
            (split, num_blocks, num_runs),
            (
                rows_of_x, weight, self._weight_scale, x_scale, self._bias, out, partials, self._counters, num_tokens,
            ),
            {
                "N": out_features, "K": in_features, "ACTIVATION": activation, "RUN": run, "R": rows, "BOX": box,
                "GROUPS": groups, "STAGES": stages, "SPLIT": split, "REGISTERS": multiplying,
                "COPYING": copying,
            },
            num_warps=4, maxnreg=registers or None, **launch_options(has_pdl(x.device)),
        )  # fmt: skip
        return out
