"""Logits of 65 to 128 rows on Hopper with each row's best token: `hopper_vocab` with the rows of x on the left, and a warp that copies.

A thread has two rows of x and many tokens, so that most of finding the best is its own, and it keeps them from one piece of the
vocabulary to the next. The next piece's weights are on their way meanwhile.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.launch import Launcher
from pelton_backends.triton.ops.linear.hopper_mid_batch import ALL_REGISTERS, rows_of
from pelton_backends.triton.ops.linear.hopper_split_k import rows_in_memory
from pelton_backends.triton.ops.linear.mid_batch_tilings import GROUP
from pelton_backends.triton.runtime import has_pdl, launch_options, num_sms

if TYPE_CHECKING:
    from torch import Tensor
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PANEL = 64  # columns of a step: 128 bytes, the widest swizzle of shared memory
UNIT = 128  # rows of the vocabulary of a product, of which a piece has two
GROUPS = 2  # of 64 rows of x, a warp group each
STAGES = 4  # buffers: all of the memory
MAX_COLUMNS, MAX_COLUMNS_OF_MANY, MANY_TOKENS = 2048, 4096, 1 << 16
"""Columns of x, and with a vocabulary of so many tokens: more were not measured."""
_PANEL, _UNIT, _GROUP, _GROUPS = gl.constexpr(PANEL), gl.constexpr(UNIT), gl.constexpr(GROUP), gl.constexpr(GROUPS)
_PIECE = gl.constexpr(2 * UNIT)


@gluon.jit
def _fetch_weights(weight, row, column, barrier, weights, stage):
    tma.async_copy_global_to_shared(weight, [row, column], barrier, weights.index(stage * 2))
    tma.async_copy_global_to_shared(weight, [row + _UNIT, column], barrier, weights.index(stage * 2 + 1))


@gluon.jit
def _fetch_rows(x, column, barrier, rows, stage):
    for g in gl.static_range(_GROUPS):
        tma.async_copy_global_to_shared(x, [g * _GROUP, column], barrier, rows.index(stage * _GROUPS + g))


@gluon.jit
def _copy(
    x, weight, weights, rows, ready, free, program, programs, num_steps, STEPS: gl.constexpr, STAGES: gl.constexpr
):
    """The copying warp: a ring of STAGES buffers that goes on from one piece to the next."""
    BYTES: gl.constexpr = _GROUPS * x.block_type.nbytes + 2 * weight.block_type.nbytes
    for i in gl.static_range(STAGES):
        mbarrier.expect(ready.index(i), BYTES)
        _fetch_weights(weight, program * _PIECE, i * _PANEL, ready.index(i), weights, i)
    gdc_launch_dependents()
    gdc_wait()
    for i in gl.static_range(STAGES):
        _fetch_rows(x, i * _PANEL, ready.index(i), rows, i)
    for now in range(STAGES, num_steps):
        stage = now % STAGES
        row, column = (program + now // STEPS * programs) * _PIECE, now % STEPS * _PANEL
        mbarrier.wait(free.index(stage), ((now // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), BYTES)
        _fetch_weights(weight, row, column, ready.index(stage), weights, stage)
        _fetch_rows(x, column, ready.index(stage), rows, stage)


@gluon.jit
def _better(found, total, logits, row, of_x, num_tokens, N: gl.constexpr, WRITE: gl.constexpr):
    """The best of `found` and of these logits [64, 128], tokens from `row` on: keys as in `hopper_vocab._end`."""
    layout: gl.constexpr = total.type.layout
    token = row + gl.arange(0, _UNIT, gl.SliceLayout(0, layout))
    if WRITE:
        is_inside = (of_x < num_tokens)[:, None] & (token < N)[None, :]
        gl.store(logits + of_x.to(gl.int64)[:, None] * N + token[None, :], total, mask=is_inside)
    bits = (total + 0.0).to(gl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = gl.where((token < N)[None, :], keys, -2147483648)
    top = gl.max(keys, 1)
    first = gl.min(gl.where(keys == top[:, None], token[None, :], 0x7FFFFFFF), 1)
    return gl.maximum(found, (top.to(gl.int64) << 32) | (0x7FFFFFFF - first).to(gl.int64))


@gluon.jit
def _zeros():
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _UNIT, 16])
    return warpgroup_mma_init(gl.zeros((_GROUP, _UNIT), gl.float32, layout))


@gluon.jit
def _multiply(
    G: gl.constexpr, best, logits, weights, rows, ready, free, program, programs, num_pieces, num_tokens,
    N: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, WRITE: gl.constexpr,
):  # fmt: skip
    """A warp group: its 64 rows of x by all pieces of the program."""
    gdc_wait()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _UNIT, 16])
    of_x = G * _GROUP + gl.arange(0, _GROUP, gl.SliceLayout(1, layout))
    found = gl.full([_GROUP], -9223372036854775808, gl.int64, gl.SliceLayout(1, layout))
    for piece in range(num_pieces):
        a, b = _zeros(), _zeros()
        for step in range(STEPS):
            now = piece * STEPS + step
            stage = now % STAGES
            mbarrier.wait(ready.index(stage), (now // STAGES) & 1)
            left = rows.index(stage * _GROUPS + G)
            a = warpgroup_mma(left, weights.index(stage * 2).permute((1, 0)), a, is_async=True)
            b = warpgroup_mma(left, weights.index(stage * 2 + 1).permute((1, 0)), b, is_async=True)
            a, b = warpgroup_mma_wait(2, deps=(a, b))  # all but this step's products
            a, b = warpgroup_mma_init(a), warpgroup_mma_init(b)
            gl.thread_barrier()  # all four warps' products of the step before are done
            mbarrier.arrive(free.index((now + STAGES - 1) % STAGES), count=1, pred=step > 0)
        a, b = warpgroup_mma_wait(0, deps=(a, b))
        gl.thread_barrier()
        mbarrier.arrive(free.index((piece * STEPS + STEPS - 1) % STAGES), count=1)
        row = (program + piece * programs) * _PIECE
        found = _better(found, a, logits, row, of_x, num_tokens, N, WRITE)
        found = _better(found, b, logits, row + _UNIT, of_x, num_tokens, N, WRITE)
    gl.atomic_max(best + of_x, found, mask=of_x < num_tokens, sem="relaxed")


@gluon.jit(do_not_specialize=["num_tokens"])
def wide_vocab_kernel(
    x, weight, best, logits, num_tokens,
    N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, WRITE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """128 rows of x by pieces of the weight [N, K], 256 rows each; best [T] int64 as in `vocab_kernel`."""
    STEPS: gl.constexpr = K // _PANEL
    gl.static_assert(STEPS >= STAGES, "the first piece fills all buffers")
    program, programs = gl.program_id(0), gl.num_programs(0)
    num_pieces = ((N + _PIECE - 1) // _PIECE - program + programs - 1) // programs
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * 2] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    rows = gl.allocate_shared_memory(x.dtype, [STAGES * _GROUPS] + x.block_type.shape, x.layout)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                gl.constexpr(0), best, logits, weights, rows, ready, free, program, programs, num_pieces, num_tokens, N, STEPS,
                STAGES, WRITE,
            )),
            (_multiply, (
                gl.constexpr(1), best, logits, weights, rows, ready, free, program, programs, num_pieces, num_tokens, N, STEPS,
                STAGES, WRITE,
            )),
            (_copy, (x, weight, weights, rows, ready, free, program, programs, num_pieces * STEPS, STEPS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


_launch = Launcher(wide_vocab_kernel)


def takes_wide(num_tokens: int, weight: Tensor) -> bool:
    """Return whether this kernel is for so many rows: where it was measured to be faster, 151,936 x 1,024 on an H200, us, by
    `hopper_vocab` and here: 128 rows 101.2 and 88.3, with the logits written 124.1 and 117.6.

    128,256 x 4,096 take 259 and 249 with 128 rows.

    Three units a piece take 88.5 and 119.8, and 86.8 where each program begins with columns of its own, but then the best
    tokens would be of other sums than logits that are written in another order. 64 rows by one warp group 78.4, for 86.0."""
    vocab_size, columns = weight.shape
    most = MAX_COLUMNS_OF_MANY if vocab_size >= MANY_TOKENS else MAX_COLUMNS
    return GROUP < num_tokens <= GROUPS * GROUP and STAGES * PANEL <= columns <= most


class WideVocabProduct:
    """`hopper_vocab.VocabProduct` with one weight, for rows that `takes_wide`."""

    def __init__(self, weight: Tensor) -> None:
        """weight [N, K]"""
        self._weight = weight
        self._described: TensorDescriptor | None = None

    def __call__(self, x: Tensor, best: Tensor, *, is_written: bool) -> Tensor:
        """best [T] int64, `best.NO_KEY` before. is_written: else the logits' memory stays as it is."""
        num_tokens, (out_features, in_features) = x.shape[0], self._weight.shape
        logits = torch.empty(num_tokens, out_features, dtype=torch.float32, device=x.device)
        if self._described is None:
            self._described = rows_of(self._weight, out_features, UNIT)
        rows_of_x = rows_of(x, rows_in_memory(x, GROUPS * GROUP), GROUP)
        programs = min(num_sms(x.device), triton.cdiv(out_features, 2 * UNIT))
        _launch(
            (x.dtype, x.device, out_features, in_features, is_written),
            (programs,),
            (rows_of_x, self._described, best, logits, num_tokens),
            {
                "N": out_features, "K": in_features, "STAGES": STAGES, "WRITE": is_written, "REGISTERS": ALL_REGISTERS[GROUPS],
            },
            num_warps=4, **launch_options(has_pdl(x.device)),
        )  # fmt: skip
        return logits
