"""Kernels by which a captured step reads pinned host memory and writes it: `take` and `give` of `prepare_inputs`.

A copy between two graphs takes 7 us of an H200 and some 20 of its host; `take` and `give` take 3.7 and 2.1 of the device. Loads are plain:
the host writes a part before it launches the step that takes it. Volatile ones come from the host's memory one after the other,
1.2 us each. Figures are in docs/performance/gpu.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton.platform.compiling import launch
from pelton_backends.triton.runtime import INTERPRETED, has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

HEADER: tl.constexpr = tl.constexpr(2)
MOST_AT_ONCE = 1024
_GIVE_BLOCK = 1024


@triton.jit
def append_blocks(part, groups, start, num_rows, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Blocks `start` to start + ROWS of each group's to its table."""
    row = start + tl.arange(0, ROWS)
    for group in tl.static_range(GROUPS):
        table = tl.load(groups + group * 8).to(tl.pointer_type(tl.int32))
        cells = part + HEADER + (2 + 2 * group) * num_rows + row
        cell = tl.load(cells, mask=row < num_rows, other=0)
        block = tl.load(cells + num_rows, mask=row < num_rows, other=0)
        tl.store(table + cell, block.to(tl.int32), mask=row < num_rows)


@triton.jit(do_not_specialize=["stride", "count", "num_rows"])
def take_kernel(
    parts, turn, taken, place, columns, groups, stride, count, num_rows, NUM_PARTS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, LOOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program. groups [GROUPS, 8] int64: the address of a group's block table first, see `inputs._describe`. LOOPS: some numbers or
    rows are past BLOCK or ROWS. Without it all reads are under way before the first is used, and the kernel is few instructions: those
    of a kernel that runs once a step have left the caches."""
    lane = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    number = tl.load(turn)
    part = parts + number % NUM_PARTS * stride
    values = tl.load(part + HEADER + lane, mask=lane < count, other=0)
    address = tl.load(part)
    append_blocks(part, groups, 0, num_rows, GROUPS, ROWS)
    tl.store(columns + lane, values, mask=lane < count)
    tl.store(place, address)
    if LOOPS:
        start = BLOCK
        while start < count:
            at = start + lane
            tl.store(columns + at, tl.load(part + HEADER + at, mask=at < count, other=0), mask=at < count)
            start += BLOCK
        start = ROWS
        while start < num_rows:
            append_blocks(part, groups, start, num_rows, GROUPS, ROWS)
            start += ROWS
    tl.debug_barrier()  # every thread has what it read: the host may write the part again
    tl.store(turn, number + 1)
    tl.store(taken, number + 1)


@triton.jit(do_not_specialize=["count"])
def give_kernel(result, place, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK words a program."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    address = tl.load(place)
    if address != 0:
        target = address.to(tl.pointer_type(tl.int32))
        tl.store(target + word, tl.load(result + word, mask=word < count, other=0), mask=word < count)


def reaches_pinned_memory(device: torch.device) -> bool:
    """Return whether kernels read and write what the host has pinned, at the host's addresses. AMD's were not tried."""
    return INTERPRETED or (device.type == "cuda" and torch.version.hip is None)


def at_once(count: int) -> int:
    """How many of `count` numbers are read beside each other."""
    return min(max(triton.next_power_of_2(count), 32), MOST_AT_ONCE)


class PinnedMemory:
    """`take` and `give` of one state. groups: see `take_kernel`."""

    def __init__(self, groups: Tensor) -> None:
        self._groups, self._pdl = groups, has_pdl(groups.device)

    def take(
        self, parts: Tensor, turn: Tensor, taken: Tensor, place: Tensor, columns: Tensor, num_rows: int
    ) -> None:  # fmt: skip
        count = columns.numel()
        block, rows = at_once(count), at_once(num_rows)
        launch(
            take_kernel, (1,),
            parts, turn, taken, place, columns, self._groups, parts.stride(0), count, num_rows, NUM_PARTS=parts.shape[0],
            GROUPS=self._groups.shape[0], BLOCK=block, ROWS=rows, LOOPS=block < count or rows < num_rows, PDL=self._pdl,
            num_warps=min(max(block // 128, 1), 8), **launch_options(self._pdl),
        )  # fmt: skip

    def give(self, result: Tensor, place: Tensor) -> None:
        words = result.view(-1).view(torch.int32)
        launch(
            give_kernel, (triton.cdiv(words.numel(), _GIVE_BLOCK),),
            words, place, words.numel(), BLOCK=_GIVE_BLOCK, PDL=self._pdl, num_warps=4, **launch_options(self._pdl),
        )  # fmt: skip
