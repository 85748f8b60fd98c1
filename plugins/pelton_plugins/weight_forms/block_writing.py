"""Make the blocks of `pelton.ops.packed_blocks`: numbers rounded to blocks, and rows of blocks put into panels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pelton.ops.packed_blocks import BLOCK, PANEL_ROWS, BlockKind

if TYPE_CHECKING:
    from torch import Tensor


def pack(rows: Tensor, kind: BlockKind, panels: Tensor) -> None:
    """Rows of blocks [n, bytes] uint8 into `panels`, whose rows behind the n-th become zeros."""
    num_panels, num_blocks, _ = panels.shape
    if num_panels == 0:
        return
    missing = num_panels * PANEL_ROWS - rows.shape[0]
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    blocks = rows.reshape(num_panels, PANEL_ROWS, num_blocks, kind.block_bytes)
    quants = blocks[..., kind.head_bytes :].contiguous().view(torch.int32)  # [P, 16, B, groups of four bytes]
    heads = blocks[..., : kind.head_bytes].contiguous().view(torch.int16)  # [P, 16, B, 1 or 2]
    quants = quants.permute(0, 2, 3, 1).contiguous().view(num_panels, num_blocks, -1)
    heads = heads.permute(0, 2, 3, 1).contiguous().view(num_panels, num_blocks, -1)
    split = PANEL_ROWS * kind.quant_bytes
    panels[..., :split] = quants.view(torch.uint8)
    panels[..., split:] = heads.view(torch.uint8)


def quantize(values: Tensor, kind: BlockKind) -> Tensor:
    """[n, in] -> rows of blocks [n, bytes] uint8, rounded to nearest."""
    num_rows, num_blocks = values.shape[0], values.shape[1] // BLOCK
    blocks = values.float().reshape(num_rows, num_blocks, BLOCK)
    if kind.has_minimum:
        minimum = blocks.amin(-1, keepdim=True)
        scale = (blocks.amax(-1, keepdim=True) - minimum) / 15.0
        heads = torch.cat([scale, minimum], dim=-1).half()
        numbers = _divided(blocks - heads[..., 1:].float(), heads[..., :1]).clamp(0, 15)
    elif kind.name == "q4_0":
        # The number of largest magnitude becomes -8: the range is -8 .. 7.
        extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        heads = (extreme / -8.0).half()
        numbers = (_divided(blocks, heads) + 8.0).clamp(0, 15)
    else:
        heads = (blocks.abs().amax(-1, keepdim=True) / 127.0).half()
        numbers = _divided(blocks, heads).clamp(-127, 127)
    if kind.name == "q8_0":
        quants = numbers.to(torch.int8).view(torch.uint8)
    else:
        halves = numbers.to(torch.uint8)
        quants = halves[..., : BLOCK // 2] | halves[..., BLOCK // 2 :] << 4
    return torch.cat([heads.view(torch.uint8), quants], dim=-1).reshape(num_rows, num_blocks * kind.block_bytes)


def _divided(blocks: Tensor, scale: Tensor) -> Tensor:
    """Divide by the scale that is kept; zeros where it is zero."""
    wide = scale.float()
    return torch.where(wide == 0.0, 0.0, (blocks / wide).round())
