"""One row times a large matrix in float8_e4m3fn, for Hopper, in Gluon: norm, rounding and product are one kernel.

As `hopper_split_k.multiply_kernel`, whose ring of weights it has, but every program makes the row itself: it adds, norms and
rounds it into shared memory, where a kernel of its own would cost a launch and a way through L2. All eight columns of the tensor
cores' tile hold the row. (To have the columns behind the buffers brought into L2 before the wait made the 8B's step slower: gate and
up with 1,280 bytes a row by 46 us, with 2,560 by 170, down by 28, on an H200.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.handed_parts import hand_over, take
from pelton_backends.triton.ops.linear.hopper_split_k import (
    can_multiply,
    fetch,
    paired_panels_of,
    panels_of,
    scales_of_rows,
    store_result,
)
from pelton_backends.triton.runtime import has_pdl, launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from pelton_backends.triton.ops.pieces import Norm

PIECE = 1024  # numbers of the row, eight in each of a program's threads
LEAST_STAGES = 4
PIECE_SIZE: gl.constexpr = gl.constexpr(PIECE)
_PANELS: gl.constexpr = gl.constexpr(PIECE // 128)
_COLUMNS: gl.constexpr = gl.constexpr(8)


@gluon.jit
def normed(x, mean_square, eps, weight, UNIT_OFFSET: gl.constexpr, dtype: gl.constexpr):
    """As `pieces.normed`."""
    x = x * (1.0 / gl.sqrt_rn(mean_square + eps))
    if UNIT_OFFSET:
        return (x * (1.0 + weight.to(gl.float32))).to(dtype)
    return (x.to(dtype).to(gl.float32) * weight.to(gl.float32)).to(dtype)


@gluon.jit
def sum_of(x):
    """The sum of a piece."""
    return gl.sum(gl.sum(gl.sum(x, 2), 1), 0)


@gluon.jit
def mean_square(pieces, NUM: gl.constexpr):
    total = pieces[0] * pieces[0]
    for i in gl.static_range(1, NUM):
        total += pieces[i] * pieces[i]
    return sum_of(total) / (NUM * PIECE_SIZE)


@gluon.jit
def one_row_kernel(
    hidden, residual, new_residual, norm, post_norm, input_scale, weight, weight_scale, bias, out, partials, eps, post_eps,
    UNIT_OFFSET: gl.constexpr, POST_UNIT_OFFSET: gl.constexpr, BOUND: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    ACTIVATION: gl.constexpr, R: gl.constexpr, C: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """R rows of the weight by a SPLIT-th of K. Arguments: see `OneRowProduct`."""
    PANEL: gl.constexpr = 128
    dtype: gl.constexpr = hidden.dtype.element_ty
    PER_STEP: gl.constexpr = C // PANEL
    OWN: gl.constexpr = K // SPLIT // PIECE_SIZE  # pieces of a program's part
    NUM: gl.constexpr = K // PIECE_SIZE
    NUM_STEPS: gl.constexpr = K // SPLIT // C
    STEPS: gl.constexpr = PIECE_SIZE // C  # of a piece
    tile, part = gl.program_id(0), gl.program_id(1)
    IS_PAIRED: gl.constexpr = ACTIVATION is not None
    row = tile * (R // 2 if IS_PAIRED else R)
    first = part * NUM_STEPS * PER_STEP
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3)
    rows = gl.allocate_shared_memory(weight.dtype, [OWN, _PANELS, _COLUMNS, PANEL], rows_layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.expect(barriers.index(i), weight.block_type.nbytes)
        fetch(weight, row, first + i * PER_STEP, barriers.index(i), weights.index(i), IS_PAIRED)

    spread: gl.constexpr = gl.BlockedLayout([1, 1, 8], [2, 1, 16], [gl.num_warps(), 1, 1], [2, 1, 0])
    panels = gl.arange(0, _PANELS, gl.SliceLayout(1, gl.SliceLayout(2, spread)))[:, None, None]
    columns = gl.arange(0, PANEL, gl.SliceLayout(0, gl.SliceLayout(1, spread)))[None, None, :]
    place = panels * PANEL + columns
    norms = ()
    posts = ()
    for i in gl.static_range(NUM):
        if norm is not None:
            norms += (gl.load(norm + (part * OWN + i) % NUM * PIECE_SIZE + place),)
        if post_norm is not None:
            posts += (gl.load(post_norm + (part * OWN + i) % NUM * PIECE_SIZE + place),)
    weight_scale = scales_of_rows(weight_scale, tile, N, ACTIVATION, R)
    gdc_launch_dependents()
    gdc_wait()
    raw = ()
    olds = ()
    for i in gl.static_range(NUM):  # the part's own pieces come first
        raw += (gl.load(hidden + (part * OWN + i) % NUM * PIECE_SIZE + place),)
        if residual is not None:
            olds += (gl.load(residual + (part * OWN + i) % NUM * PIECE_SIZE + place),)
    if post_norm is not None:
        wide = ()
        for i in gl.static_range(NUM):
            wide += (raw[i].to(gl.float32),)
        square = mean_square(wide, NUM)
        raw = ()
        for i in gl.static_range(NUM):
            raw += (normed(wide[i], square, post_eps, posts[i], POST_UNIT_OFFSET, dtype),)
    if residual is not None:
        added = ()
        for i in gl.static_range(NUM):
            added += ((raw[i].to(gl.float32) + olds[i].to(gl.float32)).to(dtype),)
        raw = added
    if new_residual is not None:  # noqa: SIM102 a constant condition leaves the other out
        if tile == 0:
            for i in gl.static_range(OWN):
                gl.store(new_residual + (part * OWN + i) * PIECE_SIZE + place, raw[i])
    if norm is not None:
        wide = ()
        for i in gl.static_range(NUM):
            wide += (raw[i].to(gl.float32),)
        square = mean_square(wide, NUM)
        raw = ()
        for i in gl.static_range(NUM):
            raw += (normed(wide[i], square, eps, norms[i], UNIT_OFFSET, dtype),)
    if input_scale is None:
        largest = gl.abs(raw[0].to(gl.float32))
        for i in gl.static_range(1, NUM):
            largest = gl.maximum(largest, gl.abs(raw[i].to(gl.float32)))
        scale = gl.max(gl.max(gl.max(largest, 2), 1), 0)
        if BOUND is not None:
            scale = gl.minimum(scale, BOUND)
        scale = gl.div_rn(gl.maximum(scale, 1e-30), 448.0)
    else:
        scale = gl.load(input_scale)
    inverse = gl.div_rn(1.0, scale)
    for i in gl.static_range(OWN):
        rounded = (raw[i].to(gl.float32) * inverse).to(weight.dtype)  # the instruction saturates
        rows.index(i).store(gl.convert_layout(rounded.broadcast_to([_PANELS, _COLUMNS, PANEL]), spread))
    fence_async_shared()
    gl.thread_barrier()

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, _COLUMNS, 32])
    total = warpgroup_mma_init(gl.zeros((R, _COLUMNS), gl.float32, layout))
    for piece in range(OWN):
        right = rows.index(piece).reshape((_PANELS * _COLUMNS, PANEL))
        for s in gl.static_range(STEPS):
            step = piece * STEPS + s
            stage = step % STAGES
            mbarrier.wait(barriers.index(stage), (step // STAGES) & 1)
            left = weights.index(stage).reshape((PER_STEP * R, PANEL))
            for i in gl.static_range(PER_STEP):
                y = right.slice((s * PER_STEP + i) * _COLUMNS, _COLUMNS).permute((1, 0))
                total = warpgroup_mma(left.slice(i * R, R), y, total, is_async=True)
            if NUM_STEPS > STAGES:
                total = warpgroup_mma_init(warpgroup_mma_wait(PER_STEP, deps=(total,)))
                free = (step + STAGES - 1) % STAGES  # the stage of the step before, which is done
                later = step + STAGES - 1
                if (step > 0) & (later < NUM_STEPS):
                    gl.thread_barrier()  # every warp's products of that stage are done
                    mbarrier.expect(barriers.index(free), weight.block_type.nbytes)
                    fetch(weight, row, first + later * PER_STEP, barriers.index(free), weights.index(free), IS_PAIRED)
    total = warpgroup_mma_wait(0, deps=(total,))

    if SPLIT > 1:
        places = gl.arange(0, R, gl.SliceLayout(1, layout))
        parts = partials + tile * ((SPLIT - 1) * R) + places
        if part < SPLIT - 1:  # all columns are the same
            copy = gl.arange(0, _COLUMNS, gl.SliceLayout(0, layout))
            hand_over(
                (parts + part * R)[:, None] + copy[None, :] * 0, total, (copy == 0)[None, :] & (places >= 0)[:, None]
            )
        else:
            for i in gl.static_range(SPLIT - 1):
                total += take(parts + i * R, places >= 0)[:, None]
            store_result(total, weight_scale, scale, bias, out, tile, 0, 1, N, ACTIVATION, _COLUMNS, R)
    else:
        store_result(total, weight_scale, scale, bias, out, tile, 0, 1, N, ACTIVATION, _COLUMNS, R)


_launch = Launcher(one_row_kernel)


class OneRowTiling(NamedTuple):
    """As `HopperTiling`, of one row."""

    rows: int
    columns: int
    split: int
    stages: int


def choose_one_row_tiling(out_features: int, in_features: int) -> OneRowTiling:
    """Choose as measured on an H200: two programs a multiprocessor for many rows, else one with nearly all of its memory, K in parts.

    Smaller matrices have fewer parts, whose sums would take a larger share: QKV of Qwen3-30B-A3B (5,120 x 2,048) takes 3.8 us as 80
    programs and 4.8 as 160, O (2,048 x 4,096) 4.1 us as 64 and 5.0 as 128."""
    if out_features > 264 * 64:
        rows, columns, split, memory = 128, 128, 1, 115_000
    else:
        rows, columns, split, memory = 64, 256, 1, 228_000
        least = 96 if out_features * in_features >= 16 << 20 else 64
        while triton.cdiv(out_features, rows) * split < least and in_features % (2 * split * PIECE) == 0:
            split *= 2
    part = in_features // split
    stages = max(min((memory - part * 8) // (rows * columns), part // columns), 2)
    return OneRowTiling(rows, columns, split, stages)


class OneRowProduct:
    """[norm of] one row, rounded, times one weight: (out [1, N], or activation(gate) * up [1, N / 2]; the new residual).

    Math as for `fp8.add_norm_rounded` (without `norm`: `fp8.rounded`) and `hopper_split_k.HopperProduct`; sums of squares are added
    in another order. Parts of K are handed over (`handed_parts`).
    """

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        activation: str | None,
        input_scale: Tensor | None,
        bound: float | None,
        norm: Norm | None = None,
        post_norm: Norm | None = None,
        tiling: OneRowTiling | None = None,
    ) -> None:
        self._weight, self._scale, self._bias, self._input_scale = weight, weight_scale, bias, input_scale
        self._norm, self._post_norm = norm, post_norm
        out_features, in_features = weight.shape
        tiling = tiling or choose_one_row_tiling(out_features, in_features)
        describe = panels_of if activation is None else paired_panels_of
        self._described = describe(weight, out_features, tiling.rows, tiling.columns // 128)
        self._width = out_features if activation is None else out_features // 2
        self._grid = triton.cdiv(out_features, tiling.rows), tiling.split
        self._parts = None
        if tiling.split > 1:
            places = self._grid[0] * (tiling.split - 1) * tiling.rows
            self._parts = torch.zeros(places, dtype=torch.int32, device=weight.device)
        self._constants = {
            "UNIT_OFFSET": norm is not None and norm.unit_offset,
            "POST_UNIT_OFFSET": post_norm is not None and post_norm.unit_offset, "BOUND": bound, "N": out_features,
            "K": in_features, "ACTIVATION": activation, "R": tiling.rows, "C": tiling.columns, "SPLIT": tiling.split,
            "STAGES": tiling.stages,
        }  # fmt: skip
        fixed = weight_scale, bias, input_scale, norm and norm.weight, post_norm and post_norm.weight
        self._key = weight.device, *(tensor is None for tensor in fixed), alignment(*fixed)

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """A row whose pieces leave a program registers, and memory for `LEAST_STAGES` buffers (70B's gate and up do not)."""
        out_features, in_features = weight.shape
        if not can_multiply(weight) or in_features % PIECE or not PIECE <= in_features <= 16 * PIECE:
            return False
        return choose_one_row_tiling(out_features, in_features).stages >= LEAST_STAGES

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """hidden, residual [1, K], contiguous."""
        norm, post_norm = self._norm, self._post_norm
        out = torch.empty((1, self._width), dtype=hidden.dtype, device=hidden.device)
        # Not in place: programs read the old row while others write the new one.
        total = hidden if residual is None and post_norm is None else torch.empty_like(hidden)
        _launch(
            (hidden.dtype, residual is None, alignment(hidden, residual), self._key, *self._constants.values()),
            self._grid,
            (
                hidden, residual, None if total is hidden else total, norm and norm.weight, post_norm and post_norm.weight,
                self._input_scale, self._described, self._scale, self._bias, out, self._parts,
                norm.eps if norm else 0.0, post_norm.eps if post_norm else 0.0,
            ),
            self._constants, num_warps=4, **launch_options(has_pdl(hidden.device)),
        )  # fmt: skip
        return out, total
