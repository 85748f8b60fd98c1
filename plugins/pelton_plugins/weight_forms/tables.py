"""bitsandbytes' codes of four bits: the 16 numbers that they stand for, and how they lie in memory.

    weight [out, in] = table[code] * scale        of the row and of its block of 64 columns: formats nf4 and fp4

codes    [out, in / 2] uint8: 32 columns in 16 bytes, byte b has column b below column 16 + b (`expert_codes`).
scales   [out, in / 64] float32: the largest magnitude of the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0625 / 12, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
FP4 = (*_FP4, *(-number for number in _FP4))
TABLES = {"nf4": NF4, "fp4": FP4}
BLOCK = 64  # columns with one scale


def dequantize_table(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """[n, in] float32"""
    table = torch.tensor(TABLES[kind], device=codes.device)
    halves = codes.unflatten(1, (-1, 16)).int()
    numbers = table[torch.cat([halves & 15, halves >> 4], 2)].view(*scales.shape, BLOCK)
    return (numbers * scales[..., None]).flatten(1)
