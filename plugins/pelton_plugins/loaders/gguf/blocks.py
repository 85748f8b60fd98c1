"""Blocks of other kinds than are kept, as blocks of a kind that is.

Q4_K   super-blocks of 256: eight blocks whose scale and minimum are numbers of 6 bits times a float16 of the super-block. As q4_1, these
       products rounded to float16 (one part in 2,048); the codes are kept.
Q5_0   as q8_0, exactly.
Q5_1, Q5_K, Q6_K   rounded anew to q8_0: at most 1 / 254 of a block's largest number away.
Layouts: ggml's quants, as the gguf package dequantizes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pelton.ops.packed_blocks import KINDS
from pelton_plugins.weight_forms.block_writing import quantize

if TYPE_CHECKING:
    from torch import Tensor

    from pelton_plugins.loaders.gguf.loader import GGUFWeight

KEPT_AS = {
    "Q8_0": "q8_0",
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q4_K": "q4_1",
    "Q5_0": "q8_0",
    "Q5_1": "q8_0",
    "Q5_K": "q8_0",
    "Q6_K": "q8_0",
}
"""By the file's kind."""


def read_kept(weight: GGUFWeight, start: int, stop: int) -> Tensor:
    """Rows [start, stop) as rows of blocks of the kind that they are kept as [stop - start, bytes] uint8."""
    name = weight.quant_type.name
    if name in OTHERS:
        return OTHERS[name](weight.blocks(start, stop))
    if name.lower() in KINDS:
        return weight.blocks(start, stop)
    return quantize(weight.read(0, start, stop), KINDS[KEPT_AS[name]])


def _q4_k(rows: Tensor) -> Tensor:
    """144 bytes a super-block: two float16, 12 bytes with eight scales and eight minima of 6 bits, 128 bytes of codes."""
    blocks = rows.reshape(rows.shape[0], -1, 144)
    both = blocks[..., :4].contiguous().view(torch.float16).float()
    low, mid, high = blocks[..., 4:8].int(), blocks[..., 8:12].int(), blocks[..., 12:16].int()
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1) * both[..., :1]
    minima = torch.cat([mid & 63, high >> 4 | mid >> 6 << 4], dim=-1) * -both[..., 1:]
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)  # of two blocks: low halves, then high ones
    codes = torch.stack([pairs & 15, pairs >> 4], dim=3).flatten(2, 3)  # [n, super-blocks, 8, 32]
    heads = torch.stack([scales, minima], dim=-1).half().view(torch.uint8)  # [n, super-blocks, 8, 4]
    quants = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat([heads, quants], dim=-1).reshape(rows.shape[0], -1)


def _q5_0(rows: Tensor) -> Tensor:
    """22 bytes a block: a float16, 32 fifth bits, 16 bytes of halves; a number is (code - 16) * scale."""
    blocks = rows.reshape(rows.shape[0], -1, 22)
    bits = blocks[..., 2:6].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    halves = torch.cat([blocks[..., 6:] & 15, blocks[..., 6:] >> 4], dim=-1)
    quants = (halves | bits.flatten(2) << 4).to(torch.int8) - 16
    return torch.cat([blocks[..., :2], quants.view(torch.uint8)], dim=-1).reshape(rows.shape[0], -1)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {"Q4_K": _q4_k, "Q5_0": _q5_0}
