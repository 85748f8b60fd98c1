"""Logits of some rows on Hopper, and each row's best token with them: greedy rows are not read from memory again.

Programs stay: each takes pieces of the vocabulary one after the other, and the next one's weights are on their way while the best
tokens of one are found. 65 rows and more mostly have a kernel of their own (`hopper_wide_vocab.takes_wide`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.launch import Launcher
from pelton_backends.triton.ops.linear.hopper_mid_batch import rows_of
from pelton_backends.triton.ops.linear.hopper_split_k import can_multiply, rows_in_memory
from pelton_backends.triton.ops.linear.hopper_wide_vocab import WideVocabProduct, takes_wide
from pelton_backends.triton.runtime import has_pdl, launch_options, num_sms

if TYPE_CHECKING:
    from torch import Tensor
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PANEL = 64  # columns of a step: 128 bytes, the widest swizzle of shared memory
MAX_ROWS = 128
_PANEL = gl.constexpr(PANEL)
_BUFFER_BYTES = 200_000


@gluon.jit
def _end(
    total, best, logits, row, num_tokens, N: gl.constexpr, M: gl.constexpr, PIECE: gl.constexpr, WRITE: gl.constexpr
):
    """Logits [PIECE, M] of tokens from `row` on: the best of each of x's rows, and all of them where they are wanted.

    Keys as `order_key` has them; NaN of the arithmetic is positive, so its bits lie above infinity's."""
    layout: gl.constexpr = total.type.layout
    token = row + gl.arange(0, PIECE, gl.SliceLayout(1, layout))
    of_x = gl.arange(0, M, gl.SliceLayout(0, layout))
    if WRITE:
        is_inside = (of_x < num_tokens)[None, :] & (token < N)[:, None]
        gl.store(logits + of_x.to(gl.int64)[None, :] * N + token[:, None], total, mask=is_inside)
    bits = (total + 0.0).to(gl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = gl.where((token < N)[:, None], keys, -2147483648)
    top = gl.max(keys, 0)
    first = gl.min(gl.where(keys == top[None, :], token[:, None], 0x7FFFFFFF), 0)
    packed = (top.to(gl.int64) << 32) | (0x7FFFFFFF - first).to(gl.int64)
    gl.atomic_max(best + of_x, packed, mask=of_x < num_tokens, sem="relaxed")


@gluon.jit(do_not_specialize=["num_tokens"])
def vocab_kernel(
    x, weight, best, logits, num_tokens,
    N: gl.constexpr, K: gl.constexpr, M: gl.constexpr, PIECE: gl.constexpr, STAGES: gl.constexpr, WRITE: gl.constexpr,
):  # fmt: skip
    """M rows of x by pieces of the weight [N, K], PIECE rows each; best [T] int64: the largest key of each row, and the lowest token that
    has it. A ring of STAGES buffers goes on from one piece to the next."""
    STEPS: gl.constexpr = K // _PANEL
    gl.static_assert(STEPS >= STAGES, "the first piece fills all buffers")
    BYTES: gl.constexpr = weight.block_type.nbytes + x.block_type.nbytes
    program, programs = gl.program_id(0), gl.num_programs(0)
    num_pieces = ((N + PIECE - 1) // PIECE - program + programs - 1) // programs
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    rows = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.expect(ready.index(i), BYTES)
        tma.async_copy_global_to_shared(weight, [program * PIECE, i * _PANEL], ready.index(i), weights.index(i))
    gdc_launch_dependents()
    gdc_wait()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x, [0, i * _PANEL], ready.index(i), rows.index(i))

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, 16])
    for piece in range(num_pieces):
        total = warpgroup_mma_init(gl.zeros((PIECE, M), gl.float32, layout))
        for step in range(STEPS):
            now = piece * STEPS + step
            stage = now % STAGES
            mbarrier.wait(ready.index(stage), (now // STAGES) & 1)
            total = warpgroup_mma(weights.index(stage), rows.index(stage).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(total,)))  # all but this step's product
            free, later = (now + STAGES - 1) % STAGES, now + STAGES - 1
            if (now > 0) & (later < num_pieces * STEPS):
                gl.thread_barrier()  # every warp's product of that buffer is done
                barrier, column = ready.index(free), later % STEPS * _PANEL
                mbarrier.expect(barrier, BYTES)
                row = (program + later // STEPS * programs) * PIECE
                tma.async_copy_global_to_shared(weight, [row, column], barrier, weights.index(free))
                tma.async_copy_global_to_shared(x, [0, column], barrier, rows.index(free))
        total = warpgroup_mma_wait(0, deps=(total,))
        _end(total, best, logits, (program + piece * programs) * PIECE, num_tokens, N, M, PIECE, WRITE)


_launch = Launcher(vocab_kernel)


class VocabTiling(NamedTuple):
    """A program multiplies `piece` rows of the vocabulary at a time by `rows` of x, through `stages` buffers, with `warps`."""

    piece: int
    rows: int
    stages: int
    warps: int


def most_vocab_rows(weight: Tensor) -> int:
    """Return up to how many rows `VocabProduct` multiplies, 0 where it cannot, or where it was not measured."""
    is_known = weight.shape[1] % PANEL == 0 and 16 * PANEL <= weight.shape[1] <= 4096
    return MAX_ROWS if is_known and weight.element_size() == 2 and can_multiply(weight) else 0


def choose_vocab_tiling(num_rows: int, *, is_written: bool) -> VocabTiling:
    """Choose as measured on an H200, with norm and greedy tokens, us: cuBLAS and a kernel that reads the logits; this one in pieces of 128
    and of 256, with 4 warps, 8 at 128 rows:

      151,936 x 1,024, rows  4  88.2  75.3  80.2;  32  98.9  83.8  81.8;  64  110.1  86.4  84.3;  128  130.6  107.6  103.0
      128,256 x 4,096        4  248.5 239.3;       32  269.9 243.2 242.9;                         128  306.0  282.7  268.7

    With the logits written too, 151,936 x 1,024 in pieces of 128: 78.2 at 4 rows, 86.5 at 32, 97.2 at 64, 127.7 at 128. Tiles of 256 rows
    of x take 182.8 and 120.4, of 384 rows 204.4 and 145.3: registers are spilled.
    """
    rows = max(triton.next_power_of_2(num_rows), 16)
    return vocab_tiling(128 if rows <= 16 or is_written else 256, rows, 8 if rows > 64 else 4)


def vocab_tiling(piece: int, rows: int, warps: int) -> VocabTiling:
    """With all of the memory as buffers."""
    return VocabTiling(piece, rows, _BUFFER_BYTES // ((piece + rows) * 2 * PANEL), warps)


class VocabProduct:
    """x [T, K] -> logits [T, N] float32, and the best token of each row. K is a multiple of 64, at least 1,024."""

    def __init__(self, weight: Tensor) -> None:
        """weight [N, K]"""
        self._weight, self._wide = weight, WideVocabProduct(weight)
        self._described: dict[int, TensorDescriptor] = {}

    def __call__(self, x: Tensor, best: Tensor, *, is_written: bool, tiling: VocabTiling | None = None) -> Tensor:
        """best [T] int64, `best.NO_KEY` before. is_written: else the logits' memory stays as it is."""
        num_tokens, (out_features, in_features) = x.shape[0], self._weight.shape
        if tiling is None and takes_wide(num_tokens, self._weight):
            return self._wide(x, best, is_written=is_written)
        tiling = tiling or choose_vocab_tiling(num_tokens, is_written=is_written)
        logits = torch.empty(num_tokens, out_features, dtype=torch.float32, device=x.device)
        weight = self._described.get(tiling.piece)
        if weight is None:
            weight = self._described[tiling.piece] = rows_of(self._weight, out_features, tiling.piece)
        rows_of_x = rows_of(x, rows_in_memory(x, tiling.rows), tiling.rows)
        programs = min(num_sms(x.device), triton.cdiv(out_features, tiling.piece))
        _launch(
            (x.dtype, x.device, out_features, in_features, is_written, tiling),
            (programs,),
            (rows_of_x, weight, best, logits, num_tokens),
            {
                "N": out_features, "K": in_features, "M": tiling.rows, "PIECE": tiling.piece, "STAGES": tiling.stages,
                "WRITE": is_written,
            },
            num_warps=tiling.warps, **launch_options(has_pdl(x.device)),
        )  # fmt: skip
        return logits
