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

from pelton import moved

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.interface import LinearWeights
else:
    __getattr__ = moved.names_of(__name__)

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
