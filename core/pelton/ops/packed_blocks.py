"""Blocks of 32 numbers with a float16 scale, as GGUF has them, and the panels in which they lie in memory.

A row of a matrix is in / 32 blocks. In memory 16 rows make a panel of in / 32 records, and a record holds the same block of
its 16 rows: four numbers' bytes of every row in turn, then the 16 scales, then (q4_1) the 16 minima. These are the same
bytes, in an order in which one vector instruction takes four numbers of 16 rows; rows behind the last are zeros.

    q8_0   scale, 32 int8                        number = scale * int8
    q4_0   scale, 16 bytes                       number = scale * (half - 8)
    q4_1   scale, minimum, 16 bytes              number = scale * half + minimum

A byte of 4-bit blocks holds number i in its low half and number i + 16 in its high one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.interface import LinearWeights

BLOCK = 32  # numbers
PANEL_ROWS = 16
SEPARATOR = "+"  # between the kinds of a merged matrix whose parts differ, in `LinearSpec.weight_format`


@dataclass(frozen=True, slots=True)
class BlockKind:
    """One form of a block."""

    name: str
    quant_bytes: int
    has_minimum: bool = False

    @property
    def block_bytes(self) -> int:
        return self.head_bytes + self.quant_bytes

    @property
    def head_bytes(self) -> int:
        return 4 if self.has_minimum else 2


KINDS = {kind.name: kind for kind in (BlockKind("q8_0", 32), BlockKind("q4_0", 16), BlockKind("q4_1", 16, True))}


def kinds_of(weight_format: str) -> list[BlockKind] | None:
    """The kind of each part; None for a format that is none of blocks. One name stands for all parts."""
    names = weight_format.split(SEPARATOR)
    return [KINDS[name] for name in names] if all(name in KINDS for name in names) else None


def weight_format(kinds: list[BlockKind]) -> str:
    names = [kind.name for kind in kinds]
    return names[0] if len(set(names)) == 1 else SEPARATOR.join(names)


def panels_shape(kind: BlockKind, num_rows: int, num_cols: int) -> tuple[int, int, int]:
    """[panels, blocks of a row, bytes of a record], uint8."""
    return -(-num_rows // PANEL_ROWS), num_cols // BLOCK, PANEL_ROWS * kind.block_bytes


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


def dequantize(panels: Tensor, kind: BlockKind, num_rows: int) -> Tensor:
    """[num_rows, in] float32."""
    num_panels, num_blocks, _ = panels.shape
    split = PANEL_ROWS * kind.quant_bytes
    quants = panels[..., :split].reshape(num_panels, num_blocks, kind.quant_bytes // 4, PANEL_ROWS, 4)
    heads = panels[..., split:].contiguous().view(torch.float16).float()
    heads = heads.view(num_panels, num_blocks, kind.head_bytes // 2, PANEL_ROWS)
    if kind.name == "q8_0":
        numbers = quants.view(torch.int8).float()
    else:
        numbers = torch.cat([quants & 15, quants >> 4], dim=2).float()
        if not kind.has_minimum:
            numbers -= 8.0
    numbers = numbers.permute(0, 3, 1, 2, 4).reshape(num_panels * PANEL_ROWS, num_blocks, BLOCK)
    scale, *minimum = (head.transpose(1, 2).reshape(num_panels * PANEL_ROWS, num_blocks, 1) for head in heads.unbind(2))
    numbers *= scale
    if minimum:
        numbers += minimum[0]
    return numbers.reshape(num_panels * PANEL_ROWS, num_blocks * BLOCK)[:num_rows]


def dense(weights: LinearWeights) -> Tensor:
    """The whole matrix [out, in] in float32."""
    kinds = kinds_of(weights.spec.weight_format)
    assert kinds is not None
    parts = weights.spec.parts
    kinds = kinds * len(parts) if len(kinds) == 1 else kinds
    return torch.cat(
        [
            dequantize(panels, kind, num_rows)
            for panels, kind, num_rows in zip(weights.tensors.values(), kinds, parts, strict=True)
        ]
    )


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
