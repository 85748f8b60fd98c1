"""Kernels by which a captured step reads pinned host memory and writes it: `take` and `give` of `prepare_inputs`.

A copy between two graphs takes 7 us of an H200 and some 20 of its host. `give` takes 2.3 of the device; `take` 14 to 15, where the copy
and the kernel that appended blocks behind it took 11, and no time of the host. Figures are in docs/performance/gpu.md.
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

_HEADER: tl.constexpr = tl.constexpr(2)
_TAKE_BLOCK = 1024
_GIVE_BLOCK = 1024


@triton.jit(do_not_specialize=["stride", "num_parts", "count", "num_rows", "num_groups"])
def take_kernel(
    parts, turn, taken, place, columns, groups, stride, num_parts, count, num_rows, num_groups,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program. groups [num_groups, 8] int64: the address of a group's block table first, see `inputs._describe`."""
    lane = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    number = tl.load(turn)
    part = parts + number % num_parts * stride
    values = tl.load(part + _HEADER + lane, mask=lane < count, other=0, volatile=True)
    address = tl.load(part, volatile=True)
    group = 0
    while group < num_groups:
        table = tl.load(groups + group * 8).to(tl.pointer_type(tl.int32))
        cells = part + _HEADER + (2 + 2 * group) * num_rows
        start = 0
        while start < num_rows:
            row = start + lane
            cell = tl.load(cells + row, mask=row < num_rows, other=0, volatile=True)
            block = tl.load(cells + num_rows + row, mask=row < num_rows, other=0, volatile=True)
            tl.store(table + cell, block.to(tl.int32), mask=row < num_rows)
            start += BLOCK
        group += 1
    tl.store(columns + lane, values, mask=lane < count)
    tl.store(place, address)
    start = BLOCK
    while start < count:
        at = start + lane
        tl.store(
            columns + at,
            tl.load(part + _HEADER + at, mask=at < count, other=0, volatile=True),
            mask=at < count,
        )
        start += BLOCK
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


class PinnedMemory:
    """`take` and `give` of one state. groups: see `take_kernel`."""

    def __init__(self, groups: Tensor) -> None:
        self._groups, self._pdl = groups, has_pdl(groups.device)

    def take(
        self, parts: Tensor, turn: Tensor, taken: Tensor, place: Tensor, columns: Tensor, num_rows: int
    ) -> None:  # fmt: skip
        launch(
            take_kernel, (1,),
            parts, turn, taken, place, columns, self._groups, parts.stride(0), parts.shape[0], columns.numel(), num_rows,
            self._groups.shape[0], BLOCK=_TAKE_BLOCK, PDL=self._pdl, num_warps=8, **launch_options(self._pdl),
        )  # fmt: skip

    def give(self, result: Tensor, place: Tensor) -> None:
        words = result.view(-1).view(torch.int32)
        launch(
            give_kernel, (triton.cdiv(words.numel(), _GIVE_BLOCK),),
            words, place, words.numel(), BLOCK=_GIVE_BLOCK, PDL=self._pdl, num_warps=4, **launch_options(self._pdl),
        )  # fmt: skip
